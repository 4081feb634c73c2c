// What the ops with a cross entropy share: their arguments, the rules of those, and the kernel's
// call.
#pragma once

#include <ATen/core/Tensor.h>

#include "../kernels/cross_entropy.h"
#include "private_ops.h"

namespace memopt::ops {

// Of N rows and `cols` classes. `op` is what the user called, for errors.
struct Loss {
  const char* op;
  const Tensor& target;  // [N] classes, or [N, cols] probabilities; undefined: the logsumexp alone
  const OptionalTensor& class_weight;  // [cols]
  int64_t ignore_index;
  double label_smoothing;
  double softcap;
  double logit_scale;
  double z_loss;

  bool has_classes() const { return target.defined() && target.dim() == 1; }
};

// The rules of a loss over logits like `like` (their dtype and device) of shape [rows, cols].
void check_loss(const Loss& loss, const Tensor& like, const c10::SymInt& rows,
                const c10::SymInt& cols);

// Raises an error unless each class is one or the ignored one: here on the CPU, and where the
// stream runs on CUDA.
void check_classes(const Loss& loss, int64_t cols);

// What belongs to rows: undefined where not wanted or not given, else [N] of the type of sums.
struct RowTensors {
  Tensor loss;
  Tensor log_sum;
  Tensor entropy;
  Tensor dloss;  // [N], or one number for all
  Tensor dentropy;
  bool again = false;

  RowTensors narrow(int64_t begin, int64_t count) const;
};

// Calls the kernel on `logits` [count, cols], which are the rows from `begin` on; the gradient goes
// to `gradient` if that is defined, which may be the logits.
void run_loss(const Loss& loss, const RowTensors& rows, int64_t begin, const Tensor& logits,
              const Tensor& gradient);

// [N], of the type of sums; undefined if not wanted.
Tensor empty_rows(const Tensor& like, const c10::SymInt& rows, bool wanted);

// A number or [N] of the type of sums, contiguous, or undefined.
Tensor as_sums(const OptionalTensor& given, const Tensor& like);

// The sum of [N], in the order of the rows; [] of its dtype.
Tensor total_of(const Tensor& rows);

}  // namespace memopt::ops
