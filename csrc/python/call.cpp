#include "call.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include "default_device.h"
#include "hooks.h"
#include "modules_reached.h"

namespace memopt::python {

namespace py = pybind11;

namespace {

// A function of memopt's Python side or of PyTorch's, looked up once and kept for good.
py::handle function_at(const char* module, const char* name) {
  return py::object(py::module_::import(module).attr(name)).release();
}

// Most arguments that are no tensors, told from containers without asking Python.
bool is_plain_leaf(py::handle value) {
  auto* object = value.ptr();
  return object == Py_None || PyBool_Check(object) || PyLong_CheckExact(object) ||
         PyFloat_CheckExact(object) || PyUnicode_CheckExact(object);
}

py::object put_together(const std::vector<py::object>& leaves, const py::object& spec) {
  if (!spec) return leaves[0];
  static const auto unflatten = function_at("torch.utils._pytree", "tree_unflatten");
  py::list list(leaves.size());
  for (size_t i = 0; i < leaves.size(); ++i) list[i] = leaves[i];
  return unflatten(list, spec);
}

// Whether torch.compile would see the frames of a call made now. A compiled frame around a region
// must not compile what runs inside: forward and recompute would save different tensors.
bool is_being_compiled() {
  // Nothing is compiled before torch._dynamo is imported; afterwards it hooks frames only while a
  // compiled function runs. To ask costs a tenth of calling past it.
  static PyObject* const dynamo = PyUnicode_InternFromString("torch._dynamo");
  if (PyDict_GetItemWithError(PyImport_GetModuleDict(), dynamo) == nullptr) return false;
  static const auto callback =
      function_at("torch._C._dynamo.eval_frame", "get_eval_frame_callback");
  return !callback().is_none();
}

// The running statistics of `layers` stand still while it lives.
class StatisticsGuard {
 public:
  explicit StatisticsGuard(const std::vector<py::object>& layers) {
    if (layers.empty()) return;
    static const auto hold = function_at("memopt.checkpoint.batch_norm", "hold_statistics");
    layers_ = py::list();
    for (const auto& layer : layers) layers_.append(layer);
    hold(layers_);
  }
  ~StatisticsGuard() {
    if (!layers_) return;
    static const auto give_back =
        function_at("memopt.checkpoint.batch_norm", "give_back_statistics");
    const py::error_scope pending;
    try {
      give_back(layers_);
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("memopt: giving running statistics back");
    }
  }
  StatisticsGuard(const StatisticsGuard&) = delete;
  StatisticsGuard& operator=(const StatisticsGuard&) = delete;

