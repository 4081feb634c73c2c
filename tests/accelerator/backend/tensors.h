// Tensors of the simulated device, and what stands in for them on a stream's thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include "streams.h"

namespace sim {

inline bool is_sim(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

at::Tensor empty_like_geometry(const at::Tensor& like, c10::Device device);

// A CPU tensor on the same elements, by the hidden mapping. It keeps nothing allocated.
at::Tensor hidden_view(const at::Tensor& tensor);

// The same for a CPU tensor's memory.
at::Tensor unowned(const at::Tensor& tensor);

// `value` with every tensor in it replaced.
template <class Function>
c10::IValue with_tensors(const c10::IValue& value, const Function& function) {
  const auto apply = [&](const at::Tensor& t) { return t.defined() ? function(t) : t; };
  if (value.isTensor()) return apply(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(apply(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor.has_value() ? std::optional(apply(*tensor)) : std::nullopt);
    }
    return list;
  }
  return value;
}

}  // namespace sim
