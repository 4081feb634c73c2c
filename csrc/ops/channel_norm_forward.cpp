// The norms over channels below autograd: forward (kernels/channel_norm.h).
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

using kernels::ChannelNormForwardParams;
using kernels::ChannelShape;
using kernels::cpu::Kernels;

// As PyTorch has it: of an instance norm each channel of each sample, else all samples together.
void check_more_than_one_value(const ChannelNorm& norm, const Tensor& input) {
  c10::SymInt values = 1;
  for (int64_t i = 2; i < input.dim(); ++i) values *= input.sym_size(i);
  if (!norm.is_instance_norm) values *= input.sym_size(0);
  if (!norm.over_batch) values *= input.sym_size(1) / norm.groups;
  TORCH_CHECK(TORCH_GUARD_OR_TRUE(values.sym_ne(1)), norm.op(),
              ": input must have more than one value for each ",
              norm.over_batch || norm.is_instance_norm ? "channel" : "group", ", got shape ",
              input.sym_sizes());
}

// Undefined where they are not wanted.
struct Outputs {
  Tensor output;
  Tensor mean;
  Tensor rstd;
  Tensor variance;
  Tensor shift = {};
};

void forward(const ChannelNorm& norm, const Tensor& input, const OptionalTensor& weight,
             const OptionalTensor& bias, double eps, bool given, const Outputs& out) {
  const at::ScalarType sums = accumulate_type(input);
  const Tensor w = wide_parameter(norm, "weight", weight, sums);
  const Tensor b = wide_parameter(norm, "bias", bias, sums);
  if (input.numel() == 0) {
    for (const Tensor& statistic : {out.mean, out.rstd, out.variance, out.shift}) {
      if (!given && statistic.defined()) statistic.zero_();
    }
    return;
  }
  const Tensor x = input.contiguous(order_of(norm, input));
  ChannelNormForwardParams p{};
  p.x = x.const_data_ptr();
  p.weight = const_data(w);
  p.bias = const_data(b);
  p.y = mutable_data(out.output);
  p.mean = mutable_data(out.mean);
  p.rstd = mutable_data(out.rstd);
  p.variance = mutable_data(out.variance);
  p.shift = mutable_data(out.shift);
  p.shape = shape_of(norm, input);
  p.eps = eps;
  p.dtype = scalar_type(input);
  p.stream_stores = exceeds_cache(input, 2);
  p.activation = norm.activation;
  // Of the variance that moves a running one. Ranks, who want the shift, put theirs together first.
  const auto values = static_cast<double>(kernels::set_elements(p.shape));
  p.unbias = out.shift.defined() ? 1.0 : values / (values - 1);
  Tensor parts;
  if (!given) {
    parts = empty_parts(p.shape, kernels::moment_parts(p.shape), 3, input.options().dtype(sums));
    p.parts = parts.mutable_data_ptr();
  }
  launch(
      norm.op(), input,
      [&](const Kernels& cpu) {
        const ChannelShape& s = p.shape;
        const auto output = activates(norm) ? cpu.channel_activation : cpu.channel_output;
        run_stages(
            s, kForwardUnit,
            std::array{
                stage(!given, cpu.channel_moments, p, each_unit(s, kernels::moment_parts(s))),
                stage(!given, cpu.channel_statistics, p, each_unit(s, kernels::set_count(s))),
                stage(p.y != nullptr, output, p, each_unit(s, kernels::element_parts(s)))});
      },
      MEMOPT_CUDA_KERNEL(channel_norm_forward), p);
}

}  // namespace

Results4 _channel_norm_forward(const Tensor& input, int64_t groups, const OptionalTensor& mean,
                               const OptionalTensor& rstd, const OptionalTensor& weight,
                               const OptionalTensor& bias, double eps, std::string_view kind,
                               NormActivation activation, Scalar scalar, bool for_backward,
                               bool with_variance) {
  const ChannelNorm norm =
      parse_channel_norm(kind, groups, /*backward=*/false, {activation, scalar});
  check_channel_norm(norm, input, weight, bias);
  check_eps(norm.op(), eps);
  const bool given = is_given(mean) || is_given(rstd);
  if (given) {
    check_statistics_of_sets(norm, input, "mean", mean.value_or(Tensor()));
    check_statistics_of_sets(norm, input, "rstd", rstd.value_or(Tensor()));
  } else {
    check_more_than_one_value(norm, input);
  }
  const c10::SymDimVector sets = sets_of(norm, input);
  const Outputs out{empty_in_order(norm, input), given ? *mean : empty_of(true, sets, input),
                    given ? *rstd : empty_of(true, sets, input),
                    empty_of(with_variance && !given, sets, input)};
  if (!input.is_meta()) forward(norm, input, weight, bias, eps, given, out);
  if (given || !for_backward) return {out.output, Tensor(), Tensor(), Tensor()};
  return {out.output, out.mean, out.rstd, out.variance};
}

Results3 _sync_batch_norm_moments(const Tensor& input) {
  const ChannelNorm norm = parse_channel_norm("sync_batch_norm", 1, /*backward=*/false);
  check_channel_norm(norm, input, std::nullopt, std::nullopt);
  const c10::SymDimVector sets = sets_of(norm, input);
  const auto empty = [&] { return empty_of(true, sets, input); };
  const Outputs out{Tensor(), empty(), Tensor(), empty(), empty()};
  if (!input.is_meta()) forward(norm, input, std::nullopt, std::nullopt, 0.0, false, out);
  return {out.mean, out.shift, out.variance};
}

MEMOPT_DECLARE_PRIVATE(
    _channel_norm_forward, {},
    "_channel_norm_forward(Tensor input, int groups, Tensor? mean, Tensor? rstd, Tensor? weight,"
    " Tensor? bias, float eps, *, str norm, str? activation=None, float? activation_scalar=None,"
    " bool for_backward=True, bool with_variance=False)"
    " -> (Tensor output, Tensor mean, Tensor rstd, Tensor variance)");
MEMOPT_DECLARE_PRIVATE(
    _sync_batch_norm_moments, {},
    "_sync_batch_norm_moments(Tensor input) -> (Tensor mean, Tensor shift, Tensor variance)");

}  // namespace memopt::ops