 private:
  py::list layers_{py::reinterpret_steal<py::list>(py::handle())};
};

}  // namespace

py::object call_function(py::handle fn, py::handle args, py::handle kwargs) {
  PyObject* result = nullptr;
  if (is_being_compiled()) {
    static const auto uncompiled = function_at("memopt.checkpoint.region", "call_uncompiled");
    result =
        PyObject_CallFunctionObjArgs(uncompiled.ptr(), fn.ptr(), args.ptr(), kwargs.ptr(), nullptr);
  } else {
    result = PyObject_Call(fn.ptr(), args.ptr(), kwargs.ptr());
  }
  return py::reinterpret_steal<py::object>(result);
}

void throw_python_error() {
  python_error error;
  error.persist();  // until the GIL is held again where it is caught
  throw std::move(error);
}

Call::Call(py::object fn, const py::tuple& args, const py::dict& kwargs, const Settings& settings,
           py::object owner)
    : objects_(std::make_unique<Objects>(
          Objects{std::move(fn), std::move(owner), default_device(), settings, {}, args.size()})) {
  std::unordered_map<c10::TensorImpl*, size_t> numbers;
  objects_->arguments.reserve(args.size() + kwargs.size());
  for (auto value : args) objects_->arguments.push_back(take_apart({}, value, numbers));
  for (auto [name, value] : kwargs) {
    objects_->arguments.push_back(
        take_apart(py::reinterpret_borrow<py::object>(name), value, numbers));
  }
}

Call::~Call() {
  if (Py_IsInitialized() == 0) {
    static_cast<void>(objects_.release());  // too late to give anything back
    return;
  }
  const py::gil_scoped_acquire gil;
  objects_.reset();
}

Call::Leaf Call::leaf(py::handle value, std::unordered_map<c10::TensorImpl*, size_t>& numbers) {
  if (!THPVariable_Check(value.ptr())) return {py::reinterpret_borrow<py::object>(value), 0};
  const auto& tensor = THPVariable_Unpack(value.ptr());
  const auto [found, is_new] = numbers.emplace(tensor.unsafeGetTensorImpl(), tensors_.size());
  if (is_new) {
    const bool is_base_class =
        Py_TYPE(value.ptr()) == reinterpret_cast<PyTypeObject*>(THPVariableClass);
    tensors_.push_back({tensor, is_base_class});
  }
  return {py::object(), found->second};
}

Call::Argument Call::take_apart(py::object name, py::handle value,
                                std::unordered_map<c10::TensorImpl*, size_t>& numbers) {
  Argument argument{std::move(name), {}, {}};
  if (is_plain_leaf(value) || THPVariable_Check(value.ptr())) {
    argument.leaves.push_back(leaf(value, numbers));
    return argument;
  }
  static const auto flatten = function_at("torch.utils._pytree", "tree_flatten");
  const py::tuple flat = flatten(value);
  for (auto element : py::list(flat[0])) argument.leaves.push_back(leaf(element, numbers));
  argument.spec = flat[1];
  return argument;
}

void Call::run(const std::vector<at::Tensor>& tensors, c10::intrusive_ptr<saved::Packer> packer) {
  const py::gil_scoped_acquire gil;
  const auto& settings = objects_->settings;
  std::vector<py::object> wrapped;
  wrapped.reserve(tensors.size());
  for (const auto& tensor : tensors) {
    wrapped.push_back(py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor)));
  }
  py::tuple args(objects_->positional);
  py::dict kwargs;
  for (size_t i = 0; i < objects_->arguments.size(); ++i) {
    const auto& argument = objects_->arguments[i];
    std::vector<py::object> leaves;
    leaves.reserve(argument.leaves.size());
    for (const auto& leaf : argument.leaves) {
      leaves.push_back(leaf.object ? leaf.object : wrapped[leaf.tensor]);
    }
    auto value = put_together(leaves, argument.spec);
    if (argument.name) {
      kwargs[argument.name] = std::move(value);
    } else {
      PyTuple_SET_ITEM(args.ptr(), static_cast<Py_ssize_t>(i), value.release().ptr());
    }
  }
  wrapped.clear();  // so that the function's own references are the only ones
  if (!settings.on_pass.is_none()) settings.on_pass(objects_->owner, -1);
  const auto& owner = objects_->owner;
  const StatisticsGuard statistics(norm_layers_with_moving_statistics(
      owner.is_none() ? std::vector<py::handle>{objects_->fn, args, kwargs}
                      : std::vector<py::handle>{owner}));
  const DefaultDeviceGuard device(objects_->default_device);
  const HooksGuard hooks(std::move(packer), py::none());
  if (call_function(settings.again.is_none() ? objects_->fn : settings.again, args, kwargs)) return;
  if (PyErr_ExceptionMatches(stop_exception()) == 0) throw_python_error();
  PyErr_Clear();
}

std::string Call::name() const {
  const py::gil_scoped_acquire gil;
  static const auto region_name = function_at("memopt.checkpoint.naming", "region_name");
  return py::str(region_name(objects_->owner.is_none() ? objects_->fn : objects_->owner));
}

std::string Call::argument_name(size_t tensor) const {
  const py::gil_scoped_acquire gil;
  for (size_t i = 0; i < objects_->arguments.size(); ++i) {
    const auto& argument = objects_->arguments[i];
    for (const auto& leaf : argument.leaves) {
      if (leaf.object || leaf.tensor != tensor) continue;
      if (!argument.name) return "positional argument " + std::to_string(i);
      return "argument " + std::string(py::repr(argument.name));
    }
  }
  return "argument";
}

std::string Call::diagnosis() const {
  const py::gil_scoped_acquire gil;
  const auto& diagnose = objects_->settings.diagnose;
  if (diagnose.is_none()) return "";
  return py::str(diagnose());
}

}  // namespace memopt::python
