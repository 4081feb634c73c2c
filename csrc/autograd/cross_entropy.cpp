// Cross entropy of logits that are there. Saved for backward: the logits and 4 bytes a row, where
// PyTorch's saves log-probabilities beside them. The gradient is written over the logits where they
// are ours.
#include "cross_entropy.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <string>

#include "declare.h"
#include "graph_node.h"
#include "linears.h"
#include "ownership.h"
#include "run.h"

namespace memopt::autograd {

Reduction parse_reduction(const char* op, std::string_view name) {
  if (name == "none") return Reduction::kNone;
  if (name == "mean") return Reduction::kMean;
  if (name == "sum") return Reduction::kSum;
  TORCH_CHECK_VALUE(false, op, ": reduction must be none, mean or sum, got '", std::string(name),
                    "'");
}

at::ScalarType sums_type(const Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

Tensor divisor(const char* op, Reduction reduction, const LossOptions& o, const Tensor& target,
               const Tensor& class_weight, const OptionalTensor& num_items, at::ScalarType sums) {
  if (num_items.has_value() && num_items->defined()) {
    TORCH_CHECK_VALUE(reduction == Reduction::kMean, op,
                      ": num_items is what a mean divides by; reduction must be mean");
    TORCH_CHECK_VALUE(num_items->sym_numel() == 1, op, ": num_items must be one number, got shape ",
                      num_items->sym_sizes());
    return num_items->detach().to(target.device(), sums).reshape({});
  }
  if (reduction != Reduction::kMean) return Tensor();
  if (target.dim() != 1) {
    return at::full_symint({}, target.sym_size(0), target.options().dtype(sums));
  }
  const Tensor counts = target.ne(o.ignore_index);
  if (!class_weight.defined()) return counts.sum().to(sums);
  // Classes out of range are an error of the op that comes next, which names it.
  const Tensor classes =
      target.clamp_min(0).minimum(at::full_like(target, class_weight.sym_size(0)) - 1);
  return (class_weight.detach().to(at::kDouble).index({classes}) * counts).sum().to(sums);
}

void check_constant(const char* op, const Tensor& target, const OptionalTensor& class_weight) {
  TORCH_CHECK_NOT_IMPLEMENTED(!at::GradMode::is_enabled() || !target.requires_grad(), op,
                              ": target requires a gradient, which it does not get; detach it, or "
                              "use torch.nn.functional's op");
  TORCH_CHECK_NOT_IMPLEMENTED(
      !at::GradMode::is_enabled() || !class_weight.has_value() || !class_weight->requires_grad(),
      op, ": the class weights require a gradient, which they do not get; detach them");
}

Tensor differentiable_logit_gradient(const LossOptions& o, const Tensor& logits,
                                     const Tensor& target, const Tensor& class_weight,
                                     const Tensor& dloss, const Tensor& dentropy) {
  const auto sums = sums_type(logits);
  const Tensor l = logits.to(sums);
  const Tensor bounded = o.softcap == 0 ? Tensor() : at::tanh(l.mul(o.logit_scale / o.softcap));
  const Tensor z = o.softcap == 0 ? l.mul(o.logit_scale) : bounded.mul(o.softcap);
  const Tensor log_p = at::log_softmax(z, 1);
  const Tensor p = log_p.exp();
  Tensor counts, q;
  const c10::SymInt cols = logits.sym_size(1);
  if (!target.defined()) {
    q = at::zeros_like(l);
  } else if (target.dim() == 1) {
    counts = target.ne(o.ignore_index).to(sums);
    const Tensor classes = at::where(target.eq(o.ignore_index), at::zeros_like(target), target);
    q = at::zeros_like(l).scatter(1, classes.unsqueeze(1), 1.0);
  } else {
    q = target.detach().to(sums);
  }
  if (o.label_smoothing != 0) {
    q = q.mul(1 - o.label_smoothing) + at::full_like(q, o.label_smoothing).div(cols);
  }
  if (class_weight.defined()) q = q * class_weight.detach().to(sums);
  Tensor of_p = q.sum(1);
  if (!target.defined()) of_p = of_p + 1;  // a logsumexp alone: p, without q
  if (o.z_loss != 0) of_p = of_p + at::logsumexp(z, 1).mul(2 * o.z_loss);
  Tensor dz;
  const auto column = [&](const Tensor& rows) {
    const Tensor counted = counts.defined() ? rows * counts : rows;
    return counted.dim() == 0 ? counted : counted.unsqueeze(1);
  };
  if (dloss.defined()) dz = column(dloss) * (p * of_p.unsqueeze(1) - q);
  if (dentropy.defined()) {
    const Tensor entropy = (p * log_p).sum(1).neg();
    const Tensor part = column(dentropy).neg() * p * (log_p + entropy.unsqueeze(1));
    dz = dz.defined() ? dz + part : part;
  }
  const Tensor dl = o.softcap == 0 ? dz : dz * bounded.square().neg().add(1);
  return dl.mul(o.logit_scale).to(logits.scalar_type());
}

namespace {

// The sum of the rows' losses, or each row's.
struct CrossEntropy {
  LossOptions o;

  template <class Function, class F>
  static void visit(Function& function, F&& f) {
    LossOptions::visit(function.o, f);
  }

  static Tensor forward(const LossOptions& o, const Tensor& logits, const Tensor& target,
                        const OptionalTensor& class_weight, bool by_rows, Tensor* log_sum) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    static const auto op = MEMOPT_PRIVATE_OP(_cross_entropy_forward);
    auto [total, rows, sums] =
        op.call(logits, target, class_weight, o.ignore_index, o.label_smoothing);
    *log_sum = std::move(sums);
    return by_rows ? rows : total;
  }

  variable_list backward(variable_list saved, const variable_list& grads,
                         const Wanted& /*wanted*/) const {
    if (!grads[0].defined()) return {Tensor()};
    const NoAutocast no_autocast;
    Tensor logits = std::move(saved[0]);
    const Tensor log_sum = saved[1], target = saved[2], weight = saved[3];
    saved.clear();
    if (at::GradMode::is_enabled()) {
      if (!logits.requires_grad()) {
        logits = logits.detach();
        torch::autograd::impl::set_gradient_edge(logits,
                                                 torch::autograd::get_current_node()->next_edge(0));
      }
      return {differentiable_logit_gradient(o, logits, target, weight, grads[0], Tensor())};
    }
    if (!o.hooked && logits.is_contiguous() && is_saved_by_us_alone(logits)) {
      static const auto op = MEMOPT_PRIVATE_OP(_cross_entropy_backward_);
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      Tensor gradient = logits.detach();
      op.call(grads[0], gradient, log_sum, target, as_optional(weight), o.ignore_index,
              o.label_smoothing);
      return {std::move(gradient)};
    }
    static const auto op = MEMOPT_PRIVATE_OP(_cross_entropy_backward);
    return {op.call(grads[0], logits, log_sum, target, as_optional(weight), o.ignore_index,
                    o.label_smoothing)};
  }
};

Tensor run_with_node(LossOptions o, const Tensor& logits, const Tensor& target,
                     const OptionalTensor& class_weight, bool by_rows) {
  o.hooked = saves_with_hooks();
  const auto node = make_node(CrossEntropy{o});
  node->set_arguments(logits);
  Tensor log_sum;
  Tensor loss = CrossEntropy::forward(o, logits, target, class_weight, by_rows, &log_sum);
  node->add_output(loss);
  // An alias, which Python never has an object of, so that in backward the memory shows who else
  // has the logits. It shares their version.
  const Tensor alias = is_traced(logits) ? logits : logits.tensor_data();
  node->save({alias, log_sum, target, class_weight.value_or(Tensor())});
  return loss;
}

Tensor cross_entropy(const Tensor& input, const Tensor& target, const OptionalTensor& weight,
                     std::string_view reduction_name, int64_t ignore_index, double label_smoothing,
                     std::optional<at::ScalarType> dtype) {
  constexpr auto kName = "cross_entropy";
  const Reduction reduction = parse_reduction(kName, reduction_name);
  check_constant(kName, target, weight);
  LossOptions o;
  o.ignore_index = ignore_index;
  o.label_smoothing = label_smoothing;
  const bool by_rows = reduction == Reduction::kNone;
  Tensor loss;
  if (needs_node(kName, input)) {
    loss = run_with_node(o, input, target, weight, by_rows);
  } else {
    Tensor log_sum;
    loss = CrossEntropy::forward(o, input, target, weight, by_rows, &log_sum);
  }
  const Tensor count = divisor(kName, reduction, o, target, weight.value_or(Tensor()), std::nullopt,
                               sums_type(input));
  if (count.defined()) loss = loss / count;
  return loss.to(dtype.value_or(input.scalar_type()));
}

MEMOPT_DECLARE(cross_entropy, {}, {},
               R"(cross_entropy(Tensor input, Tensor target, Tensor? weight=None, *,
                  str reduction="mean", int ignore_index=-100, float label_smoothing=0.0,
                  ScalarType? dtype=None) -> Tensor)");

// PyTorch's returns float32 there. The logits are read as they are, without a copy in float32.
Tensor cross_entropy_under_autocast(const Tensor& input, const Tensor& target,
                                    const OptionalTensor& weight, std::string_view reduction,
                                    int64_t ignore_index, double label_smoothing,
                                    std::optional<at::ScalarType> dtype) {
  const NoAutocast no_autocast;
  static const auto op = find_op<decltype(cross_entropy)>("memopt::cross_entropy");
  return op.call(input, target, weight, reduction, ignore_index, label_smoothing,
                 dtype.value_or(sums_type(input)));
}

}  // namespace

TORCH_LIBRARY_IMPL(memopt, AutocastCPU, m) {
  m.impl("cross_entropy", cross_entropy_under_autocast);
}
TORCH_LIBRARY_IMPL(memopt, AutocastCUDA, m) {
  m.impl("cross_entropy", cross_entropy_under_autocast);
}

}  // namespace memopt::autograd
