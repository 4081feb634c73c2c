// The norms over channels below autograd: backward (kernels/channel_norm.h).
#include <ATen/core/Tensor.h>

#include <array>
#include <string_view>

#include "channel_norm.h"
#include "checks.h"
#include "declare.h"
#include "private_ops.h"
#include "tensors.h"

namespace memopt::ops {
namespace {

using kernels::ChannelNormBackwardParams;
using kernels::ChannelShape;
using kernels::cpu::Kernels;

// How many elements all stages are run on, one behind the other: more than forward's, since they
// read two tensors, each of which is a stream.
constexpr int64_t kBackwardUnit = 65536;

// What forward's statistics are to the gradient of the input.
enum class Statistics { kOwn, kGiven };

// Undefined where they are not wanted.
struct Gradients {
  Tensor dx;
  Tensor dweight;
  Tensor dbias;
};

// How many elements dy is written of before it is summed: it is in the cache then.
constexpr int64_t kActivationUnit = 2048;

// dy is written, from dz and what y is made of.
kernels::ChannelNormForwardParams activation_params(const ChannelNormBackwardParams& p,
                                                    const Tensor& dz, void* dy) {
  kernels::ChannelNormForwardParams y{};
  y.x = p.x;
  y.weight = p.weight;
  y.bias = p.bias;
  y.dz = dz.const_data_ptr();
  y.y = dy;
  // Read alone.
  y.mean = const_cast<void*>(p.mean);
  y.rstd = const_cast<void*>(p.rstd);
  y.shape = p.shape;
  y.dtype = p.dtype;
  y.activation = p.activation;
  return y;
}

// Of the parts [begin, end): dy, and the sums of it.
void go_through_activation(const Kernels& cpu, const kernels::ChannelNormForwardParams& y,
                           const ChannelNormBackwardParams& p, int64_t begin, int64_t end) {
  const ChannelShape& s = p.shape;
  const int64_t elements =
      s.pixels ? kernels::part_pixels(s) * s.channels : std::min(s.size, kernels::kPartElements);
  const int64_t few = std::max<int64_t>(1, kActivationUnit / elements);
  for (int64_t i = begin; i < end; i += few) {
    const int64_t last = std::min(end, i + few);
    cpu.channel_activation(y, i, last);
    if (p.parts != nullptr) cpu.channel_sums(p, i, last);
  }
}

void check_backward(const ChannelNorm& norm, const Tensor& grad_output, const Tensor& input,
                    const Tensor& mean, const Tensor& rstd, const OptionalTensor& weight,
                    const OptionalTensor& bias) {
  check_channel_norm(norm, input, weight, bias);
  check_like_input(norm.op(), "grad_output", grad_output, input);
  check_statistics_of_sets(norm, input, "mean", mean);
  check_statistics_of_sets(norm, input, "rstd", rstd);
}

// means_given: of all ranks, [sets, 2] as ChannelNormBackwardParams has them; undefined for those
// of this input.
void backward(const ChannelNorm& norm, const Tensor& grad_output, const Tensor& input,
              const Tensor& mean, const Tensor& rstd, const OptionalTensor& weight,
              const OptionalTensor& bias, Statistics statistics, const Tensor& means_given,
              const Gradients& out) {
  const Tensor &dx = out.dx, &dweight = out.dweight, &dbias = out.dbias;
  const at::ScalarType sums = accumulate_type(input);
  const Tensor w = wide_parameter(norm, "weight", weight, sums);
  const Tensor b = activates(norm) ? wide_parameter(norm, "bias", bias, sums) : Tensor();
  if (input.numel() == 0) {
    for (const Tensor& gradient : {dweight, dbias}) {
      if (gradient.defined()) gradient.zero_();
    }
    return;
  }
  const Tensor x = input.contiguous(order_of(norm, input));
  const Tensor dy = grad_output.contiguous(order_of(norm, input));
  ChannelNormBackwardParams p{};
  p.dy = dy.const_data_ptr();
  p.x = x.const_data_ptr();
  p.weight = const_data(w);
  p.mean = mean.const_data_ptr();
  p.rstd = rstd.const_data_ptr();
  p.dx = mutable_data(dx);
  p.dweight = mutable_data(dweight);
  p.dbias = mutable_data(dbias);
  p.shape = shape_of(norm, input);
  p.dtype = scalar_type(input);
  p.stream_stores = exceeds_cache(input, 2);  // dx beside one of those that it is made of
  const ChannelShape& s = p.shape;
  const auto options = input.options().dtype(sums);
  const bool has_means = dx.defined() && statistics == Statistics::kOwn && !means_given.defined();
  const bool has_parameters = dweight.defined() || dbias.defined();
  Tensor parts, means = means_given;
  if (has_means) means = at::empty({kernels::set_count(s), 2}, options);
  if (has_means || has_parameters) parts = empty_parts(s, kernels::element_parts(s), 2, options);
  p.bias = const_data(b);
  p.activation = norm.activation;
  p.means = mutable_data(means);
  p.parts = mutable_data(parts);
  launch(
      norm.op(), input,
      [&](const Kernels& cpu) {
        const int64_t each = each_unit(s, kernels::element_parts(s));
        Stage sums = stage(p.parts != nullptr, cpu.channel_sums, p, each);
        Tensor through;
        kernels::ChannelNormForwardParams y{};
        if (activates(norm)) {
          // dy in the place of dx, where each element is read before it is written.
          through = dx.defined() ? dx : empty_in_order(norm, input);
          y = activation_params(p, dy, through.mutable_data_ptr());
          p.dy = y.y;
          sums.run = [&](int64_t begin, int64_t end) {
            go_through_activation(cpu, y, p, begin, end);
          };
        }
        run_stages(
            s, kBackwardUnit,
            std::array{sums,
                       stage(has_means, cpu.channel_means, p, each_unit(s, kernels::set_count(s))),
                       stage(dx.defined(), cpu.channel_input_gradient, p, each)});
        if (!has_parameters) return;
        parallel(s.channels, kernels::element_parts(s) / (s.pixels ? 1 : s.channels),
                 [&](int64_t begin, int64_t end) { cpu.channel_parameters(p, begin, end); });
      },
      MEMOPT_CUDA_KERNEL(channel_norm_backward), p);
}

// A parameter's gradient in its own dtype.
Tensor narrowed(const Tensor& gradient, const OptionalTensor& parameter) {
  return gradient.defined() ? gradient.to(parameter->scalar_type()) : gradient;
}

}  // namespace

Results3 _channel_norm_backward(const Tensor& grad_output, const Tensor& input, int64_t groups,
                                const Tensor& mean, const Tensor& rstd,
                                const OptionalTensor& weight, const OptionalTensor& bias,
                                bool given_statistics, std::array<bool, 3> output_mask,
                                std::string_view kind, NormActivation activation, Scalar scalar) {
  const ChannelNorm norm =
      parse_channel_norm(kind, groups, /*backward=*/true, {activation, scalar});
  check_backward(norm, grad_output, input, mean, rstd, weight, bias);
  const c10::SymDimVector channels{input.sym_size(1)};
  const Tensor dx = output_mask[0] ? empty_in_order(norm, input) : Tensor();
  const Tensor dweight = empty_of(output_mask[1] && is_given(weight), channels, input);
  const Tensor dbias = empty_of(output_mask[2] && is_given(bias), channels, input);
  const bool any = dx.defined() || dweight.defined() || dbias.defined();
  if (any && !input.is_meta()) {
    backward(norm, grad_output, input, mean, rstd, weight, bias,
             given_statistics ? Statistics::kGiven : Statistics::kOwn, Tensor(),
             {dx, dweight, dbias});
  }
  return {dx, narrowed(dweight, weight), narrowed(dbias, bias)};
}

Tensor _channel_norm_activation_backward(const Tensor& grad_output, const Tensor& input,
                                         int64_t groups, const Tensor& mean, const Tensor& rstd,
                                         const OptionalTensor& weight, const OptionalTensor& bias,
                                         std::string_view kind, std::string_view name,
                                         Scalar scalar) {
  const ChannelNorm norm = parse_channel_norm(kind, groups, /*backward=*/true, {name, scalar});
  check_backward(norm, grad_output, input, mean, rstd, weight, bias);
  const Tensor dy = empty_in_order(norm, input);
  if (input.is_meta() || input.numel() == 0) return dy;
  const at::ScalarType sums = accumulate_type(input);
  const Tensor w = wide_parameter(norm, "weight", weight, sums);
  const Tensor b = wide_parameter(norm, "bias", bias, sums);
  const Tensor x = input.contiguous(order_of(norm, input));
  const Tensor dz = grad_output.contiguous(order_of(norm, input));
  ChannelNormBackwardParams of{};
  of.x = x.const_data_ptr();
  of.weight = const_data(w);
  of.bias = const_data(b);
  of.mean = mean.const_data_ptr();
  of.rstd = rstd.const_data_ptr();
  of.shape = shape_of(norm, input);
  of.dtype = scalar_type(input);
  of.activation = norm.activation;
  kernels::ChannelNormForwardParams p = activation_params(of, dz, dy.mutable_data_ptr());
  p.stream_stores = exceeds_cache(input, 3);
  launch(
      norm.op(), input,
      [&](const Kernels& cpu) {
        const int64_t each = each_unit(p.shape, kernels::element_parts(p.shape));
        run_stages(p.shape, kBackwardUnit,
                   std::array{stage(true, cpu.channel_activation, p, each)});
      },
      MEMOPT_CUDA_KERNEL(channel_norm_forward), p);
  return dy;
}

namespace {

ChannelNorm check_sync_batch_norm(const Tensor& grad_output, const Tensor& input,
                                  const Tensor& mean, const Tensor& rstd,
                                  const OptionalTensor& weight) {
  const ChannelNorm norm = parse_channel_norm("sync_batch_norm", 1, /*backward=*/true);
  check_backward(norm, grad_output, input, mean, rstd, weight, std::nullopt);
  return norm;
}

}  // namespace

Results2 _sync_batch_norm_sums(const Tensor& grad_output, const Tensor& input, const Tensor& mean,
                               const Tensor& rstd) {
  const ChannelNorm norm = check_sync_batch_norm(grad_output, input, mean, rstd, std::nullopt);
  const c10::SymDimVector channels{input.sym_size(1)};
  const Gradients sums{Tensor(), empty_of(true, channels, input), empty_of(true, channels, input)};
  if (!input.is_meta()) {
    backward(norm, grad_output, input, mean, rstd, std::nullopt, std::nullopt, Statistics::kOwn,
             Tensor(), sums);
  }
  return {sums.dbias, sums.dweight};
}

Tensor _sync_batch_norm_input_gradient(const Tensor& grad_output, const Tensor& input,
                                       const Tensor& mean, const Tensor& rstd,
                                       const OptionalTensor& weight, const Tensor& means) {
  const ChannelNorm norm = check_sync_batch_norm(grad_output, input, mean, rstd, weight);
  const c10::SymDimVector shape{input.sym_size(1), 2};
  TORCH_CHECK(means.scalar_type() == mean.scalar_type() && means.device() == input.device() &&
                  means.is_contiguous() && means.sym_sizes().equals(shape),
              norm.op(), ": means must be a contiguous ", mean.scalar_type(), " tensor of shape ",
              shape, " on ", input.device(), ", got ", means.scalar_type(), " of shape ",
              means.sym_sizes(), " on ", means.device());
  Tensor dx = empty_in_order(norm, input);
  if (!input.is_meta()) {
    backward(norm, grad_output, input, mean, rstd, weight, std::nullopt, Statistics::kOwn, means,
             {dx, Tensor(), Tensor()});
  }
  return dx;
}

MEMOPT_DECLARE_PRIVATE(
    _channel_norm_backward, {},
    "_channel_norm_backward(Tensor grad_output, Tensor input, int groups, Tensor mean,"
    " Tensor rstd, Tensor? weight, Tensor? bias, bool given_statistics, bool[3] output_mask, *,"
    " str norm, str? activation=None, float? activation_scalar=None) -> (Tensor grad_input, Tensor "
    "grad_weight, Tensor grad_bias)");
MEMOPT_DECLARE_PRIVATE(
    _channel_norm_activation_backward, {},
    "_channel_norm_activation_backward(Tensor grad_output, Tensor input, int groups, Tensor mean,"
    " Tensor rstd, Tensor? weight, Tensor? bias, *, str norm, str activation,"
    " float? activation_scalar=None) -> Tensor");
MEMOPT_DECLARE_PRIVATE(
    _sync_batch_norm_sums, {},
    "_sync_batch_norm_sums(Tensor grad_output, Tensor input, Tensor mean, Tensor rstd)"
    " -> (Tensor sum, Tensor product)");
MEMOPT_DECLARE_PRIVATE(
    _sync_batch_norm_input_gradient, {},
    "_sync_batch_norm_input_gradient(Tensor grad_output, Tensor input, Tensor mean, Tensor rstd,"
    " Tensor? weight, Tensor means) -> Tensor");

}  // namespace memopt::ops
