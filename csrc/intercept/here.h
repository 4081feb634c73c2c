// What the scopes that a thread has entered say of a call made now. The scopes stand above this
// layer: python/scope.cpp sets the question when the library is loaded.
#pragma once

#include "../saved/recipe_registry.h"

namespace memopt::intercept {

struct Here {
  // Makes recipes of what is saved now; null: nothing does.
  saved::RecipeRegistry* recipes = nullptr;
  // Whether PyTorch's functions are to be memopt's. Only where there are recipes.
  bool functions = false;
};

inline Here (*here)() = [] { return Here{}; };

// Whether it would cost nothing to save the tensor here: recipes are made, and it is held already
// or has a recipe. PyTorch's relu and sigmoid save their output, which the next layer saves as
// well, so that memopt's, which save their input, are a gain only there. Anywhere else they would
// be none, and a loss where the output is saved outside of the scope.
inline bool is_kept_anyway(const at::Tensor& tensor) {
  auto* recipes = here().recipes;
  return recipes != nullptr && recipes->keeps_anyway(tensor);
}

}  // namespace memopt::intercept
