// What the ops with a cross entropy share above the private ops: options, the reduction, and the
// gradient of the logits by differentiable ops.
#pragma once

#include <optional>
#include <string_view>

#include "support.h"

namespace memopt::autograd {

// What a loss needs to know in backward, beside its tensors. In a node by visit().
struct LossOptions {
  int64_t ignore_index = -100;
  double label_smoothing = 0.0;
  double softcap = 0.0;  // none
  double logit_scale = 1.0;
  double z_loss = 0.0;
  bool log_probs = false;  // linear_log_probs, with its name in errors
  bool with_entropy = false;
  int64_t chunk = 0;    // none given
  bool hooked = false;  // what the node has saved may be a hook's

  template <class Options, class F>
  static void visit(Options& o, F&& f) {
    f(o.ignore_index, o.label_smoothing, o.softcap, o.logit_scale, o.z_loss, o.log_probs,
      o.with_entropy, o.chunk, o.hooked);
  }
};

enum class Reduction { kNone, kMean, kSum };
Reduction parse_reduction(const char* op, std::string_view name);

// By what a mean divides the sum of the rows' losses, a number of dtype `sums`: num_items, if that
// is given, which only a mean may have; the weights of the classes of the rows that are not
// ignored; the rows, where targets are probabilities. Undefined for other reductions.
Tensor divisor(const char* op, Reduction reduction, const LossOptions& options,
               const Tensor& target, const Tensor& class_weight, const OptionalTensor& num_items,
               at::ScalarType sums);

// A gradient cannot be had of these.
void check_constant(const char* op, const Tensor& target, const OptionalTensor& class_weight);

// float32, or float64 for float64.
at::ScalarType sums_type(const Tensor& tensor);

// The gradient of `logits` from those of each row's loss and entropy (undefined: 0), by
// differentiable ops: kernels/cross_entropy.h.
Tensor differentiable_logit_gradient(const LossOptions& options, const Tensor& logits,
                                     const Tensor& target, const Tensor& class_weight,
                                     const Tensor& dloss, const Tensor& dentropy);

}  // namespace memopt::autograd
