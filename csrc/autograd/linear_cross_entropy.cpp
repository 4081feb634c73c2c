// The cross entropy, the log-probabilities or the logsumexp of a linear's output, in chunks of rows
// (ops/linear_cross_entropy.cpp): the logits never exist as a whole.
//
// A mean or a sum: forward makes the gradients on the way, for a gradient of the loss of 1, and
// backward scales them. Saved: the gradients that are asked for, of their tensors' sizes, and
// nothing else.
//
// Each row's loss, log-probability, logsumexp or entropy: backward makes the chunks again, for one
// more product. Saved: input, weight and bias, which are there anyway, and 4 bytes a row (8 with
// the entropy). create_graph=True is for these alone.
//
// float16 gradients of a sum are not made for the loss's own gradient, which a loss scale keeps
// within the range: they are those of the rows' losses before the division by their number, in
// float32 for the weight.
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/zeros.h>

#include "../ops/checks.h"
#include "cross_entropy.h"
#include "declare.h"
#include "graph_node.h"
#include "linears.h"
#include "ownership.h"
#include "recipe.h"
#include "run.h"

namespace memopt::autograd {
namespace {

using Mask = std::array<bool, 3>;

// The tensors of a call: input [N, features].
struct HeadTensors {
  Tensor input;
  Tensor weight;
  OptionalTensor bias;
  Tensor target;  // undefined for the logsumexp
  OptionalTensor class_weight;

  Mask require_grad() const {
    return {input.requires_grad(), weight.requires_grad(),
            bias.has_value() && bias->requires_grad()};
  }
};

// What backward hands to the private op.
struct HeadGrads {
  OptionalTensor loss;  // of each row, or one number for all; not given: 1
  OptionalTensor entropy;
  OptionalTensor log_sum;  // forward's
  OptionalTensor forward_entropy;
  Mask wanted{};
};

ops::LossResults run_head(const LossOptions& o, const HeadTensors& t, const HeadGrads& grads) {
  static const auto op = MEMOPT_PRIVATE_OP(_linear_cross_entropy);
  return op.call(t.input, t.weight, t.bias, as_optional(t.target), t.class_weight, grads.loss,
                 grads.entropy, grads.log_sum, grads.forward_entropy, o.ignore_index,
                 o.label_smoothing, o.softcap, o.logit_scale, o.z_loss, o.log_probs, o.with_entropy,
                 grads.wanted, o.chunk == 0 ? std::nullopt : std::optional<int64_t>(o.chunk));
}

// grad * factor in a dtype; over the gradient itself where that is the node's alone.
Tensor scaled(Tensor grad, const Tensor& factor, at::ScalarType dtype, bool hooked) {
  if (!grad.defined()) return grad;
  if (grad.scalar_type() != dtype) return grad.mul(factor).to(dtype);
  if (hooked || !is_saved_by_us_alone(grad)) return grad.mul(factor);
  const bool is_one = factor.is_cpu() && factor.item<double>() == 1;
  const Tensor own = grad.detach();
  return is_one ? own : own.mul_(factor);
}

// The sum of the rows' losses, over `count` if that is defined, with the gradients made on the way.
struct SummedHead {
  LossOptions o;
  at::ScalarType dtype;

  template <class Function, class F>
  static void visit(Function& function, F&& f) {
    LossOptions::visit(function.o, [&](const auto&... fields) { f(fields..., function.dtype); });
  }

  variable_list backward(variable_list saved, const variable_list& grads,
                         const Wanted& wanted) const {
    variable_list result(wanted.size());
    if (!grads[0].defined()) return result;
    TORCH_CHECK_NOT_IMPLEMENTED(
        !at::GradMode::is_enabled(),
        "linear_cross_entropy: create_graph=True asks for logits, which a mean or a sum has not "
        "kept; use reduction='none' and reduce its result");
    const NoAutocast no_autocast;
    const Tensor count = std::move(saved[3]);
    const Tensor factor = count.defined() ? grads[0] / count : grads[0];
    for (size_t i = 0; i < 3; ++i) {
      result[i] = scaled(std::move(saved[i]), factor, dtype, o.hooked);
    }
    return result;
  }
};

Tensor sum_with_node(LossOptions o, const HeadTensors& t, const Tensor& count) {
  const bool divides_later = t.input.scalar_type() == at::kHalf && count.defined();
  // Lives until the node has saved: hooks of recipes alone would have the gradients kept as they
  // are, and keep backward from scaling them in place.
  std::optional<WithoutHooks> without_hooks;
  variable_list saved;
  Tensor sum;
  {
    const BelowAutograd below_autograd;
    HeadGrads grads;
    if (count.defined() && !divides_later) grads.loss = count.reciprocal();
    grads.wanted = t.require_grad();
    const auto made = run_head(o, t, grads);
    saved = {std::get<4>(made), std::get<5>(made), std::get<6>(made),
             divides_later ? count : Tensor()};
    sum = count.defined() ? std::get<0>(made).div(count) : std::get<0>(made);
  }
  if (recipe_recorder() != nullptr && recipe_recorder()->needs_no_hooks(saved)) {
    without_hooks.emplace();
  }
  o.hooked = saves_with_hooks();
  const auto node = make_node(SummedHead{o, t.input.scalar_type()});
  node->set_arguments(t.input, t.weight, t.bias);
  node->add_output(sum);
  node->save(saved);
  return sum;
}

// Each row's loss, and its entropy if asked for.
struct RowHead {
  LossOptions o;

