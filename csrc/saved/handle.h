// A Handle: what the autograd graph holds in place of a tensor that it saved for backward.
//
// There is one kind of Handle for each thing that may become of a saved tensor: it is kept
// (kept.h), made again from a recipe (recipe.h), waits in host memory or a file (offloaded.h), is
// made again by running a region (slot.h), or is what a user's own class makes of it
// (python/fates.h). Two decorators go around any of them: shared.h restores the tensor once for
// several readers, unwritten.h checks that it was not written in place since. A Packer decides
// which. Nothing in this folder knows Python; python/hooks.cpp makes Packers the saved-tensor hooks
// of a scope.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <optional>

#include "../autograd/behind.h"
#include "../autograd/without_hooks.h"
#include "geometry.h"

namespace memopt::saved {

struct Handle : c10::intrusive_ptr_target {
  Handle() { live_.fetch_add(1, std::memory_order_relaxed); }
  ~Handle() override { live_.fetch_sub(1, std::memory_order_relaxed); }

  virtual at::Tensor restore() = 0;

  // Whether `view` is the tensor, and its gradient can be had from `grad`, in gradient().
  virtual bool has_gradient(const std::optional<Geometry>& /*view*/,
                            const at::Tensor& /*grad*/) const {
    return false;
  }
  // The gradient of the tensor, where an activation reads it, from that of what the activation
  // makes of it, without the tensor; undefined where that cannot be, and then nothing has been
  // done.
  virtual at::Tensor gradient(const autograd::Behind& /*behind*/, const at::Tensor& /*grad*/) {
    return {};
  }

  // Whether restore() costs nothing, so that several readers have nothing to share.
  virtual bool is_at_hand() const { return false; }

  // Whether what restore() reads is still in memory. Sharded parameters leave it after their
  // module's forward and are back only for that module's backward, so the backward of another
  // module must not need them.
  virtual bool is_there() const { return true; }

  // How many recipes it is made through, one after another.
  virtual int64_t chain_length() const { return 0; }

  // How many are alive, to see that they die with their graph.
  static int64_t live() { return live_.load(); }

 private:
  static inline std::atomic<int64_t> live_{0};
};

// An empty handle from pack() ends the function whose tensors are being saved. (It is no exception,
// because throwing one through four stack frames costs as much host time as the rest of a region.)
struct Packer : c10::intrusive_ptr_target, autograd::HookedPacker {
  virtual c10::intrusive_ptr<Handle> pack(const at::Tensor& tensor) = 0;

  // Whether it is a checkpointed region's, in forward or in the recompute: what it gets is not held
  // but made again, and both runs must give it the same tensors.
  virtual bool is_of_region() const { return false; }

  // Puts the handle in the saved tensor's place (handle_hooks.cpp).
  bool pack_saved(const autograd::NodePointer& node,
                  torch::autograd::SavedVariable& saved) override;
  // Or it leaves the tensor where it is.
  virtual bool leaves_saved() const { return false; }
};

}  // namespace memopt::saved
