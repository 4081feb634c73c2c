#include "objects.h"

#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>

#include "compat.h"

namespace memopt::python {

namespace py = pybind11;

py::handle object_of(const c10::SafePyObject& held) {
  return held.ptr(getPyInterpreter());
}

namespace {

// Whether attributes of this object are its own.
bool is_looked_into(PyObject* object) {
  return !PyType_Check(object) && !PyModule_Check(object) && !PyFunction_Check(object) &&
         !PyMethod_Check(object) && !PyCFunction_Check(object) &&
         PyType_IsSubtype(Py_TYPE(object), compat::module_type()) == 0;
}

// The instance's __dict__; null if it has none.
py::object dict_of(PyObject* object) {
  if (Py_TYPE(object)->tp_dictoffset == 0) return {};
  PyObject* const dict = PyObject_GenericGetDict(object, nullptr);
  if (dict == nullptr) PyErr_Clear();
  return py::reinterpret_steal<py::object>(dict);
}

// The names of the class's slots, or null; pickle's own list of them, which the class keeps.
py::object slots_of(PyObject* object) {
  static PyObject* const slots = PyUnicode_InternFromString("__slots__");
  if (_PyType_Lookup(Py_TYPE(object), slots) == nullptr) return {};
  static const py::handle names =
      py::object(py::module_::import("copyreg").attr("_slotnames")).release();
  return names(py::handle(reinterpret_cast<PyObject*>(Py_TYPE(object))));
}

py::object slot(PyObject* object, PyObject* name) {
  PyObject* const value = PyObject_GenericGetAttr(object, name);
  if (value == nullptr) PyErr_Clear();  // a slot that was never written
  return py::reinterpret_steal<py::object>(value);
}

}  // namespace

bool is_of_base_class(py::handle tensor) {
  return Py_TYPE(tensor.ptr()) == reinterpret_cast<PyTypeObject*>(THPVariableClass);
}

std::vector<TensorAttribute> tensor_attributes(py::handle object) {
  std::vector<TensorAttribute> found;
  if (!is_looked_into(object.ptr())) return found;
  const auto add = [&](PyObject* name, PyObject* value) {
    if (!THPVariable_Check(value)) return;
    found.push_back(
        {py::reinterpret_borrow<py::object>(name), py::reinterpret_borrow<py::object>(value)});
  };
  if (const auto dict = dict_of(object.ptr())) {
    PyObject *name = nullptr, *value = nullptr;
    for (Py_ssize_t position = 0; PyDict_Next(dict.ptr(), &position, &name, &value);)
      add(name, value);
  }
  if (const auto slots = slots_of(object.ptr())) {
    for (const auto name : py::reinterpret_borrow<py::list>(slots)) {
      if (const auto value = slot(object.ptr(), name.ptr())) add(name.ptr(), value.ptr());
    }
  }
  return found;
}

py::object attribute(py::handle object, py::handle name) {
  if (const auto dict = dict_of(object.ptr())) {
    if (auto* value = PyDict_GetItemWithError(dict.ptr(), name.ptr()))
      return py::reinterpret_borrow<py::object>(value);
  }
  return slot(object.ptr(), name.ptr());
}

void set_attribute(py::handle object, py::handle name, py::handle value) {
  if (const auto dict = dict_of(object.ptr()); dict && dict.contains(name)) {
    if (PyDict_SetItem(dict.ptr(), name.ptr(), value.ptr()) < 0) throw py::error_already_set();
    return;
  }
  if (PyObject_GenericSetAttr(object.ptr(), name.ptr(), value.ptr()) < 0)
    throw py::error_already_set();
}

py::object shallow_copy(py::handle object) {
  static const py::handle copy = py::object(py::module_::import("copy").attr("copy")).release();
  py::object made = copy(object);
  if (made.is(object) || Py_TYPE(made.ptr()) != Py_TYPE(object.ptr())) return {};
  const auto dict = dict_of(made.ptr());
  if (dict && dict.is(dict_of(object.ptr()))) return {};  // what is written to one is in the other
  return made;
}

}  // namespace memopt::python
