// Tells whether a tensor was written in place since a certain moment.
//
// Saved-tensor hooks switch autograd's own check off, so every handle that gives back what it was
// given carries one of these. It shares the tensor's version counter (8 bytes) and nothing of its
// memory, so it also speaks of a tensor that has left the device.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstring>

namespace memopt::saved {

class Version {
 public:
  Version() = default;
  explicit Version(const at::Tensor& tensor)
      : counter_(tensor.unsafeGetTensorImpl()->version_counter()),
        then_(counter_.enabled() ? counter_.current_version() : 0) {}

  uint32_t then() const { return then_; }
  // Inference tensors have no counter: nothing can write them in place outside inference mode.
  uint32_t now() const { return counter_.enabled() ? counter_.current_version() : then_; }
  bool moved() const { return now() != then_; }

  // Whether both count the same writes. Tensors of one storage need not: tensor.data has a counter
  // of its own, and so has each part that unsafe_chunk and unsafe_split make. A counter is a
  // pointer, which PyTorch does not show.
  bool counts_with(const Version& other) const {
    static_assert(sizeof(counter_) == sizeof(void*));
    return std::memcmp(&counter_, &other.counter_, sizeof(counter_)) == 0;
  }

  // Raises if it has moved.
  void check_unwritten() const {
    TORCH_CHECK(!moved(), "memopt: a tensor saved for backward must not be written in place, got ",
                "version ", now(), "; it was saved at version ", then());
  }

 private:
  c10::VariableVersion counter_;
  uint32_t then_ = 0;
};

}  // namespace memopt::saved
