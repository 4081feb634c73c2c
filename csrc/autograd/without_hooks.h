// Nodes that save without the default hooks, and show what they have saved to those whom the hooks
// stand for: a hook is a Python callable, and costs some 2 us of host time for each tensor.
#pragma once

#include <ATen/SavedTensorHooks.h>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <torch/csrc/autograd/edge.h>

namespace torch::autograd {
class SavedVariable;
}

namespace memopt::autograd {

// While it lives, what this thread saves for backward meets no default hooks. They stay on their
// stack; it says what PyTorch says while it traces, of which nothing but the hooks takes notice.
class WithoutHooks {
 public:
  WithoutHooks() : before_(at::SavedTensorDefaultHooks::set_tracing(true)) {}
  ~WithoutHooks() { at::SavedTensorDefaultHooks::set_tracing(before_); }
  WithoutHooks(const WithoutHooks&) = delete;
  WithoutHooks& operator=(const WithoutHooks&) = delete;

 private:
  const bool before_;
};

using NodePointer = decltype(torch::autograd::Edge().function);

// Whom default hooks stand for.
struct HookedPacker {
  virtual ~HookedPacker() = default;

  // Whether a node may save without hooks and have its tensors packed when it has, in the order in
  // which hooks would get them. `most`: so many of them at most before the op's kernel has run,
  // which hooks would spare where one of them ends the function.
  virtual bool packs_afterwards(size_t most) const {
    static_cast<void>(most);
    return false;
  }
  // Packs what `node` has saved without hooks; whether a region has got it.
  virtual bool pack_saved(const NodePointer& node, torch::autograd::SavedVariable& saved) = 0;
  // Whether all is there that the function runs for; true once. The caller then calls
  // end_function().
  virtual bool is_complete() { return false; }

  // What ran last is an op, known by an address of its own, and what a region has got of it are
  // these of its arguments, by their numbers; -1: something else.
  using Numbers = c10::ArrayRef<int8_t>;
  virtual void note_arguments(const void* op, Numbers numbers) {
    static_cast<void>(op), static_cast<void>(numbers);
  }
  // Packs the arguments of an op that is the last one, in its place; false: it is to run.
  using OpArguments = c10::ArrayRef<const at::Tensor*>;
  virtual bool pack_arguments(const void* op, OpArguments arguments) {
    static_cast<void>(op), static_cast<void>(arguments);
    return false;
  }

  // Ends the function as an empty handle does, from fewer frames. python/hooks.cpp sets it.
  static inline void (*end_function)() = nullptr;
};

// That of the hooks that autograd asks first here, where they do nothing else; null: other hooks,
// or none. python/hooks.cpp sets the question.
inline HookedPacker* (*packer_here)() = []() -> HookedPacker* { return nullptr; };

}  // namespace memopt::autograd
