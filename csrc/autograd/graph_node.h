// What memopt puts into PyTorch's graph: a node that keeps tensors and the options of one function,
// and calls that function for the gradients of its arguments.
//
// torch::autograd::Function does the same for arguments and outputs of any kind. For that it notes
// the sizes and types of all of them, keeps options in a map by name, and spells the name of its
// class anew in each backward: a third of what a layer norm of a few elements took on the host.
// Here arguments are tensors, outputs are new tensors, and a gradient that is undefined stays so.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <c10/util/Type.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "behind.h"
#include "options.h"
#include "support.h"

namespace memopt::autograd {

// PyTorch's node, which lets go of what it holds when nobody needs it any more: newer versions ask
// for that by a function, older ones destroy the node.
template <class Node, bool kIsAsked = std::is_base_of_v<c10::intrusive_ptr_target, Node>>
struct ReleasedNode : Node {
  virtual void release_resources() {}
};
template <class Node>
struct ReleasedNode<Node, true> : Node {};

class GraphNode : public ReleasedNode<torch::autograd::Node> {
 public:
  using SavedVariables = std::vector<torch::autograd::SavedVariable>;
  // The gradients of the arguments, in their order, from what was saved and the outputs' gradients;
  // undefined where not wanted.
  using Backward = std::function<variable_list(variable_list, const variable_list&, const Wanted&)>;

  // In the order in which a call does it. Arguments: lists of tensors, or tensors, of which some
  // may be undefined.
  template <class... Arguments>
  void set_arguments(const Arguments&... arguments) {
    set_next_edges(torch::autograd::collect_next_edges(arguments...));
  }
  // Of the outputs, in their order, each one; whether it has a gradient.
  void add_output(const Tensor& output, bool has_gradient = true);
  // What backward reads. Hooks pack it, and may throw: a region's recompute ends so.
  void save(const variable_list& tensors);

  SavedVariables& saved() { return saved_; }

  void release_variables() override;
  void release_resources() override;
  void compiled_args(torch::autograd::CompiledNodeArgs& args) const override;
  variable_list apply_with_saved(const variable_list& grads,
                                 torch::autograd::SwapSavedVariables& swapped) override;

 protected:
  variable_list apply(variable_list&& grads) override;

 private:
  virtual variable_list backward(variable_list saved, const variable_list& grads,
                                 const Wanted& wanted) const = 0;
  // The function alone, for compiled autograd, and what it does besides its tensors.
  virtual Backward without_node() const = 0;
  virtual at::IValue options() const = 0;
  // If the function is this activation of what was saved first, and the only argument that has a
  // gradient.
  virtual std::optional<Behind> behind() const = 0;

  // first: what was saved first, if it is unpacked.
  variable_list unpacked(Tensor first = {});
  // The gradient of what was saved first, from whoever stands for it; undefined if nobody answers,
  // and then `first` is what was saved.
  Tensor gradient_from_recipe(const variable_list& grads, Tensor* first);
  Wanted wanted_here() const;

  SavedVariables saved_;
  bool is_released_ = false;
};

// Function is a struct of plain fields with visit(function, f), as in options.h, and
//   variable_list backward(variable_list saved, const variable_list& grads,
//                          const Wanted& wanted) const
template <class Function>
class NodeOf final : public GraphNode {
 public:
  explicit NodeOf(Function function) : function_(std::move(function)) {}

  std::string name() const override {
    static const std::string name = c10::demangle(typeid(Function).name());
    return name;
  }

 private:
  variable_list backward(variable_list saved, const variable_list& grads,
                         const Wanted& wanted) const override {
    return function_.backward(std::move(saved), grads, wanted);
  }

  Backward without_node() const override {
    return [function = function_](variable_list saved, const variable_list& grads,
                                  const Wanted& wanted) {
      return function.backward(std::move(saved), grads, wanted);
    };
  }

  at::IValue options() const override { return packed_options(function_); }

  std::optional<Behind> behind() const override {
    if constexpr (requires { function_.behind(); }) return function_.behind();
    return std::nullopt;
  }

  Function function_;
};

// Around what a node's function computes in forward: autograd sees none of it.
struct BelowAutograd {
  at::AutoGradMode no_grad{false};
  at::AutoDispatchBelowADInplaceOrView below;
};

// Raises the error of PyTorch's C++ functions inside of a transform of torch.func.
void check_transforms();

// A node counts its owners itself, or, in older versions of PyTorch, a shared_ptr does.
template <class Node, class... Args>
auto new_node(Args&&... args) {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, Node>) {
    return c10::make_intrusive<Node>(std::forward<Args>(args)...);
  } else {
    return std::shared_ptr<Node>(new Node(std::forward<Args>(args)...),
                                 [](auto* node) { deleteNode(node); });
  }
}

template <class Function>
auto make_node(Function function) {
  check_transforms();
  return new_node<NodeOf<Function>>(std::move(function));
}

}  // namespace memopt::autograd
