#include "hooks.h"

#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>

#include <atomic>
#include <optional>

#include "../saved/handle_hooks.h"
#include "objects.h"
#include "offload.h"

namespace memopt::python {

namespace {

namespace py = pybind11;
using c10::intrusive_ptr;

// What autograd gets in place of a tensor.
struct HandleObject {
  PyObject_HEAD intrusive_ptr<saved::Handle> handle;
};

// What autograd calls with a tensor.
struct PackObject {
  PyObject_HEAD vectorcallfunc vectorcall;
  intrusive_ptr<saved::Packer> packer;
  PyObject* observer;
};

void deallocate_handle(PyObject* self) {
  // Releasing it may run arbitrary code: the last handle of a region frees the region's arguments.
  reinterpret_cast<HandleObject*>(self)->handle.~intrusive_ptr();
  Py_TYPE(self)->tp_free(self);
}

void deallocate_pack(PyObject* self) {
  auto* pack = reinterpret_cast<PackObject*>(self);
  pack->packer.~intrusive_ptr();
  Py_XDECREF(pack->observer);
  Py_TYPE(self)->tp_free(self);
}

std::atomic<int64_t> packs{0};

PyTypeObject handle_type = {PyVarObject_HEAD_INIT(nullptr, 0)};
PyTypeObject pack_type = {PyVarObject_HEAD_INIT(nullptr, 0)};
PyObject* stop = nullptr;
PyObject* restore_function = nullptr;

PyObject* as_object(intrusive_ptr<saved::Handle> handle) {
  auto* object = PyObject_New(HandleObject, &handle_type);
  if (object != nullptr) new (&object->handle) intrusive_ptr<saved::Handle>(std::move(handle));
  return reinterpret_cast<PyObject*>(object);
}

saved::HandleHooks::PythonHook as_python_hook(const intrusive_ptr<saved::Handle>& handle) {
  const py::gil_scoped_acquire gil;
  auto* object = as_object(handle);
  if (object == nullptr) throw py::error_already_set();
  auto* interpreter = getPyInterpreter();
  return {c10::SafePyObject(Py_NewRef(restore_function), interpreter),
          c10::SafePyObject(object, interpreter)};
}

PyObject* pack(PyObject* self, PyObject* const* args, size_t, PyObject*) {
  HANDLE_TH_ERRORS
  packs.fetch_add(1, std::memory_order_relaxed);
  auto* object = reinterpret_cast<PackObject*>(self);
  if (object->observer != nullptr) {
    auto* result = PyObject_CallOneArg(object->observer, args[0]);
    if (result == nullptr) return nullptr;
    Py_DECREF(result);
  }
  intrusive_ptr<saved::Handle> handle;
  try {
    handle = object->packer->pack(THPVariable_Unpack(args[0]));
  } catch (const std::system_error& error) {  // a directory that has gone
    set_os_error(error);
    return nullptr;
  }
  if (!handle.defined()) {
    PyErr_SetNone(stop);
    return nullptr;
  }
  return as_object(std::move(handle));
  END_HANDLE_TH_ERRORS
}

at::Tensor restore_without_gil(saved::Handle& handle, autograd::GradientWanted* wanted = nullptr) {
  std::optional<py::gil_scoped_release> no_gil;
  if (PyGILState_Check() == 1) no_gil.emplace();
  if (wanted != nullptr) {
    wanted->answer = handle.gradient(wanted->behind, wanted->grad);
    if (wanted->answer.defined()) return wanted->answer;
  }
  return handle.restore();
}

PyObject* restore(PyObject*, PyObject* object) {
  HANDLE_TH_ERRORS
  if (!Py_IS_TYPE(object, &handle_type)) {
    return PyErr_Format(PyExc_TypeError, "memopt: restore takes what the pack hook gave, got %s",
                        Py_TYPE(object)->tp_name);
  }
  return THPVariable_Wrap(restore_without_gil(*reinterpret_cast<HandleObject*>(object)->handle));
  END_HANDLE_TH_ERRORS
}

PyMethodDef restore_definition = {"restore", restore, METH_O,
                                  "The tensor that a saved-tensor handle stands for."};

void end_function() {
  const py::gil_scoped_acquire gil;
  PyErr_SetNone(stop);
  python_error error;
  error.persist();  // until the GIL is held again where it is caught
  throw std::move(error);
}

// Hooks that are not memopt's.
class PythonHooks : public saved::Packer {
 public:
  PythonHooks(c10::SafePyObject pack, c10::SafePyObject unpack)
      : pack_(std::move(pack)), unpack_(std::move(unpack)) {}

  // Of PyTorch's checkpoint. A callable that says otherwise of itself is taken for something else.
  bool is_of_region() const override {
    const py::gil_scoped_acquire gil;
    const auto module = py::getattr(object_of(pack_), "__module__", py::none());
    return py::isinstance<py::str>(module) &&
           module.cast<std::string>() == "torch.utils.checkpoint";
  }

  intrusive_ptr<saved::Handle> pack(const at::Tensor& tensor) override {
    const py::gil_scoped_acquire gil;
    const auto argument = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
    auto* packed = PyObject_CallOneArg(object_of(pack_).ptr(), argument.ptr());
    if (packed == nullptr) throw py::error_already_set();
    return c10::make_intrusive<Packed>(c10::SafePyObject(packed, getPyInterpreter()), unpack_);
  }

 private:
  class Packed : public saved::Handle {
   public:
    Packed(c10::SafePyObject packed, c10::SafePyObject unpack)
        : packed_(std::move(packed)), unpack_(std::move(unpack)) {}

