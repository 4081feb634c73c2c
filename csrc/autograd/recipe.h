// How an op's output is made again: the op's own arguments, which its node saves anyway.
//
// An op that runs with a node tells the thread's RecipeBook, if there is one (inside
// memopt.recompute()); who keeps the book may then save the recipe in the output's place
// (saved/recipes.h).
#pragma once

#include <functional>
#include <vector>

#include "support.h"

namespace memopt::autograd {

struct Recipe {
  std::vector<Tensor> inputs;  // undefined where an optional one was not given
  // By dispatcher ops below autograd; the same bits as forward wrote, in the same strides. Holds no
  // tensor.
  std::function<Tensor(const std::vector<Tensor>&)> run;
};

struct RecipeBook {
  virtual ~RecipeBook() = default;
  virtual void add(const Tensor& output, Recipe recipe) = 0;
};

// This thread's; null outside memopt.recompute().
RecipeBook*& recipe_book();

// To be called in an op's node with its output; make() is called only where there is a book.
template <class Make>
void remember(const Tensor& output, const Make& make) {
  if (recipe_book() == nullptr || is_traced(output)) return;
  recipe_book()->add(output, make());
}

}  // namespace memopt::autograd
