// Packers as saved-tensor hooks. PyTorch takes default hooks as Python callables only, so these are
// callables in C: no Python frame runs when autograd saves a tensor or asks for it.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <pybind11/pybind11.h>

#include "../intercept/key.h"
#include "../saved/handle.h"

namespace memopt::python {

// Adds the types to the module. To be called once, before anything else here.
void register_hooks(pybind11::module_& module);

// While it lives, what autograd saves in this thread goes to `packer`. With `observer` (a callable
// or None), that is called with every tensor first.
class HooksGuard {
 public:
  HooksGuard(c10::intrusive_ptr<saved::Packer> packer, pybind11::handle observer);
  ~HooksGuard();
  HooksGuard(const HooksGuard&) = delete;
  HooksGuard& operator=(const HooksGuard&) = delete;

  // Whether these are the hooks that autograd asks now: none were entered inside and none left in
  // between. Without the GIL.
  bool are_innermost() const;

 private:
  const PyObject* pack_;
  const intercept::Intercept intercept_;  // for intercept/rrelu.cpp
};

// The hooks that are active in this thread, as a Packer; empty if there are none. One of ours is
// given back itself.
c10::intrusive_ptr<saved::Packer> active_hooks();

// The Python exception that an empty handle becomes, to end the user's function. No
// Exception, so that `except Exception` in the user's function lets it pass.
PyObject* stop_exception();

}  // namespace memopt::python
