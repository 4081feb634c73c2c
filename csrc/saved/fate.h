// One thing that may become of a tensor that is saved for backward.
//
// A fate is one file of this folder: kept.h, recipe_registry.h, offloaded.h, and python/fates.h for
// those that users write. The caller chooses the tensors that it asks for: a scope (scope.h), or a
// region for its arguments (arguments.h).
#pragma once

#include "handle.h"

namespace memopt::saved {

struct Fate : c10::intrusive_ptr_target {
  // What stands in for the tensor; empty where this fate is impossible or would gain nothing. The
  // tensor then goes to the outer hooks, or is kept. May be called by several threads.
  virtual c10::intrusive_ptr<Handle> take(const at::Tensor& tensor) = 0;
};

}  // namespace memopt::saved
