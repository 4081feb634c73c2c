// A call's node that saves without hooks (without_hooks.h).
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include <optional>

#include "ownership.h"
#include "without_hooks.h"

// A function's context has these for its node alone, whose specialisations are its friends.
namespace torch::autograd {
template <>
struct CppNode<memopt::autograd::HookedPacker> {
  static auto& saved_in(AutogradContext& context) { return context.saved_variables_; }
  static auto node_of(const AutogradContext& context) { return context.grad_fn_.lock(); }
};
}  // namespace torch::autograd

namespace memopt::autograd {

// One call's node, between its saving without hooks and its end.
class SavesWithoutHooks {
  using AutogradContext = torch::autograd::AutogradContext;
  using Context = torch::autograd::CppNode<HookedPacker>;

 public:
  void begin() { without_hooks_.emplace(); }

  // The same for a node that saves `tensors`, if there is someone to pack them afterwards.
  void begin_for_packer(AutogradContext& context, const torch::autograd::variable_list& tensors) {
    auto* packer = packer_here();
    // The kernel of memopt's ops has run when they save.
    if (packer == nullptr || !packer->packs_afterwards(/*most=*/0)) return;
    for (const auto& tensor : tensors) {
      if (tensor.defined() && is_traced(tensor)) return;
    }
    packer_ = packer;
    context_ = &context;
    node_ = Context::node_of(context);
    begin();
  }

  // To be called when the node has saved; whether the function is to end.
  bool end() {
    without_hooks_.reset();
    if (packer_ == nullptr) return false;
    for (auto& saved : Context::saved_in(*context_)) packer_->pack_saved(node_, saved);
    return packer_->is_complete();
  }

 private:
  std::optional<WithoutHooks> without_hooks_;
  HookedPacker* packer_ = nullptr;
  AutogradContext* context_ = nullptr;
  NodePointer node_;  // keeps the context
};

}  // namespace memopt::autograd
