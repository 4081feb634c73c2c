// Calls in chunks of rows, as Python sees them.
#pragma once

#include <pybind11/pybind11.h>

namespace memopt::python {

void register_chunks(pybind11::module_& module);

}  // namespace memopt::python
