// How a region runs; made once by Python for many calls.
#pragma once

#include <pybind11/pybind11.h>

#include "../saved/region.h"

namespace memopt::python {

struct Settings {
  saved::RegionOptions options;
  // Callables or None.
  pybind11::object on_pass;  // (owner, +1) before a first forward, (owner, -1) before a recompute
  pybind11::object
      on_saved;            // (tensor) for each that the first forward saves, before it is dropped
  pybind11::object again;  // what the recompute calls in place of the function
  pybind11::object diagnose;  // () -> text for the error of a recompute that differs
};

}  // namespace memopt::python
