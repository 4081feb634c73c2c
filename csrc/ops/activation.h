// Activations by name.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

#include "../kernels/cpu/kernels.h"

namespace memopt::ops {

// A name in kernels/activation.h, and the scalar of an activation that takes one.
kernels::ActivationSpec parse_activation(const char* op, std::string_view name,
                                         std::optional<double> scalar);

// Uninitialised. PyTorch's backward of ReLU takes the memory order of its output, the others that
// of the gradient.
at::Tensor empty_activation_gradient(const kernels::ActivationSpec& activation,
                                     const at::Tensor& grad_output, const at::Tensor& input);

// An activation over arrays of a norm's kernel while they are in the cache, on the CPU. Ranges are
// of elements.
class ActivationOver {
 public:
  // Of arrays of the input's dtype.
  ActivationOver(const kernels::cpu::Kernels& cpu, const kernels::ActivationSpec& activation,
                 const at::Tensor& input, bool stream_stores);

  // y <- f(y)
  void forward(void* y, int64_t first, int64_t last) const;
  // y <- dz f'(y)
  void backward(const void* dz, void* y, int64_t first, int64_t last) const;
  // Of all elements, on all threads.
  void forward_all(void* y, int64_t size) const;
  void backward_all(const void* dz, void* y, int64_t size) const;

 private:
  const kernels::cpu::Kernels& cpu_;
  const kernels::ActivationSpec activation_;
  const kernels::ScalarType dtype_;
  const int64_t element_size_;
  const bool stream_stores_;
};

}  // namespace memopt::ops
