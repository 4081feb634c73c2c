#include "recipe.h"

#include <ATen/ops/empty_strided.h>

#include <algorithm>

#include "../autograd/made_again.h"
#include "shared.h"
#include "untracked.h"

namespace memopt::saved {

RecipeHandle::RecipeHandle(Inputs inputs, Run run, Geometry geometry, RunWith run_with,
                           Gradient gradient, std::optional<autograd::Behind> behind)
    : inputs_(std::move(inputs)),
      run_(std::move(run)),
      geometry_(std::move(geometry)),
      run_with_(std::move(run_with)),
      gradient_(std::move(gradient)),
      behind_(std::move(behind)) {
  for (const auto& input : inputs_) {
    if (input.defined()) chain_length_ = std::max(chain_length_, 1 + input->chain_length());
  }
}

bool RecipeHandle::is_there() const {
  return std::all_of(inputs_.begin(), inputs_.end(), [](const c10::intrusive_ptr<Handle>& input) {
    return !input.defined() || input->is_there();
  });
}

std::vector<at::Tensor> RecipeHandle::restore_inputs() const {
  std::vector<at::Tensor> tensors;
  tensors.reserve(inputs_.size());
  for (const auto& input : inputs_) {
    tensors.push_back(input.defined() ? input->restore() : at::Tensor());
    TORCH_CHECK(!tensors.back().defined() || has_memory(tensors.back()),
                "memopt.recipes(): a tensor that a recipe reads must be in memory in backward, "
                "got one of shape ",
                tensors.back().sizes(), " whose storage was freed");
  }
  return tensors;
}

at::Tensor RecipeHandle::restore_at_once() const {
  if (!behind_.has_value()) return {};
  auto* const reader = dynamic_cast<Reader*>(inputs_[0].get());
  if (reader == nullptr) return {};
  const auto* const source = dynamic_cast<const RecipeHandle*>(reader->shared()->source().get());
  const bool takes = source != nullptr && source->run_with_ &&
                     (!reader->view().has_value() || *reader->view() == source->geometry_);
  if (!takes || !reader->pass_by()) return {};
  const auto tensors = source->restore_inputs();
  const Untracked untracked;
  const autograd::MakesOutputAgain makes_again;
  return source->run_with_(tensors, *behind_);
}

bool RecipeHandle::has_gradient(const std::optional<Geometry>& view, const at::Tensor& grad) const {
  return gradient_ && (!view.has_value() || *view == geometry_) &&
         grad.scalar_type() == geometry_.dtype &&
         grad.sizes() == at::IntArrayRef(geometry_.sizes) &&
         grad.strides() == at::IntArrayRef(geometry_.strides);
}

at::Tensor RecipeHandle::gradient(const autograd::Behind& behind, const at::Tensor& grad) {
  const auto tensors = restore_inputs();
  const Untracked untracked;
  return gradient_(tensors, behind, grad);
}

at::Tensor RecipeHandle::restore() {
  at::Tensor output = restore_at_once();
  if (!output.defined()) {
    const auto tensors = restore_inputs();
    const Untracked untracked;
    const autograd::MakesOutputAgain makes_again;
    output = run_(tensors);
  }
  if (output.strides() == at::IntArrayRef(geometry_.strides)) return output;
  // Outer hooks gave an input back in other strides, and an activation's output takes its input's
  // strides.
  const Untracked untracked;
  return at::empty_strided(geometry_.sizes, geometry_.strides, output.options()).copy_(output);
}

}  // namespace memopt::saved
