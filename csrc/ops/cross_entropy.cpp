// Cross entropy of logits that are there, below autograd; and what linear_cross_entropy shares.
#include "cross_entropy.h"

#include <ATen/ops/_assert_async.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/sum.h>

#include <cmath>
#include <string>

#include "checks.h"
#include "declare.h"
#include "launch.h"
#include "supported.h"
#include "tensors.h"

namespace memopt::ops {

using kernels::CrossEntropyParams;
using kernels::cpu::Kernels;

namespace {

void check_target(const Loss& loss, const Tensor& like, const c10::SymInt& rows,
                  const c10::SymInt& cols) {
  const char* op = loss.op;
  const Tensor& target = loss.target;
  TORCH_CHECK(target.layout() == at::kStrided, op, ": target must be a dense tensor");
  TORCH_CHECK(target.device() == like.device(), op, ": target must be on input's device ",
              like.device(), ", got ", target.device());
  const auto sizes = target.sym_sizes();
  if (loss.has_classes()) {
    TORCH_CHECK(target.scalar_type() == at::kLong, op,
                ": target must have dtype int64 for class indices, got ", target.scalar_type());
    TORCH_CHECK(TORCH_GUARD_OR_TRUE(sizes[0].sym_eq(rows)), op, ": target must have a class for ",
                "each of ", rows, " rows, got ", sizes[0]);
  } else {
    TORCH_CHECK(target.dim() == 2 && TORCH_GUARD_OR_TRUE(sizes[0].sym_eq(rows)) &&
                    TORCH_GUARD_OR_TRUE(sizes[1].sym_eq(cols)),
                op, ": target must have shape [", rows, "] for class indices or [", rows, ", ",
                cols, "] for probabilities, got ", sizes);
    TORCH_CHECK(takes_dtype(target.scalar_type()), op,
                ": target must have dtype float32, float16, bfloat16 or float64 for class "
                "probabilities, got ",
                target.scalar_type());
  }
}

}  // namespace

void check_loss(const Loss& loss, const Tensor& like, const c10::SymInt& rows,
                const c10::SymInt& cols) {
  const char* op = loss.op;
  TORCH_CHECK(TORCH_GUARD_OR_TRUE(cols.sym_gt(0)), op, ": there must be at least one class, got 0");
  if (loss.target.defined()) check_target(loss, like, rows, cols);
  if (loss.class_weight.has_value() && loss.class_weight->defined()) {
    const Tensor& weight = *loss.class_weight;
    TORCH_CHECK(weight.layout() == at::kStrided && weight.dim() == 1 &&
                    TORCH_GUARD_OR_TRUE(weight.sym_size(0).sym_eq(cols)),
                op, ": the class weights must have shape [", cols, "], got ", weight.sym_sizes());
    TORCH_CHECK(takes_parameter(weight.scalar_type(), like.scalar_type()), op,
                ": the class weights must have input's dtype ", like.scalar_type(),
                " or Float, got ", weight.scalar_type());
    TORCH_CHECK(weight.device() == like.device(), op,
                ": the class weights must be on input's device ", like.device(), ", got ",
                weight.device());
  }
  TORCH_CHECK(loss.label_smoothing >= 0 && loss.label_smoothing <= 1, op,
              ": label_smoothing must be between 0 and 1, got ", loss.label_smoothing);
  TORCH_CHECK(std::isfinite(loss.softcap) && loss.softcap >= 0, op,
              ": softcap must be positive and finite, got ", loss.softcap);
  TORCH_CHECK(std::isfinite(loss.logit_scale), op, ": logit_scale must be finite, got ",
              loss.logit_scale);
  TORCH_CHECK(std::isfinite(loss.z_loss) && loss.z_loss >= 0, op,
              ": z_loss must be finite and not negative, got ", loss.z_loss);
}

void check_classes(const Loss& loss, int64_t cols) {
  const Tensor& target = loss.target;
  if (!loss.has_classes() || target.is_meta() || target.numel() == 0) return;
  if (!target.is_cpu()) {
    const Tensor is_class = target.ge(0).logical_and_(target.lt(cols));
    at::_assert_async(is_class.logical_or_(target.eq(loss.ignore_index)).all(),
                      std::string(loss.op) + ": target must be in [0, " + std::to_string(cols) +
                          ") or ignore_index " + std::to_string(loss.ignore_index));
    return;
  }
  const Tensor classes = target.contiguous();
  const int64_t* const values = classes.const_data_ptr<int64_t>();
  for (int64_t row = 0; row < classes.numel(); ++row) {
    const int64_t value = values[row];
    TORCH_CHECK_INDEX((value >= 0 && value < cols) || value == loss.ignore_index, loss.op,
                      ": target must be in [0, ", cols, ") or ignore_index ", loss.ignore_index,
                      ", got ", value, " in row ", row);
  }
}

RowTensors RowTensors::narrow(int64_t begin, int64_t count) const {
  const auto part = [&](const Tensor& tensor) {
    return tensor.defined() && tensor.dim() == 1 ? tensor.narrow(0, begin, count) : tensor;
  };
  return {part(loss), part(log_sum), part(entropy), part(dloss), part(dentropy), again};
}

void run_loss(const Loss& loss, const RowTensors& all, int64_t begin, const Tensor& logits,
              const Tensor& gradient) {
  const int64_t count = logits.size(0), cols = logits.size(1);
  const RowTensors rows = all.narrow(begin, count);
  const Tensor target = loss.target.defined() ? loss.target.narrow(0, begin, count) : Tensor();
  const Tensor given = loss.has_classes() ? target.contiguous() : as_sums(target, logits);
  const Tensor weight = as_sums(loss.class_weight, logits);
  CrossEntropyParams p{};
  p.x = logits.const_data_ptr();
  p.dx = mutable_data(gradient);
  if (loss.has_classes()) {
    p.target = given.const_data_ptr<int64_t>();
  } else {
    p.probabilities = const_data(given);
  }
  p.class_weight = const_data(weight);
  p.loss = rows.again ? nullptr : mutable_data(rows.loss);
  p.log_sum = mutable_data(rows.log_sum);
  p.entropy = mutable_data(rows.entropy);
  p.dloss = const_data(rows.dloss);
  p.dentropy = const_data(rows.dentropy);
  p.dloss_stride = rows.dloss.defined() && rows.dloss.dim() == 1 ? 1 : 0;
  p.rows = count;
  p.cols = cols;
  p.x_row_stride = logits.stride(0);
  p.dx_row_stride = gradient.defined() ? gradient.stride(0) : 0;
  p.probabilities_row_stride = cols;
  p.ignore_index = loss.ignore_index;
  p.label_smoothing = loss.label_smoothing;
  p.softcap = loss.softcap;
  p.logit_scale = loss.logit_scale;
  p.z_loss = loss.z_loss;
  p.again = rows.again;
  p.dtype = scalar_type(logits);
  launch(
      loss.op, logits,
      [&](const Kernels& cpu) {
        parallel(count, cols,
                 [&](int64_t first, int64_t last) { cpu.cross_entropy(p, first, last); });
      },
      MEMOPT_CUDA_KERNEL(cross_entropy), p);
}

Tensor empty_rows(const Tensor& like, const c10::SymInt& rows, bool wanted) {
  if (!wanted) return Tensor();
  return at::empty_symint({rows}, like.options().dtype(accumulate_type(like)));
}

Tensor as_sums(const OptionalTensor& given, const Tensor& like) {
  if (!given.has_value() || !given->defined()) return Tensor();
  return given->to(accumulate_type(like)).contiguous();
}

Tensor total_of(const Tensor& rows) {
  if (!rows.is_cpu()) return rows.sum();
  double total = 0;
  const auto add = [&](const auto* values) {
    for (int64_t i = 0; i < rows.numel(); ++i) total += values[i];
  };
  rows.scalar_type() == at::kDouble ? add(rows.const_data_ptr<double>())
                                    : add(rows.const_data_ptr<float>());
  return at::full({}, total, rows.options());
}

namespace {

Loss loss_of(const Tensor& target, const OptionalTensor& class_weight, int64_t ignore_index,
             double label_smoothing) {
  return {"cross_entropy", target, class_weight, ignore_index, label_smoothing, 0.0, 1.0, 0.0};
}

void check_logits(const Loss& loss, const Tensor& logits) {
  check_input(loss.op, "input", logits);
  TORCH_CHECK(logits.dim() == 2, loss.op, ": input must have two dimensions here, got ",
              logits.sym_sizes());
  check_loss(loss, logits, logits.sym_size(0), logits.sym_size(1));
}

Tensor gradient_into(const Loss& loss, const Tensor& dloss, const Tensor& logits,
                     const Tensor& log_sum, const Tensor& gradient) {
  RowTensors rows;
  rows.log_sum = log_sum;
  rows.dloss = as_sums(dloss, logits);
  rows.again = true;
  run_loss(loss, rows, 0, logits, gradient);
  return gradient;
}

}  // namespace

Results3 _cross_entropy_forward(const Tensor& input, const Tensor& target,
                                const OptionalTensor& class_weight, int64_t ignore_index,
                                double label_smoothing) {
  const Loss loss = loss_of(target, class_weight, ignore_index, label_smoothing);
  check_logits(loss, input);
  const c10::SymInt n = input.sym_size(0);
  RowTensors rows;
  rows.loss = empty_rows(input, n, true);
  rows.log_sum = empty_rows(input, n, true);
  if (input.is_meta()) return {at::empty({}, rows.loss.options()), rows.loss, rows.log_sum};
  check_classes(loss, input.size(1));
  const Rows logits = as_rows(input, input.size(0), input.size(1));
  run_loss(loss, rows, 0, logits.tensor, Tensor());
  return {total_of(rows.loss), rows.loss, rows.log_sum};
}

Tensor _cross_entropy_backward(const Tensor& grad_loss, const Tensor& input, const Tensor& log_sum,
                               const Tensor& target, const OptionalTensor& class_weight,
                               int64_t ignore_index, double label_smoothing) {
  const Loss loss = loss_of(target, class_weight, ignore_index, label_smoothing);
  check_logits(loss, input);
  const Tensor gradient = empty_contiguous(input);
  if (input.is_meta()) return gradient;
  const Rows logits = as_rows(input, input.size(0), input.size(1));
  return gradient_into(loss, grad_loss, logits.tensor, log_sum, gradient);
}

void _cross_entropy_backward_(const Tensor& grad_loss, const Tensor& input, const Tensor& log_sum,
                              const Tensor& target, const OptionalTensor& class_weight,
                              int64_t ignore_index, double label_smoothing) {
  const Loss loss = loss_of(target, class_weight, ignore_index, label_smoothing);
  check_logits(loss, input);
  check_contiguous(loss.op, "input", input);
  if (input.is_meta()) return;
  gradient_into(loss, grad_loss, input, log_sum, input);
}

MEMOPT_DECLARE_PRIVATE(_cross_entropy_forward, {},
                       R"(_cross_entropy_forward(Tensor input, Tensor target, Tensor? class_weight,
                          *, int ignore_index, float label_smoothing)
                          -> (Tensor total, Tensor loss, Tensor log_sum))");
MEMOPT_DECLARE_PRIVATE(_cross_entropy_backward, {},
                       R"(_cross_entropy_backward(Tensor grad_loss, Tensor input, Tensor log_sum,
                          Tensor target, Tensor? class_weight, *, int ignore_index,
                          float label_smoothing) -> Tensor)");
MEMOPT_DECLARE_PRIVATE(_cross_entropy_backward_, {},
                       R"(_cross_entropy_backward_(Tensor grad_loss, Tensor(a!) input,
                          Tensor log_sum, Tensor target, Tensor? class_weight, *,
                          int ignore_index, float label_smoothing) -> ())");

}  // namespace memopt::ops
