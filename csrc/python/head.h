// What memopt/_head and memopt/_convert/head.py call in each step. A step comes here once, behind
// everything else, so that nothing of it is in a cache: functions of Python cost most there.
#pragma once

#include <pybind11/pybind11.h>

namespace memopt::python {

void register_head(pybind11::module_& m);

}  // namespace memopt::python
