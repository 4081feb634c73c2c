// A handle in place of one tensor that a node has saved already, without hooks. Nothing of Python
// takes part, neither where the node is made nor in backward.
#pragma once

#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <utility>

#include "handle.h"

namespace memopt::saved {

class HandleHooks : public torch::autograd::SavedVariableHooks {
 public:
  HandleHooks(c10::intrusive_ptr<Handle> handle, const torch::autograd::SavedVariable* saved)
      : handle_(std::move(handle)), saved_(saved) {}

  void call_pack_hook(const at::Tensor&) override {}  // the handle stands for it already
  at::Tensor call_unpack_hook() override { return restore(*handle_, gradient_wanted_here()); }

  // For compiled autograd, which knows hooks of Python's alone: a function and its argument.
  using PythonHook = std::pair<c10::SafePyObject, c10::SafePyObject>;
  std::optional<PythonHook> retrieve_unpack_hook_data() const override {
    return as_python_hook(handle_);
  }
  // To be set by python/hooks.cpp.
  static inline PythonHook (*as_python_hook)(const c10::intrusive_ptr<Handle>&) = nullptr;
  // Handles know no Python: where one waits for another thread, that one may need the GIL, which
  // code that reads a node's saved tensors holds. wanted: null, or what is asked for in its place.
  static inline at::Tensor (*restore)(Handle&, autograd::GradientWanted* wanted) = nullptr;

 private:
  autograd::GradientWanted* gradient_wanted_here() const {
    autograd::GradientWanted* const wanted = autograd::gradient_wanted();
    return wanted != nullptr && wanted->of == saved_ ? wanted : nullptr;
  }

  c10::intrusive_ptr<Handle> handle_;
  const torch::autograd::SavedVariable* const saved_;  // in whose place: told apart, never read
};

// What a node has saved without hooks, if these would have got it: they get no number that PyTorch
// has made a tensor.
at::Tensor tensor_for_hooks(const torch::autograd::SavedVariable& saved);

void put_in_place(torch::autograd::SavedVariable& saved, c10::intrusive_ptr<Handle> handle);

}  // namespace memopt::saved
