// What PyTorch's CPU allocator gives out and takes back while it is asked to tell: each piece with
// its address, its bytes and the operator around it.
#pragma once

#include <pybind11/pybind11.h>

namespace memopt::python {

void register_allocations(pybind11::module_& m);

}  // namespace memopt::python
