// The tensors among a region's arguments, held from its forward until its recompute.
//
// A fate may take them (a copy on the host, a part on each rank): it is asked once for all of a
// call. Each of the others is saved for backward like the input of any autograd function, so that
// whatever watches saved tensors (an enclosing region, save_on_cpu, a byte counter) sees it.
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
  at::Tensor values;      // what a fate takes: the tensor, or the result that it waits for
};

// What stands in for those of one call's tensors that a fate has taken.
struct ArgumentsHandle : c10::intrusive_ptr_target {
  // Whether it stands for the tensor of this number.
  virtual bool has(size_t number) const = 0;
  // By number; empty in the places of those that it does not stand for.
  virtual std::vector<at::Tensor> restore() = 0;
};

// What becomes of the tensors among a region's arguments.
struct FateOfArguments : c10::intrusive_ptr_target {
  // `tensors` are all of one call, distinct. Empty if it takes none. May be called by several
  // threads.
  virtual c10::intrusive_ptr<ArgumentsHandle> take(const std::vector<ArgumentTensor>& tensors) = 0;
};

// Asks a fate of single tensors for each that may leave the device.
c10::intrusive_ptr<FateOfArguments> for_each_argument(c10::intrusive_ptr<Fate> fate);

class Arguments {
 public:
  // `fate` may be null.
  Arguments(const std::vector<ArgumentTensor>& tensors, FateOfArguments* fate);

  std::vector<at::Tensor> restore() const;

  struct Written {
    size_t number;
    Version version;
  };
  // The first tensor that was written in place since. With `hooks_copy` one may be written of which
  // the hooks that got it give a copy of then. To be asked before restore().
  std::optional<Written> first_written(bool hooks_copy) const;

 private:
  struct Held {
    Version version;
    torch::autograd::SavedVariable saved;  // empty where `taken_` or `inference` has the tensor
    at::Tensor inference;                  // autograd does not save these
    // Its storage, to compare with, where hooks that were active got the tensor; else null.
    const c10::StorageImpl* hooked;
    bool requires_grad;
  };
  c10::intrusive_ptr<ArgumentsHandle> taken_;
  std::vector<Held> held_;
};

}  // namespace memopt::saved
