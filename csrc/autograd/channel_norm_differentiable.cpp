// Of tensors as [batch, groups, channels of a group, size]: a set is the last two dimensions, or
// for batch norm, where each channel is a group, all but the second. With g = grad_output weight
//
//   grad_input = rstd (g - mean(g) - xhat mean(g xhat)), or rstd g where the statistics are given
//   grad_weight = sum(grad_output xhat)    grad_bias = sum(grad_output)
//
// Behind an activation grad_output is first that of what the activation reads.
//
// All in one dtype (float32, or float64 for float64): `.to` is differentiable. Statistics are
// computed again, since they move with input.
#include "channel_norm_differentiable.h"

#include <ATen/TensorOperators.h>

#include <vector>

namespace memopt::autograd {
namespace {

Tensor widen(const Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? tensor : tensor.to(at::kFloat);
}

struct Normalized {
  c10::SymDimVector shape;
  c10::SymDimVector of_channels;  // a parameter's, so that it broadcasts
  std::vector<int64_t> set;
  Tensor rstd;
  Tensor xhat;

  Normalized(const ChannelNormOp::Options& o, const Tensor& input, const variable_list& extras) {
    const bool over_batch = o.norm == "batch_norm";
    const c10::SymInt channels = input.sym_size(1);
    const c10::SymInt groups = over_batch ? channels : c10::SymInt(o.groups);
    c10::SymInt size = 1;
    for (int64_t i = 2; i < input.dim(); ++i) size *= input.sym_size(i);
    shape = {input.sym_size(0), groups, channels / groups, size};
    of_channels = {1, groups, channels / groups, 1};
    set = over_batch ? std::vector<int64_t>{0, 2, 3} : std::vector<int64_t>{2, 3};
    const Tensor x = widen(input).reshape_symint(shape);
    Tensor mean;
    if (o.given) {
      mean = extras[0].reshape_symint(of_channels);
      rstd = extras[1].reshape_symint(of_channels);
    } else {
      mean = x.mean(set, /*keepdim=*/true);
      rstd = (x - mean).square().mean(set, /*keepdim=*/true).add(o.eps).rsqrt();
    }
    xhat = (x - mean) * rstd;
  }

  Tensor parameter(const Tensor& p) const { return widen(p).reshape_symint(of_channels); }
  Tensor affine(const variable_list& reads) const {
    Tensor y = xhat;
    if (reads[1].defined()) y = y * parameter(reads[1]);
    if (reads[2].defined()) y = y + parameter(reads[2]);
    return y;
  }
  Tensor of_set(const Tensor& t) const { return t.mean(set, /*keepdim=*/true); }
};

bool has_activation(const ChannelNormOp::Options& o) {
  return !o.activation.activation.empty();
}

}  // namespace

variable_list differentiable_channel_norm_backward(const ChannelNormOp::Options& o,
                                                   const variable_list& reads,
                                                   const variable_list& extras,
                                                   const Tensor& grad_output,
                                                   std::array<bool, 3> wanted) {
  const Normalized norm(o, reads[0], extras);
  Tensor dy = widen(grad_output).reshape_symint(norm.shape);
  if (has_activation(o)) dy = activation_gradient(o.activation, dy, norm.affine(reads));
  variable_list grads(3);
  if (wanted[0]) {
    const Tensor g = reads[1].defined() ? dy * norm.parameter(reads[1]) : dy;
    const Tensor dx =
        o.given ? norm.rstd * g
                : norm.rstd * (g - norm.of_set(g) - norm.xhat * norm.of_set(g * norm.xhat));
    grads[0] = dx.reshape_symint(reads[0].sym_sizes()).to(reads[0].scalar_type());
  }
  const auto sum = [&](const Tensor& t, const Tensor& owner) {
    return t.sum(at::IntArrayRef{0, 3}).reshape_symint(owner.sym_sizes()).to(owner.scalar_type());
  };
  if (wanted[1] && reads[1].defined()) grads[1] = sum(dy * norm.xhat, reads[1]);
  if (wanted[2] && reads[2].defined()) grads[2] = sum(dy, reads[2]);
  return grads;
}

Tensor differentiable_channel_norm(const ChannelNormOp::Options& o, const variable_list& reads,
                                   const variable_list& extras) {
  Tensor y = Normalized(o, reads[0], extras).affine(reads);
  if (has_activation(o)) y = activation_value(o.activation, y);
  return y.reshape_symint(reads[0].sym_sizes()).to(reads[0].scalar_type());
}

}  // namespace memopt::autograd
