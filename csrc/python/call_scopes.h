// Scopes around the calls of a module that keeps its class and its forward: a forward pre-hook
// opens one, and a forward hook of the same module ends it (memopt/_call_hooks.py).
//
// PyTorch runs the second hook after an exception too (always_call), but not after one that is no
// Exception: a KeyboardInterrupt, or the end of a recompute (hooks.h). What these leave open is
// ended by the region around, or, where there is none, at the module's next call in this thread: a
// scope knows the frame that called its module, and that frame is gone by then.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>

namespace memopt::python {

void register_call_scopes(pybind11::module_& module);

// Ends, with itself, what calls inside have opened in this thread and not ended.
class CallScopesGuard {
 public:
  CallScopesGuard();
  ~CallScopesGuard();
  CallScopesGuard(const CallScopesGuard&) = delete;
  CallScopesGuard& operator=(const CallScopesGuard&) = delete;

 private:
  const size_t open_;
};

}  // namespace memopt::python
