#include "parameters.h"

#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/python_variable.h>

namespace memopt::python {

namespace {

namespace py = pybind11;

// Calls `found(key, now)` for each of a module's parameters that requires gradients.
template <typename Found>
void for_each_trained(const py::object& module, const Found& found) {
  static PyObject* const name = PyUnicode_InternFromString("_parameters");
  const auto attributes =
      py::reinterpret_steal<py::dict>(PyObject_GenericGetDict(module.ptr(), nullptr));
  if (!attributes) throw py::error_already_set();
  auto* parameters = PyDict_GetItemWithError(attributes.ptr(), name);
  if (parameters == nullptr || !PyDict_Check(parameters)) return;
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  for (Py_ssize_t position = 0; PyDict_Next(parameters, &position, &key, &value);) {
    if (!THPVariable_Check(value)) continue;
    const auto& tensor = THPVariable_Unpack(value);
    if (!tensor.requires_grad() || tensor.is_inference()) continue;
    found(key, ParameterNow{tensor.unsafeGetTensorImpl(), tensor._version()});
  }
}

// FSDP, of either kind, marks what it manages.
bool is_sharded(const py::object& module) {
  return py::hasattr(module, "_is_fsdp_managed_module") ||
         py::hasattr(module, "_fsdp_wrapped_module");
}

}  // namespace

std::vector<ParameterNow> trained_parameters(const std::vector<py::object>& modules) {
  std::vector<ParameterNow> parameters;
  for (const auto& module : modules) {
    for_each_trained(module,
                     [&](PyObject*, const ParameterNow& now) { parameters.push_back(now); });
  }
  return parameters;
}

std::string changed_parameter(const std::vector<py::object>& modules,
                              const std::vector<ParameterNow>& then) {
  size_t place = 0;
  std::string text;
  for (const auto& module : modules) {
    if (is_sharded(module)) return "";
    for_each_trained(module, [&](PyObject* key, const ParameterNow& now) {
      const size_t mine = place++;
      if (!text.empty() || (mine < then.size() && then[mine] == now)) return;
      const bool is_written = mine < then.size() && then[mine].tensor == now.tensor;
      text = c10::str(py::str(key).cast<std::string>(), " of ",
                      py::str(py::type::of(module).attr("__name__")).cast<std::string>(),
                      is_written ? " was written in place" : " is another tensor");
    });
  }
  return text.empty() ? "fewer parameters" : text;
}

}  // namespace memopt::python
