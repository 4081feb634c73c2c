// Tensors of the simulated device, and what stands in for them on a stream's thread.
#pragma once

#include <ATen/core/Tensor.h>

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

}  // namespace sim