    at::Tensor restore() override {
      const py::gil_scoped_acquire gil;
      const auto tensor = py::reinterpret_steal<py::object>(
          PyObject_CallOneArg(object_of(unpack_).ptr(), object_of(packed_).ptr()));
      if (!tensor) throw py::error_already_set();
      TORCH_CHECK_TYPE(THPVariable_Check(tensor.ptr()),
                       "memopt: the unpack hook around memopt.saved_tensors() must return a "
                       "tensor, got ",
                       Py_TYPE(tensor.ptr())->tp_name);
      return THPVariable_Unpack(tensor.ptr());
    }

   private:
    c10::SafePyObject packed_;
    c10::SafePyObject unpack_;
  };

  c10::SafePyObject pack_;
  c10::SafePyObject unpack_;
};

void ready(PyTypeObject& type, const char* name, size_t size, const char* doc, destructor free) {
  type.tp_name = name;
  type.tp_basicsize = static_cast<Py_ssize_t>(size);
  type.tp_doc = doc;
  type.tp_dealloc = free;
  type.tp_flags |= Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION;
  if (PyType_Ready(&type) < 0) throw py::error_already_set();
}

autograd::HookedPacker* packer_here() {
  const auto& hooks = at::SavedTensorDefaultHooks::get_tls_state();
  if (hooks.stack.empty() || hooks.is_tracing || hooks.disabled_error_message) return nullptr;
  auto* object = hooks.stack.top().first.ptr(getPyInterpreter());
  if (!Py_IS_TYPE(object, &pack_type)) return nullptr;
  const auto* pack = reinterpret_cast<PackObject*>(object);
  return pack->observer == nullptr ? pack->packer.get() : nullptr;
}

}  // namespace

void register_hooks(py::module_& module) {
  ready(handle_type, "memopt._C.Handle", sizeof(HandleObject),
        "Stands in the autograd graph for a saved tensor.", deallocate_handle);
  pack_type.tp_vectorcall_offset = offsetof(PackObject, vectorcall);
  pack_type.tp_call = PyVectorcall_Call;
  pack_type.tp_flags = Py_TPFLAGS_HAVE_VECTORCALL;
  ready(pack_type, "memopt._C.Pack", sizeof(PackObject), "Exchanges a saved tensor for a Handle.",
        deallocate_pack);
  stop = PyErr_NewExceptionWithDoc("memopt._C.Stop",
                                   "Ends a recompute whose last wanted tensor has been saved.",
                                   PyExc_BaseException, nullptr);
  if (stop == nullptr) throw py::error_already_set();
  restore_function = PyCFunction_New(&restore_definition, nullptr);
  if (restore_function == nullptr) throw py::error_already_set();
  saved::HandleHooks::as_python_hook = as_python_hook;
  saved::HandleHooks::restore = restore_without_gil;
  autograd::packer_here = packer_here;
  autograd::HookedPacker::end_function = end_function;
  module.def(
      "packs", [] { return packs.load(); },
      "How many tensors this process's hooks were called with.");
  module.attr("Handle") = py::handle(reinterpret_cast<PyObject*>(&handle_type));
  module.attr("Stop") = py::handle(stop);
}

HooksGuard::HooksGuard(intrusive_ptr<saved::Packer> packer, py::handle observer) {
  auto* object = PyObject_New(PackObject, &pack_type);
  if (object == nullptr) throw py::error_already_set();
  object->vectorcall = pack;
  new (&object->packer) intrusive_ptr<saved::Packer>(std::move(packer));
  object->observer = observer.is_none() ? nullptr : observer.inc_ref().ptr();
  pack_ = reinterpret_cast<PyObject*>(object);
  auto* interpreter = getPyInterpreter();
  c10::SafePyObject pack_hook(reinterpret_cast<PyObject*>(object), interpreter);
  c10::SafePyObject unpack_hook(Py_NewRef(restore_function), interpreter);
  at::SavedTensorDefaultHooks::lazy_initialize();
  at::SavedTensorDefaultHooks::push_hooks(std::move(pack_hook), std::move(unpack_hook));
}

HooksGuard::~HooksGuard() {
  if (are_innermost()) {
    at::SavedTensorDefaultHooks::pop_hooks();
    return;
  }
  // Scopes may be left in another order than they were entered. Hooks that were entered since stay.
  auto hooks = at::SavedTensorDefaultHooks::get_tls_state();
  decltype(hooks.stack) inside;
  while (!hooks.stack.empty() && hooks.stack.top().first.ptr(getPyInterpreter()) != pack_) {
    inside.push(std::move(hooks.stack.top()));
    hooks.stack.pop();
  }
  if (hooks.stack.empty()) {  // PyTorch's own scopes take the innermost: those, in place of theirs
    at::SavedTensorDefaultHooks::pop_hooks();
    return;
  }
  hooks.stack.pop();
  for (; !inside.empty(); inside.pop()) hooks.stack.push(std::move(inside.top()));
  at::SavedTensorDefaultHooks::set_tls_state(hooks);
}

bool HooksGuard::are_innermost() const {
  const auto& hooks = at::SavedTensorDefaultHooks::get_tls_state();
  return !hooks.stack.empty() && !hooks.is_tracing &&
         hooks.stack.top().first.ptr(getPyInterpreter()) == pack_;
}

intrusive_ptr<saved::Packer> active_hooks() {
  auto hooks = at::SavedTensorDefaultHooks::get_hooks();
  if (!hooks.has_value()) return {};
  auto* object = object_of(hooks->first).ptr();
  if (Py_IS_TYPE(object, &pack_type)) return reinterpret_cast<PackObject*>(object)->packer;
  return c10::make_intrusive<PythonHooks>(std::move(hooks->first), std::move(hooks->second));
}

PyObject* stop_exception() {
  return stop;
}

}  // namespace memopt::python
