// Whether what this thread computes now is an op's output once more, for backward: a recipe's
// (saved/recipe.h), or what the weights of linears behind an op ask for. For who observes a step.
#pragma once

namespace memopt::autograd {

inline bool& output_is_made_again() {
  thread_local bool is_made_again = false;
  return is_made_again;
}

class MakesOutputAgain {
 public:
  MakesOutputAgain() : before_(output_is_made_again()) { output_is_made_again() = true; }
  ~MakesOutputAgain() { output_is_made_again() = before_; }
  MakesOutputAgain(const MakesOutputAgain&) = delete;
  MakesOutputAgain& operator=(const MakesOutputAgain&) = delete;

 private:
  const bool before_;
};

}  // namespace memopt::autograd
