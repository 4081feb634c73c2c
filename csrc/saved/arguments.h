// The tensors among a region's arguments, kept from its forward until its recompute.
//
// Each is saved for backward like the input of any autograd function, so that whatever watches
// saved tensors (an enclosing region, save_on_cpu, a byte counter) sees it, or copied to the host.
#pragma once

#include <torch/csrc/autograd/saved_variable.h>

#include <optional>
#include <vector>

#include "handle.h"
#include "version.h"

namespace memopt::saved {

struct ArgumentTensor {
  at::Tensor tensor;
  bool may_leave_device;  // false for parameters, which stay there anyway, and for subclasses
};

class Arguments {
 public:
  // `tensors` are distinct.
  Arguments(const std::vector<ArgumentTensor>& tensors, bool offload_to_cpu);

  std::vector<at::Tensor> restore() const;

  struct Written {
    size_t number;
    Version version;
  };
  // The first tensor that was written in place since it was kept.
  std::optional<Written> first_written() const;

 private:
  struct Kept {
    Version version;
    torch::autograd::SavedVariable saved;  // empty where `handle` holds the tensor
    c10::intrusive_ptr<Handle> handle;
  };
  std::vector<Kept> kept_;
};

}  // namespace memopt::saved
