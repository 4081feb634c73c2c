// memopt._C's part for checkpointed regions.
#pragma once

#include <pybind11/pybind11.h>

namespace memopt::python {

void register_region(pybind11::module_& module);

}  // namespace memopt::python