  template <class Function, class F>
  static void visit(Function& function, F&& f) {
    LossOptions::visit(function.o, f);
  }

  variable_list backward(const variable_list& saved, const variable_list& outer,
                         const Wanted& needed) const {
    if (!any_defined(outer)) return variable_list(needed.size());
    const NoAutocast no_autocast;
    const HeadTensors t{saved[0], saved[1], as_optional(saved[2]), saved[3], as_optional(saved[4])};
    const Tensor dentropy = o.with_entropy ? outer[1] : Tensor();
    const Mask wanted{needed[0], needed[1], needed[2]};
    return at::GradMode::is_enabled() ? composed(o, t, outer[0], dentropy, wanted)
                                      : by_chunks(o, t, outer[0], dentropy, saved, wanted);
  }

 private:
  static variable_list by_chunks(const LossOptions& o, const HeadTensors& t, const Tensor& dloss,
                                 const Tensor& dentropy, const variable_list& saved, Mask wanted) {
    // A loss without a gradient: 0 for all rows.
    const Tensor given = dloss.defined() ? dloss : at::zeros({}, dentropy.options());
    auto made =
        run_head(o, t, {given, as_optional(dentropy), saved[5], as_optional(saved[6]), wanted});
    const auto narrow = [&](Tensor grad) {
      return grad.defined() ? grad.to(t.input.scalar_type()) : grad;
    };
    return {std::get<4>(made), narrow(std::get<5>(made)), narrow(std::get<6>(made))};
  }

