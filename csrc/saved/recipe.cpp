#include "recipe.h"

#include <ATen/ops/empty_strided.h>

#include <algorithm>

#include "../autograd/made_again.h"
#include "untracked.h"

namespace memopt::saved {

RecipeHandle::RecipeHandle(Inputs inputs, Run run, Geometry geometry)
    : inputs_(std::move(inputs)), run_(std::move(run)), geometry_(std::move(geometry)) {
  for (const auto& input : inputs_) {
    if (input.defined()) chain_length_ = std::max(chain_length_, 1 + input->chain_length());
  }
}

bool RecipeHandle::is_there() const {
  return std::all_of(inputs_.begin(), inputs_.end(), [](const c10::intrusive_ptr<Handle>& input) {
    return !input.defined() || input->is_there();
  });
}

at::Tensor RecipeHandle::restore() {
  std::vector<at::Tensor> tensors;
  tensors.reserve(inputs_.size());
  for (const auto& input : inputs_) {
    tensors.push_back(input.defined() ? input->restore() : at::Tensor());
    TORCH_CHECK(!tensors.back().defined() || has_memory(tensors.back()),
                "memopt.recipes(): a tensor that a recipe reads must be in memory in backward, "
                "got one of shape ",
                tensors.back().sizes(), " whose storage was freed");
  }
  const Untracked untracked;
  const autograd::MakesOutputAgain makes_again;
  const at::Tensor output = run_(tensors);
  if (output.strides() == at::IntArrayRef(geometry_.strides)) return output;
  // Outer hooks gave an input back in other strides, and an activation's output takes its input's
  // strides.
  return at::empty_strided(geometry_.sizes, geometry_.strides, output.options()).copy_(output);
}

}  // namespace memopt::saved
