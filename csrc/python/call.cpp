#include "call.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Size.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>

#include "call_scopes.h"
#include "compat.h"
#include "default_device.h"
#include "hooks.h"
#include "modules_reached.h"

namespace memopt::python {

namespace py = pybind11;

namespace {

// Most arguments that are no tensors, told from containers without asking Python.
bool is_plain_leaf(py::handle value) {
  auto* object = value.ptr();
  return object == Py_None || PyBool_Check(object) || PyLong_CheckExact(object) ||
         PyFloat_CheckExact(object) || PyUnicode_CheckExact(object) || THPSize_Check(object);
}

// For pytree, which would give a torch.Size back as a plain tuple.
PyObject* is_leaf(PyObject*, PyObject* node) {
  return PyBool_FromLong(THPSize_Check(node) ? 1 : 0);
}

PyMethodDef is_leaf_definition = {"is_leaf", is_leaf, METH_O, nullptr};

py::object put_together(const std::vector<py::object>& leaves, const py::object& spec) {
  if (!spec) return leaves[0];
  py::list list(leaves.size());
  for (size_t i = 0; i < leaves.size(); ++i) list[i] = leaves[i];
  return compat::tree_unflatten()(list, spec);
}

// The running statistics of `layers` stand still while it lives.
class StatisticsGuard {
 public:
  StatisticsGuard(const Settings& settings, const std::vector<py::object>& layers) {
    if (layers.empty()) return;
    py::list list;
    for (const auto& layer : layers) list.append(layer);
    give_back_ = settings.hold_statistics(list);
  }
  ~StatisticsGuard() {
    if (!give_back_) return;
    const py::error_scope pending;
    try {
      give_back_();
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("memopt: giving running statistics back");
    }
  }
  StatisticsGuard(const StatisticsGuard&) = delete;
  StatisticsGuard& operator=(const StatisticsGuard&) = delete;

