// The first fate: the handle holds the tensor itself.
#pragma once

#include "handle.h"
#include "version.h"

namespace memopt::saved {

class Kept : public Handle {
 public:
  explicit Kept(at::Tensor tensor) : tensor_(std::move(tensor)), version_(tensor_) {}

  at::Tensor restore() override {
    TORCH_CHECK(!version_.moved(),
                "memopt: a tensor saved for backward must not be written in place, got ",
                "version ", version_.now(), "; it was saved at version ", version_.then());
    return tensor_;
  }

  const at::Tensor& tensor() const { return tensor_; }

 private:
  at::Tensor tensor_;
  Version version_;
};

}  // namespace memopt::saved
