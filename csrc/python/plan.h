// The planner's solver, as Python sees it.
#pragma once

#include <pybind11/pybind11.h>

namespace memopt::python {

void register_plan(pybind11::module_& module);

}  // namespace memopt::python
