// A head's call whose product waits (memopt/_head): the tensors that it is made of, the node of a
// lazy tensor, and what Python asks once a step. All of it is here because a step calls each part
// once, behind everything else: there is no cache that has Python's functions then.
#pragma once

#include <pybind11/pybind11.h>

namespace memopt::python {

void register_head(pybind11::module_& m);

}  // namespace memopt::python
