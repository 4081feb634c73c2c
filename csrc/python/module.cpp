// What Python needs beside the dispatcher ops, which register themselves when this library is
// loaded.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "../autograd/no_derivative.h"
#include "../kernels/cpu/kernels.h"
#include "../ops/supported.h"
#include "allocations.h"
#include "buffers.h"
#include "call_scopes.h"
#include "chunks.h"
#include "head.h"
#include "offload.h"
#include "plan.h"
#include "region.h"
#include "scope.h"

namespace {

namespace py = pybind11;

std::vector<std::string> compiled_capabilities() {
  std::vector<std::string> names;
  for (const char* const* name = memopt::kernels::cpu::compiled_capabilities(); *name != nullptr;
       ++name) {
    names.emplace_back(*name);
  }
  return names;
}

std::string cpu_capability() {
  const char* error = nullptr;
  const auto* kernels = memopt::kernels::cpu::cpu_kernels(&error);
  if (kernels == nullptr) throw std::runtime_error(error);
  return kernels->name;
}

// The names that the ops know, and whether the activation takes a scalar.
py::dict activations() {
  py::dict names;
  for (const auto& activation : memopt::kernels::kActivations) {
    names[py::str(std::string(activation.name))] = activation.takes_scalar;
  }
  return names;
}

std::optional<std::string> text_or_none(const char* text) {
  return *text == '\0' ? std::nullopt : std::optional<std::string>(text);
}

// By the dtype of an input, the dtypes of parameters that the ops take beside it.
std::map<at::ScalarType, std::vector<at::ScalarType>> dtypes() {
  std::map<at::ScalarType, std::vector<at::ScalarType>> found;
  for (const auto input : memopt::ops::kDtypes) {
    for (const auto parameter : memopt::ops::kDtypes) {
      if (memopt::ops::takes_parameter(parameter, input)) found[input].push_back(parameter);
    }
  }
  return found;
}

std::vector<std::string> device_types() {
  std::vector<std::string> names;
  for (const auto device : memopt::ops::kDevices) {
    names.push_back(c10::DeviceTypeName(device, /*lower_case=*/true));
  }
  return names;
}

// What the build baked in; setup.py defines the macros. None for CUDA's where no CUDA kernels were
// built.
py::dict build_info() {
  py::dict info;
  info["version"] = MEMOPT_VERSION;
  info["torch"] = MEMOPT_TORCH_VERSION;
  info["torch_cuda"] = text_or_none(MEMOPT_TORCH_CUDA);
  info["cuda"] = text_or_none(MEMOPT_CUDA_VERSION);
  info["cuda_architectures"] = text_or_none(MEMOPT_CUDA_ARCHITECTURES);
  info["compiler"] = __VERSION__;
  info["cpu_capabilities"] = compiled_capabilities();
  return info;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() =
      "memopt's native library: operators register with the PyTorch dispatcher when it is "
      "imported.";
  memopt::autograd::register_no_derivatives();
  m.def("build_info", &build_info, "What this library was built for.");
  m.def("cpu_capability", &cpu_capability,
        "The instruction set in use: 'baseline', 'avx2' or 'avx512'.");
  m.def("activations", &activations,
        "The names of the activations; of each, whether it takes a scalar.");
  m.def("dtypes", &dtypes,
        "By the dtypes of inputs that the ops take, those of parameters beside them.");
  m.def("device_types", &device_types, "Those that this build has kernels for.");
  memopt::python::register_allocations(m);
  memopt::python::register_buffers(m);
  memopt::python::register_region(m);
  memopt::python::register_chunks(m);
  memopt::python::register_head(m);
  memopt::python::register_scope(m);
  memopt::python::register_call_scopes(m);
  memopt::python::register_offload(m);
  memopt::python::register_plan(m);
}
