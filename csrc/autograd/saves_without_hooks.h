// A call's node that saves without hooks (without_hooks.h).
#pragma once

#include <optional>

#include "graph_node.h"
#include "ownership.h"
#include "without_hooks.h"

namespace memopt::autograd {

// One call's node, between its saving without hooks and its end.
class SavesWithoutHooks {
 public:
  void begin() { without_hooks_.emplace(); }

  // The same for a node that is to save `tensors`, if there is someone to pack them afterwards.
  void begin_for_packer(const variable_list& tensors) {
    auto* packer = packer_here();
    // The kernel of memopt's ops has run when they save.
    if (packer == nullptr || !packer->packs_afterwards(/*most=*/0)) return;
    for (const Tensor& tensor : tensors) {
      if (tensor.defined() && is_traced(tensor)) return;
    }
    packer_ = packer;
    begin();
  }

  // To be called when the node has saved; whether the function is to end.
  bool end(GraphNode& node) {
    without_hooks_.reset();
    if (packer_ == nullptr) return false;
    const NodePointer pointer = node.getptr();
    for (auto& saved : node.saved()) packer_->pack_saved(pointer, saved);
    return packer_->is_complete();
  }

 private:
  std::optional<WithoutHooks> without_hooks_;
  HookedPacker* packer_ = nullptr;
};

}  // namespace memopt::autograd
