#include "recipe.h"

namespace memopt::autograd {

RecipeBook*& recipe_book() {
  thread_local RecipeBook* book = nullptr;
  return book;
}

}  // namespace memopt::autograd
