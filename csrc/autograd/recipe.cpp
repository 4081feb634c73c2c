#include "recipe.h"

namespace memopt::autograd {

RecipeRecorder*& recipe_recorder() {
  thread_local RecipeRecorder* book = nullptr;
  return book;
}

}  // namespace memopt::autograd
