// The modules that a call would use.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

namespace memopt::python {

// The modules that calling one of `roots` can be seen to use, without asking them.
//
// Looks into submodules, methods, partials, lists, tuples and dicts, the attributes of callable
// objects, what functions close over, their defaults, and the modules among the globals they name.
// A module that a function reaches in another way, such as through a second function, is not found.
std::vector<pybind11::object> modules_reached(const std::vector<pybind11::handle>& roots);

// The layers in training among them that have running statistics: batch norm of every kind,
// SyncBatchNorm and instance norm.
std::vector<pybind11::object> norm_layers_with_moving_statistics(
    const std::vector<pybind11::handle>& roots);

}  // namespace memopt::python
