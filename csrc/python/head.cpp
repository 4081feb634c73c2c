#include "head.h"

#include <pybind11/stl.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../autograd/support.h"
#include "../intercept/taken.h"
#include "../ops/supported.h"
#include "head_node.h"
#include "head_tensors.h"
#include "objects.h"

namespace memopt::python {
namespace {

namespace py = pybind11;
using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// As memopt._compat.in_transform().
bool in_transform() {
  constexpr auto kTransform = c10::DispatchKey::FuncTorchDynamicLayerFrontMode;
  return c10::impl::tls_is_dispatch_key_included(kTransform) ||
         torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr;
}

bool fits(const Tensor& parameter, const Tensor& input) {
  return intercept::is_dense(parameter) && parameter.device() == input.device() &&
         ops::takes_parameter(parameter.scalar_type(), input.scalar_type());
}

// The common case of what memopt/_convert/head.py asks of a linear's call: whether its logits may
// wait. False: Python has to ask.
bool is_plain_head(py::handle input_object, py::handle weight_object, py::handle bias_object) {
  const auto is_plain = [](py::handle object) {
    return THPVariable_CheckExact(object.ptr()) && !object.is_none();
  };
  if (!is_plain(input_object) || !is_plain(weight_object)) return false;
  if (!bias_object.is_none() && !is_plain(bias_object)) return false;
  const Tensor& input = THPVariable_Unpack(input_object.ptr());
  const Tensor& weight = THPVariable_Unpack(weight_object.ptr());
  return at::GradMode::is_enabled() && (input.requires_grad() || weight.requires_grad()) &&
         !in_transform() && intercept::supports(input) && fits(weight, input) &&
         (bias_object.is_none() || fits(THPVariable_Unpack(bias_object.ptr()), input)) &&
         input.dim() > 0 && weight.dim() == 2 && weight.sym_size(0) > 1 && weight.sym_size(1) > 1 &&
         input.sym_size(-1) == weight.sym_size(1);
}

// Whether an operation on a lazy tensor may leave it so, as far as this thread's modes go; and
// nothing has written it.
bool may_stay_lazy(const Tensor& logits) {
  return at::GradMode::is_enabled() && is_head_node(logits.grad_fn().get()) && !in_transform();
}

using Loss = Tensor(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                    const OptionalTensor&, std::string_view, std::optional<int64_t>, double,
                    std::optional<double>, double, double, const OptionalTensor&,
                    std::optional<int64_t>, std::optional<at::ScalarType>);

// torch.ops.memopt.linear_cross_entropy, past what makes a packet of operators of it.
Tensor linear_cross_entropy(const Tensor& input, const Tensor& linear_weight, const Tensor& target,
                            const OptionalTensor& linear_bias, const OptionalTensor& weight,
                            const std::string& reduction, std::optional<int64_t> ignore_index,
                            double label_smoothing, std::optional<double> softcap,
                            double logit_scale, at::ScalarType dtype) {
  const py::gil_scoped_release no_gil;
  static const auto op = autograd::find_op<Loss>("memopt::linear_cross_entropy");
  return op.call(input, linear_weight, target, linear_bias, weight, reduction, ignore_index,
                 label_smoothing, softcap, logit_scale, /*z_loss=*/0, /*num_items=*/std::nullopt,
                 /*chunk=*/std::nullopt, dtype);
}

// The name and number of the node of a tensor: unlike the node, they keep nothing alive.
std::optional<std::pair<std::string, uint64_t>> node_key(const Tensor& tensor) {
  const auto& node = tensor.grad_fn();
  if (node == nullptr) return std::nullopt;
  return std::pair(node->name(), node->sequence_nr());
}

}  // namespace

void register_head(py::module_& m) {
  py::class_<HeadTensors>(m, "HeadTensors", "What the logits of a head's call are made of.")
      .def(
          py::init<Tensor, Tensor, OptionalTensor, std::vector<OptionalTensor>>(),
          "HeadTensors(input, weight, bias, owned): the first three detached where they require no "
          "gradient; owned: weight and bias as they are.")
      .def("now", &HeadTensors::now, "now(): input, weight and bias as they were at the call.")
      .def("reads", &HeadTensors::reads, "reads(tensor): it is made of this as well.")
      .def(
          "check", &HeadTensors::check,
          "check(): None: they are as they were. A text: what has become of one; empty: its memory "
          "was exchanged, and now() has that of then.")
      .def_static("any", &HeadTensors::any, "any(): whether one is alive.")
      .def_static("stepped", &HeadTensors::stepped,
                  "stepped(parameters): an optimizer has written these.");
  m.def("is_plain_head", &is_plain_head,
        "is_plain_head(input, weight, bias): the logits may wait; False: ask more closely.");
  m.def("may_stay_lazy", &may_stay_lazy, "may_stay_lazy(logits): none but plain modes are on.");
  m.def("place_in_graph", &place_in_graph,
        "place_in_graph(logits, input, weight, bias, call, steps): gives lazy logits a node.");
  m.def("is_in_place", &is_in_place, "is_in_place(logits): its node is that of place_in_graph.");
  m.def("node_key", &node_key, "node_key(tensor): its node's name and number; None without one.");
  m.def("linear_cross_entropy", &linear_cross_entropy,
        "torch.ops.memopt.linear_cross_entropy, of arguments without __torch_function__.");
}

}  // namespace memopt::python
