// The with-statement's object of memopt.saved_tensors().
#pragma once

#include <pybind11/pybind11.h>

namespace memopt::python {

void register_scope(pybind11::module_& module);

}  // namespace memopt::python
