// The second fate: an output of one of memopt's ops is not kept. Its recipe stands in for it: the
// op, and what the op's own node saves anyway (autograd/recipe.h). recipe_registry.h finds out
// which tensor has one.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "../autograd/recipe.h"
#include "geometry.h"
#include "handle.h"

namespace memopt::saved {

class RecipeHandle : public Handle {
 public:
  using Run = std::function<at::Tensor(const std::vector<at::Tensor>&)>;
  using RunWith =
      std::function<at::Tensor(const std::vector<at::Tensor>&, const autograd::Behind&)>;
  using Gradient = std::function<at::Tensor(const std::vector<at::Tensor>&, const autograd::Behind&,
                                            const at::Tensor&)>;
  // Empty where the op was not given an optional input.
  using Inputs = std::vector<c10::intrusive_ptr<Handle>>;

  // `geometry` is the output's; run_with, gradient and behind as autograd::Recipe has them.
  RecipeHandle(Inputs inputs, Run run, Geometry geometry, RunWith run_with = {},
               Gradient gradient = {}, std::optional<autograd::Behind> behind = {});

  void release_resources() override { inputs_.clear(); }
  at::Tensor restore() override;
  bool is_there() const override;
  int64_t chain_length() const override { return chain_length_; }

  // Where `grad` is in the output's order.
  bool has_gradient(const std::optional<Geometry>& view, const at::Tensor& grad) const override;
  at::Tensor gradient(const autograd::Behind& behind, const at::Tensor& grad) override;

 private:
  std::vector<at::Tensor> restore_inputs() const;
  // In one step with what it is an activation of, which is then not made; undefined where that is
  // there already, is no recipe, or cannot.
  at::Tensor restore_at_once() const;

  Inputs inputs_;
  Run run_;
  Geometry geometry_;
  RunWith run_with_;
  Gradient gradient_;
  std::optional<autograd::Behind> behind_;
  int64_t chain_length_ = 1;
};

}  // namespace memopt::saved
