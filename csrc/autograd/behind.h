// An activation and what it reads, where that has a recipe (recipe.h). Both ways need not make what
// it reads: forward again is one call for both ops, and backward is the gradient of what it reads.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

namespace torch::autograd {
class SavedVariable;
}

namespace memopt::autograd {

// An activation, by its name.
struct Behind {
  std::string activation;
  std::optional<double> scalar;
};

// What the node of an activation asks for while it unpacks what it reads: the gradient of that, in
// its place. Whoever stands for the saved tensor may answer, and then need not restore it.
struct GradientWanted {
  const torch::autograd::SavedVariable* of;
  const Behind& behind;
  const at::Tensor& grad;  // of the activation's output
  at::Tensor answer = {};
};

// This thread's; null where nothing is asked for.
inline GradientWanted*& gradient_wanted() {
  thread_local GradientWanted* wanted = nullptr;
  return wanted;
}

}  // namespace memopt::autograd
