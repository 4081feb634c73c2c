// A scope decides what becomes of the tensors that autograd saves in it (memopt.saved_tensors).
//
// Each tensor is offered to the scope's fate. If the fate does not take it, it goes to `outer`, the
// hooks that were active when the scope was entered, or is kept. If the scope makes recipes, the
// registry is told which handle holds each tensor.
#pragma once

#include "fate.h"
#include "kept.h"
#include "recipe_registry.h"

namespace memopt::saved {

class Scope : public Packer {
 public:
  // `registry` and `outer` may be empty.
  Scope(c10::intrusive_ptr<Fate> fate, c10::intrusive_ptr<RecipeRegistry> registry,
        c10::intrusive_ptr<Packer> outer)
      : fate_(std::move(fate)), registry_(std::move(registry)), outer_(std::move(outer)) {
    // Both runs of a region must save the same tensors, whoever holds a branch's result in them.
    if (registry_.defined() && is_recipe_scope() && !is_of_region())
      registry_->keep_branches(outer_);
  }

  c10::intrusive_ptr<Handle> pack(const at::Tensor& tensor) override {
    auto handle = fate_->take(tensor);
    if (handle.defined() && is_recipe_scope()) return handle;
    if (!handle.defined()) {
      handle = outer_.defined() ? outer_->pack(tensor) : keep(tensor);
      if (!handle.defined()) return {};
    }
    return registry_.defined() ? registry_->hold(tensor, std::move(handle)) : handle;
  }

  bool is_of_region() const override { return outer_.defined() && outer_->is_of_region(); }
  bool packs_afterwards(size_t most) const override {
    return is_recipe_scope() && outer_.defined() && outer_->packs_afterwards(most);
  }

  // Null if no recipes are made here.
  RecipeRegistry* registry() const { return registry_.get(); }
  // Whether what it gets goes to its registry and nowhere else.
  bool is_alone() const { return is_recipe_scope() && !outer_.defined(); }
  // Whether making recipes is all it does.
  bool is_recipe_scope() const { return fate_.get() == registry_.get(); }

 private:
  c10::intrusive_ptr<Fate> fate_;
  c10::intrusive_ptr<RecipeRegistry> registry_;
  c10::intrusive_ptr<Packer> outer_;
};

}  // namespace memopt::saved