  static variable_list composed(const LossOptions& o, const HeadTensors& t, const Tensor& dloss,
                                const Tensor& dentropy, Mask wanted) {
    const Tensor logits = at::linear(t.input, t.weight, t.bias);
    const Tensor g = differentiable_logit_gradient(
        o, logits, t.target, t.class_weight.value_or(Tensor()), dloss, dentropy);
    return {wanted[0] ? g.matmul(t.weight) : Tensor(), wanted[1] ? g.t().matmul(t.input) : Tensor(),
            wanted[2] ? g.sum(0) : Tensor()};
  }
};

variable_list rows_with_node(const LossOptions& o, const HeadTensors& t) {
  const auto node = make_node(RowHead{o});
  node->set_arguments(t.input, t.weight, t.bias);
  ops::LossResults made;
  {
    const BelowAutograd below_autograd;
    made = run_head(o, t, {});
  }
  const Tensor entropy = std::get<3>(made);
  variable_list outputs{std::get<1>(made)};
  if (o.with_entropy) outputs.push_back(entropy);
  for (const Tensor& output : outputs) node->add_output(output);
  node->save({t.input, t.weight, t.bias.value_or(Tensor()), t.target,
              t.class_weight.value_or(Tensor()), std::get<2>(made), entropy});
  return outputs;
}

c10::SymIntArrayRef rows_of(const Tensor& input) {
  return input.sym_sizes().slice(0, input.dim() - 1);
}

// The call's tensors as rows. `name` is what the user called.
HeadTensors without_target(const char* name, const Tensor& input, const Tensor& weight,
                           const OptionalTensor& bias) {
  check_features(name, "input", input);
  TORCH_CHECK(weight.dim() == 2, name, ": linear_weight must have two dimensions, got shape ",
              weight.sym_sizes());
  check_linear(name, "linear_weight", "linear_bias", input, input.sym_size(-1), weight,
               value_or_undefined(bias));
  return {as_matrix(input), weight, bias, Tensor(), std::nullopt};
}

HeadTensors head_tensors(const char* name, const Tensor& input, const Tensor& weight,
                         const OptionalTensor& bias, const Tensor& target,
                         const OptionalTensor& class_weight) {
  HeadTensors t = without_target(name, input, weight, bias);
  const auto rows = rows_of(input);
  const auto of_target = target.sym_sizes();
  c10::SymDimVector with_classes(rows.begin(), rows.end());
  with_classes.push_back(weight.sym_size(0));
  const bool is_classes = of_target.equals(rows);
  TORCH_CHECK(is_classes || of_target.equals(with_classes), name, ": target must have shape ", rows,
              " for class indices or ", c10::SymIntArrayRef(with_classes),
              " for probabilities, got ", of_target);
  const c10::SymInt count = t.input.sym_size(0);
  t.target = is_classes ? target.reshape_symint({count})
                        : target.reshape_symint({count, weight.sym_size(0)});
  t.class_weight = class_weight;
  return t;
}

// Of each row: the loss; and the entropy if asked for.
variable_list run_rows(const char* name, const LossOptions& o, const HeadTensors& t) {
  if (needs_node(name, {t.input, t.weight, value_or_undefined(t.bias)})) {
    return rows_with_node(o, t);
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto made = run_head(o, t, {});
  return {std::get<1>(made), std::get<3>(made)};
}

Tensor run_sum(const char* name, const LossOptions& o, const HeadTensors& t, const Tensor& count) {
  if (needs_node(name, {t.input, t.weight, value_or_undefined(t.bias)})) {
    return sum_with_node(o, t, count);
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Tensor total = std::get<0>(run_head(o, t, {}));
  return count.defined() ? total.div(count) : total;
}

int64_t checked_chunk(const char* name, std::optional<int64_t> chunk) {
  TORCH_CHECK_VALUE(!chunk.has_value() || *chunk >= 1, name, ": chunk must be at least 1, got ",
                    chunk.value_or(0));
  return chunk.value_or(0);
}

double checked_softcap(const char* name, std::optional<double> softcap) {
  TORCH_CHECK_VALUE(!softcap.has_value() || *softcap > 0, name, ": softcap must be positive, got ",
                    softcap.value_or(0));
  return softcap.value_or(0);
}

Tensor linear_cross_entropy(const Tensor& input, const Tensor& linear_weight, const Tensor& target,
                            const OptionalTensor& linear_bias, const OptionalTensor& weight,
                            std::string_view reduction_name, std::optional<int64_t> ignore_index,
                            double label_smoothing, std::optional<double> softcap,
                            double logit_scale, double z_loss, const OptionalTensor& num_items,
                            std::optional<int64_t> chunk, std::optional<at::ScalarType> dtype) {
  constexpr auto kName = "linear_cross_entropy";
  const Reduction reduction = parse_reduction(kName, reduction_name);
  check_constant(kName, target, weight);
  const HeadTensors t = head_tensors(kName, input, linear_weight, linear_bias, target, weight);
  TORCH_CHECK_VALUE(t.target.dim() == 1 || !ignore_index.has_value(), kName,
                    ": ignore_index is for class indices; target has probabilities");
  LossOptions o{.ignore_index = ignore_index.value_or(-100),
                .label_smoothing = label_smoothing,
                .softcap = checked_softcap(kName, softcap),
                .logit_scale = logit_scale,
                .z_loss = z_loss,
                .chunk = checked_chunk(kName, chunk)};
  const Tensor count = divisor(kName, reduction, o, t.target, value_or_undefined(weight), num_items,
                               sums_type(input));
  Tensor loss;
  if (reduction == Reduction::kNone) {
    loss = run_rows(kName, o, t)[0].reshape_symint(rows_of(input));
  } else {
    loss = run_sum(kName, o, t, count);
  }
  return loss.to(dtype.value_or(input.scalar_type()));
}

using TwoTensors = std::tuple<Tensor, Tensor>;

variable_list log_probs(const Tensor& input, const Tensor& linear_weight, const Tensor& target,
                        const OptionalTensor& linear_bias, int64_t ignore_index,
                        std::optional<double> softcap, double logit_scale,
                        std::optional<int64_t> chunk, bool with_entropy) {
  constexpr auto kName = "linear_log_probs";
  const HeadTensors t =
      head_tensors(kName, input, linear_weight, linear_bias, target, std::nullopt);
  TORCH_CHECK(t.target.dim() == 1, kName, ": target must be class indices of shape ",
              rows_of(input), ", got ", target.sym_sizes());
  const LossOptions o{.ignore_index = ignore_index,
                      .softcap = checked_softcap(kName, softcap),
                      .logit_scale = logit_scale,
                      .log_probs = true,
                      .with_entropy = with_entropy,
                      .chunk = checked_chunk(kName, chunk)};
  variable_list results = run_rows(kName, o, t);
  results[0] = results[0].neg().reshape_symint(rows_of(input));
  if (with_entropy) results[1] = results[1].reshape_symint(rows_of(input));
  return results;
}

Tensor linear_log_probs(const Tensor& input, const Tensor& linear_weight, const Tensor& target,
                        const OptionalTensor& linear_bias, int64_t ignore_index,
                        std::optional<double> softcap, double logit_scale,
                        std::optional<int64_t> chunk) {
  return log_probs(input, linear_weight, target, linear_bias, ignore_index, softcap, logit_scale,
                   chunk, false)[0];
}

TwoTensors linear_log_probs_and_entropy(const Tensor& input, const Tensor& linear_weight,
                                        const Tensor& target, const OptionalTensor& linear_bias,
                                        int64_t ignore_index, std::optional<double> softcap,
                                        double logit_scale, std::optional<int64_t> chunk) {
  const variable_list results = log_probs(input, linear_weight, target, linear_bias, ignore_index,
                                          softcap, logit_scale, chunk, true);
  return {results[0], results[1]};
}

Tensor linear_logsumexp(const Tensor& input, const Tensor& linear_weight,
                        const OptionalTensor& linear_bias, std::optional<double> softcap,
                        double logit_scale, std::optional<int64_t> chunk) {
  constexpr auto kName = "linear_logsumexp";
  const HeadTensors t = without_target(kName, input, linear_weight, linear_bias);
  const LossOptions o{.softcap = checked_softcap(kName, softcap),
                      .logit_scale = logit_scale,
                      .chunk = checked_chunk(kName, chunk)};
  return run_rows(kName, o, t)[0].reshape_symint(rows_of(input));
}

// Computes in the autocast dtype. The results are of the type of sums, as log_softmax's and
// cross_entropy's are there.
const Autocast kLogProbs{AutocastTo::kLow, {}};

MEMOPT_DECLARE(linear_log_probs, kLogProbs, {},
               R"(linear_log_probs(Tensor input, Tensor linear_weight, Tensor target, *,
                  Tensor? linear_bias=None, int ignore_index=-100, float? softcap=None,
                  float logit_scale=1.0, int? chunk=None) -> Tensor)");
MEMOPT_DECLARE(linear_log_probs_and_entropy, kLogProbs, {},
               R"(linear_log_probs_and_entropy(Tensor input, Tensor linear_weight, Tensor target, *,
                  Tensor? linear_bias=None, int ignore_index=-100, float? softcap=None,
                  float logit_scale=1.0, int? chunk=None) -> (Tensor log_probs, Tensor entropy))");
MEMOPT_DECLARE(linear_logsumexp, kLogProbs, {},
               R"(linear_logsumexp(Tensor input, Tensor linear_weight, *, Tensor? linear_bias=None,
                  float? softcap=None, float logit_scale=1.0, int? chunk=None) -> Tensor)");
MEMOPT_DECLARE(linear_cross_entropy, {}, {},
               R"(linear_cross_entropy(Tensor input, Tensor linear_weight, Tensor target, *,
                  Tensor? linear_bias=None, Tensor? weight=None, str reduction="mean",
                  int? ignore_index=None, float label_smoothing=0.0, float? softcap=None,
                  float logit_scale=1.0, float z_loss=0.0, Tensor? num_items=None, int? chunk=None,
                  ScalarType? dtype=None) -> Tensor)");

