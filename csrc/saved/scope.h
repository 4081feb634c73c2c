// A scope decides what becomes of the tensors that autograd saves in it (memopt.saved_tensors).
//
// Each tensor is offered to the scope's fate. If the fate does not take it, it goes to `outer`, the
// hooks that were active when the scope was entered, or is kept. If the scope makes recipes, the
// registry is told which handle holds each tensor.
#pragma once

#include "fate.h"
#include "handle_hooks.h"
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

  bool pack_saved(const autograd::NodePointer& node,
                  torch::autograd::SavedVariable& saved) override {
    if (leaves_saved())
      return !registry_->see_saved(node, saved) && outer_->pack_saved(node, saved);
    const auto tensor = tensor_for_hooks(saved);
    if (!tensor.defined()) return false;
    auto handle = fate_->take(tensor);
    const bool is_given = !handle.defined();
    if (is_given) handle = registry_->hold(tensor, outer_->pack(tensor));
    put_in_place(saved, std::move(handle));
    return is_given;
  }
  void note_arguments(const void* op, Numbers numbers) override {
    outer_->note_arguments(op, numbers);
  }
  bool pack_arguments(const void* op, OpArguments arguments) override {
    return is_recipe_scope() && outer_.defined() && outer_->pack_arguments(op, arguments);
  }

  bool is_of_region() const override { return outer_.defined() && outer_->is_of_region(); }
  bool packs_afterwards(size_t most) const override {
    return is_recipe_scope() && outer_.defined() && outer_->packs_afterwards(most);
  }

  bool is_complete() override { return outer_.defined() && outer_->is_complete(); }

  bool leaves_saved() const override {
    return is_recipe_scope() && outer_.defined() && outer_->leaves_saved();
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
