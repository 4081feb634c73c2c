// The one type of what the autograd graph holds in place of a tensor that it saved for backward.
//
// Every fate of a saved tensor is a Handle: kept (kept.h), made again by running a region (slot.h),
// waiting in host memory (host_copy.h). A Packer decides which. Nothing here or in this folder
// knows Python; python/hooks.cpp makes Packers the saved-tensor hooks of a scope.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

namespace memopt::saved {

struct Handle : c10::intrusive_ptr_target {
  virtual at::Tensor restore() = 0;
};

// An empty handle from pack() ends the function whose tensors are being saved. (It is no exception,
// because throwing one through four stack frames costs as much host time as the rest of a region.)
struct Packer : c10::intrusive_ptr_target {
  virtual c10::intrusive_ptr<Handle> pack(const at::Tensor& tensor) = 0;
};

}  // namespace memopt::saved
