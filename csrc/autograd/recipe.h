// How an op's output is made again: by the op, from its own arguments, which its node saves anyway.
//
// Inside memopt.recipes() a thread has a RecipeRecorder, the interface of the registry in
// saved/recipe_registry.h. An op that runs with a node enters its recipe there, and the registry
// may then save the recipe in place of the output.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "behind.h"
#include "op.h"
#include "ownership.h"
#include "without_hooks.h"

namespace memopt::autograd {

struct Recipe {
  std::vector<Tensor> inputs;  // undefined where an optional one was not given
  // By dispatcher ops below autograd; the same bits as forward wrote, in the same strides. Holds no
  // tensor.
  std::function<Tensor(const std::vector<Tensor>&)> run;
  // What the node of the output has saved without hooks.
  variable_list saved = {};
  // Makes an activation of the output at once, in the bits of one after the other, so that the
  // output itself need not exist; null: nothing does.
  std::function<Tensor(const std::vector<Tensor>&, const Behind&)> run_with = {};
  // The gradient of the output where that is read by an activation, from the gradient of what the
  // activation makes of it; null likewise.
  std::function<Tensor(const std::vector<Tensor>&, const Behind&, const Tensor&)> gradient = {};
  // The output is this activation of the only input.
  std::optional<Behind> behind = {};
};

struct RecipeRecorder {
  virtual ~RecipeRecorder() = default;
  virtual void add(const Tensor& output, Recipe recipe) = 0;
  // Where an op's output stands in the graph, once it does: what casts it leads there. `saved`:
  // what the op's node has saved without hooks.
  virtual void place(const Tensor& output, const variable_list& saved) = 0;
  // Whether a node that is about to save these may do so without hooks: they would have each of
  // them kept as it is.
  virtual bool needs_no_hooks(const variable_list& saved) = 0;
  // Whether a node that is about to save others may do so without hooks too, if each of them is
  // shown afterwards.
  virtual bool sees_saved(const variable_list& saved) = 0;
  virtual bool see_saved(const NodePointer& node, torch::autograd::SavedVariable& saved) = 0;
  // `tensor` is about to be written in place. If it has a recipe that would be used: a tensor
  // without memory that has it from now on, to be saved in the place of what is overwritten, and
  // that stands where `tensor` stands in the graph. Undefined otherwise.
  virtual Tensor stand_in_for(const Tensor& tensor) = 0;
};

// This thread's; null outside memopt.recipes().
RecipeRecorder*& recipe_recorder();

// Of an op's output. `saved`: what its node saves without hooks.
template <class Op>
Recipe recipe_of(const typename Op::Options& options, const Produced& made,
                 const variable_list& saved) {
  std::vector<Tensor> inputs = made.reads;
  const auto reads = static_cast<std::ptrdiff_t>(inputs.size());
  if (Op::kRandom) inputs.insert(inputs.end(), made.extras.begin(), made.extras.end());
  Recipe recipe{std::move(inputs),
                [options, reads](const auto& read) {
                  return Op::forward_again(options, {read.begin(), read.begin() + reads},
                                           {read.begin() + reads, read.end()});
                },
                saved};
  if constexpr (requires { Op::behind(options); }) recipe.behind = Op::behind(options);
  if constexpr (requires { Op::with_behind(options, Behind{}); }) {
    if (Op::takes_behind(options)) {
      recipe.run_with = [options, reads](const auto& read, const Behind& behind) {
        return Op::forward_again(Op::with_behind(options, behind),
                                 {read.begin(), read.begin() + reads},
                                 {read.begin() + reads, read.end()});
      };
      recipe.gradient = [options, reads](const auto& read, const Behind& behind,
                                         const Tensor& grad) {
        return Op::gradient_of_output(Op::with_behind(options, behind),
                                      {read.begin(), read.begin() + reads},
                                      {read.begin() + reads, read.end()}, grad);
      };
    }
  }
  return recipe;
}

}  // namespace memopt::autograd
