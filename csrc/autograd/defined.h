// A node takes no undefined tensors. So optional arguments travel as those that there are, and the
// place of each among them.
#pragma once

#include <vector>

#include "support.h"

namespace memopt::autograd {

struct Defined {
  torch::autograd::variable_list tensors;
  std::vector<int64_t> places;  // of each argument in `tensors`, or -1
  bool needs_node = false;
};

inline Defined take_defined(const torch::autograd::variable_list& arguments) {
  Defined defined;
  for (const Tensor& tensor : arguments) {
    defined.needs_node = defined.needs_node || records(tensor);
    defined.places.push_back(tensor.defined() ? static_cast<int64_t>(defined.tensors.size()) : -1);
    if (tensor.defined()) defined.tensors.push_back(tensor);
  }
  return defined;
}

inline torch::autograd::variable_list put_back(at::TensorList tensors,
                                               const std::vector<int64_t>& places) {
  torch::autograd::variable_list arguments(places.size());
  for (size_t i = 0; i < places.size(); ++i) {
    if (places[i] >= 0) arguments[i] = tensors[places[i]];
  }
  return arguments;
}

}  // namespace memopt::autograd
