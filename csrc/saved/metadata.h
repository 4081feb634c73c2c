// The properties of a saved tensor that must be equal in forward and recompute: shape, dtype,
// device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/SmallVector.h>

#include <string>

namespace memopt::saved {

struct Metadata {
  c10::SmallVector<c10::SymInt, 4> sizes;
  at::ScalarType dtype;
  c10::Device device;

  static Metadata of(const at::Tensor& tensor);
  bool operator==(const Metadata& other) const;
  std::string text() const;  // "float32[4, 4] on cpu"
};

}  // namespace memopt::saved
