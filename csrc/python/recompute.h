// memopt.recompute().
#pragma once

#include <pybind11/pybind11.h>

namespace memopt::python {

void register_recompute(pybind11::module_& module);

}  // namespace memopt::python
