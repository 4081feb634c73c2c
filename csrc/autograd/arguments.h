// A node's tensor arguments: the op's inputs and the linears behind it.
//
// A node takes no undefined tensors. So optional arguments travel as those that there are, and the
// place of each among them.
#pragma once

#include <c10/util/SmallVector.h>

#include <vector>

#include "recipe.h"
#include "saves_without_hooks.h"
#include "support.h"

namespace memopt::autograd {

// Each weight is [out_i, features]; each bias undefined or [out_i].
struct Linears {
  variable_list weights;
  variable_list biases;

  bool requires_grad(size_t i) const {
    return weights[i].requires_grad() || (biases[i].defined() && biases[i].requires_grad());
  }
};

// Which arguments there are, in their order: the inputs, the weights, the biases.
class Places {
 public:
  Places(const variable_list& inputs, const Linears& behind) : linears_(behind.weights.size()) {
    for (const variable_list* list : {&inputs, &behind.weights, &behind.biases}) {
      for (const Tensor& tensor : *list) places_.push_back(tensor.defined() ? given_++ : -1);
    }
  }

  // Nothing where all arguments of an op without linears are there.
  void save(AutogradContext* ctx) const {
    if (linears_ == 0 && all_given()) return;
    std::vector<int64_t> saved(places_.begin(), places_.end());
    saved.push_back(static_cast<int64_t>(linears_));
    ctx->saved_data["places"] = std::move(saved);
  }

  static Places restore(AutogradContext* ctx, size_t inputs) {
    Places restored;
    const auto found = ctx->saved_data.find("places");
    if (found == ctx->saved_data.end()) {
      for (size_t i = 0; i < inputs; ++i) restored.places_.push_back(restored.given_++);
      return restored;
    }
    const auto saved = found->second.toIntVector();
    restored.places_.assign(saved.begin(), saved.end() - 1);
    restored.linears_ = static_cast<size_t>(saved.back());
    for (const int64_t place : restored.places_) restored.given_ += place >= 0 ? 1 : 0;
    return restored;
  }

  size_t linears() const { return linears_; }
  size_t inputs() const { return places_.size() - 2 * linears_; }
  bool all_given() const { return given_ == static_cast<int64_t>(places_.size()); }

  bool needs_grad(AutogradContext* ctx, size_t argument) const {
    return places_[argument] >= 0 && ctx->needs_input_grad(static_cast<size_t>(places_[argument]));
  }

  // What a node returns: a gradient for each tensor that there is, between those of the two
  // arguments of Function::forward that are no tensors.
  variable_list no_gradients() const { return variable_list(static_cast<size_t>(given_) + 2); }
  void set(variable_list* gradients, size_t argument, Tensor gradient) const {
    if (places_[argument] >= 0) {
      (*gradients)[static_cast<size_t>(places_[argument]) + 1] = std::move(gradient);
    }
  }

 private:
  Places() = default;

  c10::SmallVector<int64_t, 8> places_;  // among the tensors that there are, or -1
  int64_t given_ = 0;
  size_t linears_ = 0;
};

struct Arguments {
  variable_list inputs;
  Linears behind;
  Places places;
  variable_list saved_outputs;  // which the node saves itself
  // What the node saves without hooks for a scope's recipes to read, and what keeps hooks away.
  variable_list saved_without_hooks;
  SavesWithoutHooks without_hooks;

  Arguments(variable_list inputs_, Linears behind_)
      : inputs(std::move(inputs_)), behind(std::move(behind_)), places(inputs, behind) {}

  // Those that there are: the inputs themselves where that is all, or in `storage`.
  at::TensorList given(variable_list* storage) const {
    if (behind.weights.empty() && places.all_given()) return inputs;
    for (const variable_list* list : {&inputs, &behind.weights, &behind.biases}) {
      for (const Tensor& tensor : *list) {
        if (tensor.defined()) storage->push_back(tensor);
      }
    }
    return *storage;
  }
};

}  // namespace memopt::autograd
