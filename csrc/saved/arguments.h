// The tensors among a region's arguments, held from its forward until its recompute.
//
// A fate may take them (a copy on the host). Each of the others is saved for backward like the
// input of any autograd function, so that whatever watches saved tensors (an enclosing region,
// save_on_cpu, a byte counter) sees it.
#pragma once

#include <torch/csrc/autograd/saved_variable.h>

#include <optional>
#include <vector>

#include "fate.h"
#include "version.h"

namespace memopt::saved {

struct ArgumentTensor {
  at::Tensor tensor;
  bool may_leave_device;  // false for parameters, which stay there anyway, and for subclasses
};

class Arguments {
 public:
  // `tensors` are distinct; `fate` may be null.
  Arguments(const std::vector<ArgumentTensor>& tensors, Fate* fate);

  std::vector<at::Tensor> restore() const;

  struct Written {
    size_t number;
    Version version;
  };
  // The first tensor that was written in place since.
  std::optional<Written> first_written() const;

 private:
  struct Held {
    Version version;
    torch::autograd::SavedVariable saved;  // empty where `handle` stands for the tensor
    c10::intrusive_ptr<Handle> handle;
    bool requires_grad;  // of what `handle` gives back
  };
  std::vector<Held> held_;
};

}  // namespace memopt::saved