 private:
  py::object give_back_;
};

// A copy of an object with None in place of its tensors; null if it cannot be copied.
py::object without_tensors(py::handle object, const std::vector<TensorAttribute>& attributes) {
  try {
    auto copy = shallow_copy(object);
    if (!copy) return {};
    for (const auto& held : attributes) set_attribute(copy, held.name, py::none());
    return copy;
  } catch (py::error_already_set&) {
    return {};
  }
}

}  // namespace

py::object call_function(const Settings& settings, py::handle fn, py::handle args,
                         py::handle kwargs) {
  PyObject* result = nullptr;
  if (compat::is_being_compiled()) {
    result = PyObject_CallFunctionObjArgs(settings.call_uncompiled.ptr(), fn.ptr(), args.ptr(),
                                          kwargs.ptr(), nullptr);
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

Call::Call(py::object fn, const py::tuple& args, const py::dict& kwargs, py::object settings,
           py::object owner)
    : objects_(std::make_unique<Objects>(Objects{std::move(fn),
                                                 std::move(owner),
                                                 default_device(),
                                                 std::move(settings),
                                                 {},
                                                 {},
                                                 args.size()})),
      scope_(model_scope_here()) {
  Seen seen;
  objects_->arguments.reserve(args.size() + kwargs.size());
  for (auto value : args) objects_->arguments.push_back(take_apart({}, value, seen));
  for (auto [name, value] : kwargs) {
    objects_->arguments.push_back(
        take_apart(py::reinterpret_borrow<py::object>(name), value, seen));
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

const Settings& Call::settings() const {
  return objects_->settings.cast<Settings&>();
}

size_t Call::tensor_number(py::handle value, Seen& seen) {
  const auto& tensor = THPVariable_Unpack(value.ptr());
  const auto [found, is_new] = seen.tensors.emplace(tensor.unsafeGetTensorImpl(), tensors_.size());
  if (!is_new) return found->second;
  tensors_.push_back({tensor, is_of_base_class(value), tensor});
  if (tensors_.back().may_leave_device || !settings().takes_arguments()) return found->second;
  // What tensor parallelism passes on from layer to layer. The recompute gets the result.
  if (const auto result = compat::result_of_collective(value)) {
    tensors_.back().values = THPVariable_Unpack(result.ptr());
    tensors_.back().may_leave_device = true;
  }
  return found->second;
}

Call::Leaf Call::leaf(py::handle value, Seen& seen) {
  if (THPVariable_Check(value.ptr())) return {{}, tensor_number(value, seen), kNone};
  const Leaf plain{py::reinterpret_borrow<py::object>(value), kNone, kNone};
  if (is_plain_leaf(value)) return plain;
  if (const auto found = seen.holders.find(value.ptr()); found != seen.holders.end())
    return {{}, kNone, found->second};
  const auto attributes = tensor_attributes(value);
  if (attributes.empty()) return plain;
  Holder holder{plain.object, {}};
  for (const auto& [name, tensor] : attributes)
    holder.attributes.push_back({name, tensor_number(tensor, seen), tensor});
  if (settings().takes_arguments()) {
    auto copy = without_tensors(value, attributes);
    for (auto& held : holder.attributes) {
      if (copy) held.then = py::object();
      // The object itself goes on holding them.
      if (!copy) tensors_[held.tensor].may_leave_device = false;
    }
    if (copy) holder.object = std::move(copy);
  }
  seen.holders.emplace(value.ptr(), objects_->holders.size());
  objects_->holders.push_back(std::move(holder));
  return {{}, kNone, objects_->holders.size() - 1};
}

Call::Argument Call::take_apart(py::object name, py::handle value, Seen& seen) {
  Argument argument{std::move(name), {}, {}};
  if (is_plain_leaf(value) || THPVariable_Check(value.ptr())) {
    argument.leaves.push_back(leaf(value, seen));
    return argument;
  }
  static const py::handle is_leaf_function = PyCFunction_New(&is_leaf_definition, nullptr);
  const py::tuple flat = compat::tree_flatten()(value, is_leaf_function);
  for (auto element : py::list(flat[0])) argument.leaves.push_back(leaf(element, seen));
  argument.spec = flat[1];
  return argument;
}

py::object Call::with_tensors(const Holder& holder, const std::vector<py::object>& tensors) {
  const auto& attributes = holder.attributes;
  const auto now = [&](const Attribute& held) { return attribute(holder.object, held.name); };
  if (std::all_of(attributes.begin(), attributes.end(),
                  [&](const Attribute& held) { return now(held).is(tensors[held.tensor]); })) {
    return holder.object;
  }
  auto copy = shallow_copy(holder.object);
  if (!copy) {
    TORCH_CHECK_TYPE(
        std::all_of(attributes.begin(), attributes.end(),
                    [&](const Attribute& held) { return now(held).is(held.then); }),
        "checkpoint: an argument whose tensors are exchanged after forward must have a shallow ",
        "copy (copy.copy) of its class, got none of ",
        std::string(py::str(py::type::of(holder.object))));
    return holder.object;
  }
  for (const auto& held : attributes) set_attribute(copy, held.name, tensors[held.tensor]);
  return copy;
}

void Call::run(const std::vector<at::Tensor>& tensors, c10::intrusive_ptr<saved::Packer> packer) {
  const py::gil_scoped_acquire gil;
  const auto& settings = this->settings();
  std::vector<py::object> wrapped;
  wrapped.reserve(tensors.size());
  for (const auto& tensor : tensors) {
    wrapped.push_back(py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor)));
  }
  std::vector<py::object> holders;
  holders.reserve(objects_->holders.size());
  for (const auto& holder : objects_->holders) holders.push_back(with_tensors(holder, wrapped));
  py::tuple args(objects_->positional);
  py::dict kwargs;
  for (size_t i = 0; i < objects_->arguments.size(); ++i) {
    const auto& argument = objects_->arguments[i];
    std::vector<py::object> leaves;
    leaves.reserve(argument.leaves.size());
    for (const auto& leaf : argument.leaves) {
      leaves.push_back(leaf.object            ? leaf.object
                       : leaf.tensor == kNone ? holders[leaf.holder]
                                              : wrapped[leaf.tensor]);
    }
    auto value = put_together(leaves, argument.spec);
    if (argument.name) {
      kwargs[argument.name] = std::move(value);
    } else {
      PyTuple_SET_ITEM(args.ptr(), static_cast<Py_ssize_t>(i), value.release().ptr());
    }
  }
  wrapped.clear();  // so that the function's own references are the only ones
  holders.clear();
  if (!settings.on_pass.is_none()) settings.on_pass(objects_->owner, -1);
  const auto& owner = objects_->owner;
  const StatisticsGuard statistics(
      settings, norm_layers_with_moving_statistics(
                    owner.is_none() ? std::vector<py::handle>{objects_->fn, args, kwargs}
                                    : std::vector<py::handle>{owner}));
  const DefaultDeviceGuard device(objects_->default_device);
  const HooksGuard hooks(std::move(packer), py::none());
  const auto& fn = settings.again.is_none() ? objects_->fn : settings.again;
  const auto scope = same_scope(scope_);
  const CallScopesGuard calls;
  if (call_function(settings, fn, args, kwargs)) return;
  if (PyErr_ExceptionMatches(stop_exception()) == 0) throw_python_error();
  PyErr_Clear();
}

std::string Call::structure() const {
  std::string text;
  for (const auto& argument : objects_->arguments) {
    if (argument.name) text += py::str(argument.name).cast<std::string>();
    for (const auto& leaf : argument.leaves) {
      if (leaf.tensor != kNone) text += ' ' + std::to_string(leaf.tensor);
      if (leaf.holder == kNone) continue;
      for (const auto& held : objects_->holders[leaf.holder].attributes)
        text += ' ' + std::to_string(held.tensor);
    }
    text += ';';
  }
  return text;
}

bool Call::hooks_copy_on_write() const {
  const py::gil_scoped_acquire gil;
  return compat::hooks_copy_on_write();
}

std::string Call::name() const {
  const py::gil_scoped_acquire gil;
  const auto& subject = objects_->owner.is_none() ? objects_->fn : objects_->owner;
  return py::str(settings().region_name(subject));
}

std::string Call::argument_name(size_t tensor) const {
  const py::gil_scoped_acquire gil;
  const auto holds = [&](const Leaf& leaf) {
    if (leaf.holder == kNone) return leaf.tensor == tensor;
    const auto& attributes = objects_->holders[leaf.holder].attributes;
    return std::any_of(attributes.begin(), attributes.end(),
                       [&](const Attribute& held) { return held.tensor == tensor; });
  };
  for (size_t i = 0; i < objects_->arguments.size(); ++i) {
    const auto& argument = objects_->arguments[i];
    if (std::none_of(argument.leaves.begin(), argument.leaves.end(), holds)) continue;
    if (!argument.name) return "positional argument " + std::to_string(i);
    return "argument " + std::string(py::repr(argument.name));
  }
  return "argument";
}

std::string Call::diagnosis() const {
  const py::gil_scoped_acquire gil;
  const auto& diagnose = settings().diagnose;
  if (diagnose.is_none()) return "";
  return py::str(diagnose());
}

}  // namespace memopt::python
