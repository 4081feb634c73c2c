#include "compat.h"

#include <string>

namespace memopt::python::compat {

namespace py = pybind11;

namespace {

py::handle attribute(const char* module, const char* name) {
  return py::object(py::module_::import(module).attr(name)).release();
}

PyTypeObject* type(const char* module, const char* name) {
  return reinterpret_cast<PyTypeObject*>(attribute(module, name).ptr());
}

}  // namespace

py::handle tree_flatten() {
  static const auto function = attribute("torch.utils._pytree", "tree_flatten");
  return function;
}

py::handle tree_unflatten() {
  static const auto function = attribute("torch.utils._pytree", "tree_unflatten");
  return function;
}

PyTypeObject* module_type() {
  static auto* const found = type("torch.nn", "Module");
  return found;
}

PyTypeObject* norm_base_type() {
  static auto* const found = type("torch.nn.modules.batchnorm", "_NormBase");
  return found;
}

py::object result_of_collective(py::handle tensor) {
  static PyObject* const name =
      PyUnicode_InternFromString("torch.distributed._functional_collectives");
  // None was made before it is imported.
  if (PyDict_GetItemWithError(PyImport_GetModuleDict(), name) == nullptr) return {};
  static auto* const waiting =
      type("torch.distributed._functional_collectives", "AsyncCollectiveTensor");
  if (!Py_IS_TYPE(tensor.ptr(), waiting)) return {};
  return tensor.attr("trigger_wait")();
}

bool hooks_copy_on_write() {
  const auto graph = py::module_::import("torch.autograd.graph");
  return py::cast<bool>(graph.attr("_allow_mutation_on_saved_tensors_enabled"));
}

bool refuses_hooks(py::handle error) {
  if (PyErr_GivenExceptionMatches(error.ptr(), PyExc_RuntimeError) == 0) return false;
  const std::string text = py::str(error);
  const auto has = [&](const char* part) { return text.find(part) != std::string::npos; };
  return has("torch.func") && has("saved tensor hooks") && !has("memopt");
}

bool is_being_compiled() {
  // Nothing is compiled before torch._dynamo is imported; afterwards it hooks frames only while a
  // compiled function runs. To ask costs a tenth of calling past it.
  static PyObject* const dynamo = PyUnicode_InternFromString("torch._dynamo");
  if (PyDict_GetItemWithError(PyImport_GetModuleDict(), dynamo) == nullptr) return false;
  static const auto callback = attribute("torch._C._dynamo.eval_frame", "get_eval_frame_callback");
  return !callback().is_none();
}

}  // namespace memopt::python::compat