template <c10::DeviceType kDevice>
Tensor head_under_autocast(const Tensor& input, const Tensor& linear_weight, const Tensor& target,
                           const OptionalTensor& linear_bias, const OptionalTensor& weight,
                           std::string_view reduction, std::optional<int64_t> ignore_index,
                           double label_smoothing, std::optional<double> softcap,
                           double logit_scale, double z_loss, const OptionalTensor& num_items,
                           std::optional<int64_t> chunk, std::optional<at::ScalarType> dtype) {
  const NoAutocast no_autocast;
  const autocast::Target low{kDevice, AutocastTo::kLow, at::autocast::get_autocast_dtype(kDevice)};
  static const auto op = find_op<decltype(linear_cross_entropy)>("memopt::linear_cross_entropy");
  return op.call(autocast::cast(input, low, false), autocast::cast(linear_weight, low, false),
                 target, autocast::cast(linear_bias, low, false), weight, reduction, ignore_index,
                 label_smoothing, softcap, logit_scale, z_loss, num_items, chunk,
                 dtype.value_or(sums_type(input)));
}

}  // namespace

TORCH_LIBRARY_IMPL(memopt, AutocastCPU, m) {
  m.impl("linear_cross_entropy", head_under_autocast<c10::DeviceType::CPU>);
}
TORCH_LIBRARY_IMPL(memopt, AutocastCUDA, m) {
  m.impl("linear_cross_entropy", head_under_autocast<c10::DeviceType::CUDA>);
}

}  // namespace memopt::autograd
