// Scopes around the calls of a module that keeps its class and its forward: a forward pre-hook
// opens one, and a forward hook of the same module ends it (memopt/_call_hooks.py).
//
// PyTorch runs the second hook after an exception too (always_call), but not after one that is no
// Exception: a KeyboardInterrupt, or the end of a recompute (hooks.h). What these leave open is
// ended by the region around, or, where there is none, when a scope is opened next in this thread,
// and by revert: a scope knows the frame that called its module, and that frame is gone by then.
//
// PyTorch takes a slow path through a module's call where the module has hooks, some 5 us, whatever
// they do. So the dictionaries that hold the hooks are CallHooks: false, as if they were empty,
// while this thread is in a scope that they would open, so that a call inside another costs no more
// than one without hooks. Anybody else's hook makes them true, and so does a scope that they have
// opened themselves, which they have to end.
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
