// The second fate: an output of one of memopt's ops is not kept. Its recipe stands in for it: the
// op, and what the op's own node saves anyway (autograd/recipe.h). recipe_registry.h finds out
// which tensor has one.
#pragma once

#include <functional>
#include <vector>

#include "geometry.h"
#include "handle.h"

namespace memopt::saved {

class RecipeHandle : public Handle {
 public:
  using Run = std::function<at::Tensor(const std::vector<at::Tensor>&)>;
  // Empty where the op was not given an optional input.
  using Inputs = std::vector<c10::intrusive_ptr<Handle>>;

  // `geometry` is the output's.
  RecipeHandle(Inputs inputs, Run run, Geometry geometry);

  void release_resources() override { inputs_.clear(); }
  at::Tensor restore() override;
  bool is_there() const override;
  int64_t chain_length() const override { return chain_length_; }

 private:
  Inputs inputs_;
  Run run_;
  Geometry geometry_;
  int64_t chain_length_ = 1;
};

}  // namespace memopt::saved
