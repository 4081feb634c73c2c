// Offloading, as Python sees it: what goes where (`Offload`), the limits, the statistics.
#pragma once

#include <pybind11/pybind11.h>

#include "../saved/offloaded.h"

namespace memopt::python {

void register_offload(pybind11::module_& module);

// Whether the tensor's memory is held anyway, as modules hold their parameters. True for subclasses
// too: a plain copy would not have all of their values.
bool is_held(const at::Tensor& tensor);

}  // namespace memopt::python
