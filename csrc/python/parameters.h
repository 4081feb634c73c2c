// The parameters that a region's modules have, as they are at a moment: a recompute is the forward
// once more only if they are the same ones, with the same values.
#pragma once

#include <c10/core/TensorImpl.h>
#include <pybind11/pybind11.h>

#include <string>
#include <vector>

namespace memopt::python {

struct ParameterNow {
  const c10::TensorImpl* tensor;  // to be compared, never read
  int64_t version;                // how often it was written in place
  bool operator==(const ParameterNow& other) const {
    return tensor == other.tensor && version == other.version;
  }
};

// Those among the modules' own that require gradients, 16 bytes each. Buffers and frozen parameters
// are written by many forwards (statistics, codebooks), and are left out.
std::vector<ParameterNow> trained_parameters(const std::vector<pybind11::object>& modules);

// What is the first one now that is not what it was, for an error: "weight of Linear was written in
// place". Empty where modules are sharded, and have whole and sharded parameters in turn.
std::string changed_parameter(const std::vector<pybind11::object>& modules,
                              const std::vector<ParameterNow>& then);

}  // namespace memopt::python
