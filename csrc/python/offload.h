// Offloading, as Python sees it: what goes where (`Offload`), the limits, the statistics.
#pragma once

#include <pybind11/pybind11.h>

#include <system_error>

#include "../saved/offloaded.h"

namespace memopt::python {

void register_offload(pybind11::module_& module);

// Whether the tensor's memory is held anyway, as modules hold their parameters. True for subclasses
// too: a plain copy would not have all of their values.
bool is_held(const at::Tensor& tensor);

// Sets Python's error: errno and text, which make OSError one of its own classes
// (FileNotFoundError).
void set_os_error(const std::system_error& error);

}  // namespace memopt::python
