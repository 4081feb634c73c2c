#include "modules_reached.h"

#include <c10/util/flat_hash_map.h>

#include <algorithm>

#include "compat.h"

namespace memopt::python {

namespace {

namespace py = pybind11;

bool is_instance(PyObject* object, PyTypeObject* type) {
  return PyType_IsSubtype(Py_TYPE(object), type) != 0;
}

// A walk over everything that a call can be seen to use. It runs with every recompute, so it reads
// the objects as they lie in memory and costs about 0.1 us for each. What it finds is not kept for
// the next time, not even for a module: PyTorch says nothing when a module tree changes (a child
// that is replaced, or switched to eval), so that to see whether the last result still holds would
// be the same walk.
class Walk {
 public:
  std::vector<py::object> run(const std::vector<py::handle>& roots) {
    seen_.reserve(kUsual);
    pending_.reserve(kUsual);
    found_.reserve(kUsual);
    for (const auto& root : roots) push(root.ptr());
    while (!pending_.empty()) {
      const auto item = std::move(pending_.back());
      pending_.pop_back();
      visit(item.ptr());
    }
    return std::move(found_);
  }

 private:
  static constexpr size_t kUsual = 32;  // modules in a block

  void push(PyObject* item) {
    if (item != nullptr && seen_.insert(item).second) {
      pending_.push_back(py::reinterpret_borrow<py::object>(item));
    }
  }

  void push_values(PyObject* dict) {
    PyObject* value = nullptr;
    for (Py_ssize_t position = 0; PyDict_Next(dict, &position, nullptr, &value);) push(value);
  }

  void visit(PyObject* item) {
    static auto* const module_type = compat::module_type();
    static const py::handle partial_type =
        py::object(py::module_::import("functools").attr("partial")).release();
    if (is_instance(item, module_type)) {
      found_.push_back(py::reinterpret_borrow<py::object>(item));
      static PyObject* const modules_name = PyUnicode_InternFromString("_modules");
      push_values_of(item, modules_name);
    } else if (PyMethod_Check(item)) {
      push(PyMethod_GET_SELF(item));
      push(PyMethod_GET_FUNCTION(item));
    } else if (is_instance(item, reinterpret_cast<PyTypeObject*>(partial_type.ptr()))) {
      for (const char* part : {"func", "args", "keywords"}) push(py::handle(item).attr(part).ptr());
    } else if (PyFunction_Check(item)) {
      push_used_by_function(item);
    } else if (PyList_Check(item) || PyTuple_Check(item)) {
      // Their own items: a class of tuples may refuse to say its length (e3nn's Irreps does).
      const auto size = PySequence_Fast_GET_SIZE(item);
      for (Py_ssize_t i = 0; i < size; ++i) push(PySequence_Fast_GET_ITEM(item, i));
    } else if (PyDict_Check(item)) {
      push_values(item);
    } else if (PyCallable_Check(item) != 0 && !PyType_Check(item)) {
      push_attributes(item);
    }
  }

  void push_values_of(PyObject* module, PyObject* name) {
    const auto attributes =
        py::reinterpret_steal<py::dict>(PyObject_GenericGetDict(module, nullptr));
    if (!attributes) throw py::error_already_set();
    auto* dict = PyDict_GetItemWithError(attributes.ptr(), name);
    if (dict != nullptr && PyDict_Check(dict)) push_values(dict);
  }

  void push_attributes(PyObject* item) {
    const auto attributes = py::getattr(item, "__dict__", py::none());
    if (PyDict_Check(attributes.ptr())) push_values(attributes.ptr());
  }

  void push_used_by_function(PyObject* function) {
    push(PyFunction_GET_DEFAULTS(function));
    push(PyFunction_GET_KW_DEFAULTS(function));
    if (auto* closure = PyFunction_GET_CLOSURE(function)) {
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(closure); ++i) {
        push(PyCell_GET(PyTuple_GET_ITEM(closure, i)));  // null: a variable not assigned yet
      }
    }
    static auto* const module_type = compat::module_type();
    const py::tuple names = py::handle(PyFunction_GET_CODE(function)).attr("co_names");
    for (auto name : names) {
      auto* used = PyDict_GetItemWithError(PyFunction_GET_GLOBALS(function), name.ptr());
      if (used != nullptr && is_instance(used, module_type)) push(used);
    }
  }

  std::vector<py::object> pending_;
  ska::flat_hash_set<PyObject*> seen_;
  std::vector<py::object> found_;
};

}  // namespace

std::vector<py::object> modules_reached(const std::vector<py::handle>& roots) {
  return Walk().run(roots);
}

std::vector<py::object> norm_layers_with_moving_statistics(const std::vector<py::handle>& roots) {
  static auto* const norm_type = compat::norm_base_type();
  auto found = modules_reached(roots);
  const auto is_other = [&](const py::object& module) {
    return !is_instance(module.ptr(), norm_type) || !py::bool_(module.attr("training")) ||
           module.attr("running_mean").is_none();
  };
  found.erase(std::remove_if(found.begin(), found.end(), is_other), found.end());
  return found;
}

}  // namespace memopt::python
