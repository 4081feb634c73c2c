// How a region runs; made once by Python for many calls (memopt/_checkpoint/settings.py).
#pragma once

#include <pybind11/pybind11.h>

#include "../saved/region.h"
#include "partition.h"

namespace memopt::python {

struct Settings {
  saved::RegionOptions options;
  // What becomes of the tensors among the arguments, or of this rank's parts of them; empty: kept.
  c10::intrusive_ptr<saved::Fate> arguments;
  std::shared_ptr<const Partition> partition;  // null: they stay whole
  bool check_partition = false;                // compare the ranks' tensors in every call
  // What the engine needs of memopt's Python: callables.
  pybind11::object call_uncompiled;  // (fn, args, kwargs) -> result, unseen by torch.compile
  pybind11::object region_name;      // (module or function) -> text for errors
  pybind11::object hold_statistics;  // (norm layers) -> callable that gives their statistics back
  // Callables or None.
  pybind11::object on_pass;  // (owner, +1) before a first forward, (owner, -1) before a recompute
  pybind11::object
      on_saved;            // (tensor) for each that the first forward saves, before it is dropped
  pybind11::object again;  // what the recompute calls in place of the function
  pybind11::object diagnose;  // () -> text for the error of a recompute that differs

  bool takes_arguments() const { return arguments.defined() || partition != nullptr; }
};

}  // namespace memopt::python
