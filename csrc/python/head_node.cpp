#include "head_node.h"

#include <c10/core/SafePyObject.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../autograd/graph_node.h"
#include "call.h"
#include "objects.h"

namespace memopt::python {

namespace py = pybind11;
namespace autograd_ = torch::autograd;
using at::Tensor;
using autograd_::variable_list;

namespace {

constexpr auto kName = "LazyLogitsBackward";

class LazyLogitsBackward final : public autograd::ReleasedNode<autograd_::Node> {
 public:
  LazyLogitsBackward(py::object call, py::object steps)
      : call_(call.release().ptr(), getPyInterpreter()),
        steps_(steps.release().ptr(), getPyInterpreter()) {}

  py::handle call() const { return object_of(call_); }
  std::string name() const override { return kName; }

 private:
  variable_list apply(variable_list&& grads) override {
    const auto wants = [&](size_t i) { return task_should_compute_output(i); };
    return gradients(grads, {wants(0), wants(1), wants(2)});
  }

  variable_list gradients(const variable_list& grads, std::array<bool, 3> wanted) const {
    if (!grads[0].defined()) return variable_list(wanted.size());
    const py::gil_scoped_acquire gil;
    try {
      const py::object made = call().attr("gradients")(
          object_of(steps_), grads[0], py::make_tuple(wanted[0], wanted[1], wanted[2]));
      variable_list found;
      for (const auto grad : made) found.push_back(grad.is_none() ? Tensor() : grad.cast<Tensor>());
      return found;
    } catch (py::error_already_set& error) {
      error.restore();
      throw_python_error();
    }
  }

  // Compiled autograd calls it as it is, and compiles anew for each call of a head.
  void compiled_args(autograd_::CompiledNodeArgs& args) const override { args.collect(number_); }

  variable_list apply_with_saved(const variable_list& grads,
                                 autograd_::SwapSavedVariables& swapped) override {
    namespace compiled = torch::dynamo::autograd;
    std::array<bool, 3> wanted{};
    for (size_t i = 0; i < wanted.size(); ++i) wanted[i] = task_should_compute_output(i);
    const auto function = [node = getptr(), wanted](const variable_list& outer,
                                                    const std::vector<at::IValue>&) {
      return static_cast<const LazyLogitsBackward&>(*node).gradients(outer, wanted);
    };
    const auto metadata =
        compiled::IValuePacker<std::vector<std::optional<autograd_::InputMetadata>>>::pack(
            compiled::get_input_metadata(next_edges()));
    const auto& python = compiled::getPyCompilerInterface();
    const std::string bound =
        python->bind_function(swapped.get_py_compiler(), kName, function, {},
                              /*is_custom_function=*/true, /*is_traceable=*/false);
    return python->call_function(swapped.get_py_compiler(), "apply_functional", bound, grads, {},
                                 metadata);
  }

  static int64_t next_number() {  // with the GIL
    static int64_t last = 0;
    return ++last;
  }

  const int64_t number_ = next_number();
  c10::SafePyObject call_;
  c10::SafePyObject steps_;
};

LazyLogitsBackward& node_of(PyObject* self) {
  const auto* object = reinterpret_cast<autograd_::THPCppFunction*>(self);
  return static_cast<LazyLogitsBackward&>(*object->cdata);
}

// Tells the call of a hook, then does what PyTorch does.
template <PyObject* (*kRegister)(PyObject*, PyObject*)>
PyObject* hooked(PyObject* self, PyObject* hook) {
  try {
    node_of(self).call().attr("hooked")(py::handle(hook));
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  }
  return kRegister(self, hook);
}

// The node's class in Python: PyTorch's for nodes of C++, with methods of our own.
void register_type() {
  static PyTypeObject type{PyVarObject_HEAD_INIT(nullptr, 0)};
  static std::array<PyMethodDef, 2> methods{{
      {"register_hook", hooked<autograd_::THPCppFunction_register_hook>, METH_O, nullptr},
      {"register_prehook", hooked<autograd_::THPCppFunction_register_prehook>, METH_O, nullptr},
  }};
  autograd_::_initFunctionPyTypeObject(type, kName, nullptr, nullptr);
  const py::handle names(type.tp_dict);
  for (PyMethodDef& method : methods) {
    names[method.ml_name] = py::reinterpret_steal<py::object>(PyDescr_NewMethod(&type, &method));
  }
  PyType_Modified(&type);
  autograd_::registerCppFunction(typeid(LazyLogitsBackward), &type);
}

}  // namespace

void place_in_graph(const Tensor& logits, const Tensor& input, const Tensor& weight,
                    const std::optional<Tensor>& bias, const py::object& call,
                    const py::object& steps) {
  static const bool is_registered = (register_type(), true);
  static_cast<void>(is_registered);
  const Tensor no_bias;
  const Tensor& third = bias.has_value() ? *bias : no_bias;
  if (!autograd_::compute_requires_grad(input, weight, third)) return;
  const auto node = autograd::new_node<LazyLogitsBackward>(call, steps);
  node->set_next_edges(autograd_::collect_next_edges(input, weight, third));
  const uint32_t number = node->add_input_metadata(logits);
  autograd_::impl::set_gradient_edge(logits, {node, number});
}

bool is_head_node(const autograd_::Node* node) {
  return dynamic_cast<const LazyLogitsBackward*>(node) != nullptr;
}

bool is_in_place(const Tensor& logits) {
  return is_head_node(logits.grad_fn().get());
}

}  // namespace memopt::python
