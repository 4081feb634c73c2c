// The norms over channels below autograd: group, instance and batch norm (kernels/channel_norm.h).
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <limits>
#include <string>
#include <string_view>
#include <tuple>

#include "../kernels/channel_norm.h"
#include "checks.h"
#include "declare.h"
#include "launch.h"
#include "layout.h"
#include "private_ops.h"
#include "tensors.h"

namespace memopt::ops {
namespace {

using kernels::ChannelNormBackwardParams;
using kernels::ChannelNormForwardParams;
using kernels::ChannelShape;
using kernels::cpu::Kernels;

struct ChannelNorm {
  std::string name;
  int64_t groups;
  bool over_batch;
  bool is_instance_norm;

  const char* op() const { return name.c_str(); }
};

ChannelNorm parse_channel_norm(std::string_view kind, int64_t groups, bool backward) {
  const bool over_batch = kind == "batch_norm", instance = kind == "instance_norm";
  TORCH_CHECK(over_batch || instance || kind == "group_norm",
              "norm must be 'group_norm', 'instance_norm' or 'batch_norm', got '", kind, "'");
  return {std::string(kind) + (backward ? " backward" : ""), groups, over_batch, instance};
}

c10::SymDimVector sets_of(const ChannelNorm& norm, const Tensor& input) {
  if (norm.over_batch) return {input.sym_size(1)};
  return {input.sym_size(0), c10::SymInt(norm.groups)};
}

void check_channel_norm(const ChannelNorm& norm, const Tensor& input, const OptionalTensor& weight,
                        const OptionalTensor& bias) {
  check_channels(norm.op(), input, norm.groups);
  const c10::SymInt channels = input.sym_size(1);
  check_parameters(norm.op(), input, channels, weight, bias, {"weight", "bias"}, "channels");
}

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

void check_statistics_of_sets(const ChannelNorm& norm, const Tensor& input, const char* name,
                              const Tensor& statistics) {
  TORCH_CHECK(statistics.defined(), norm.op(), ": ", name, " must be a tensor, got None");
  const c10::SymDimVector shape = sets_of(norm, input);
  TORCH_CHECK(statistics.scalar_type() == accumulate_type(input) &&
                  statistics.device() == input.device() && statistics.is_contiguous(),
              norm.op(), ": ", name, " must be a contiguous ", accumulate_type(input),
              " tensor on ", input.device(), ", got ", statistics.scalar_type(), " on ",
              statistics.device());
  TORCH_CHECK(statistics.sym_sizes().equals(shape), norm.op(), ": ", name, " must have shape ",
              shape, ", got ", statistics.sym_sizes());
}

// Which of the two orders in memory a tensor is read in, its own or that of a copy: that of the
// results, which PyTorch's instance norm makes contiguous.
at::MemoryFormat order_of(const ChannelNorm& norm, const Tensor& tensor) {
  const bool keeps = !norm.is_instance_norm && is_channels_last(tensor);
  return keeps ? tensor.suggest_memory_format() : at::MemoryFormat::Contiguous;
}

Tensor empty_in_order(const ChannelNorm& norm, const Tensor& input) {
  return at::empty_symint(input.sym_sizes(), input.options(), order_of(norm, input));
}

ChannelShape shape_of(const ChannelNorm& norm, const Tensor& input) {
  ChannelShape shape{input.size(0),
                     input.size(1),
                     c10::multiply_integers(input.sizes().slice(2)),
                     norm.over_batch ? input.size(1) : norm.groups,
                     norm.over_batch,
                     order_of(norm, input) != at::MemoryFormat::Contiguous};
  if (shape.over_batch && (shape.pixels || shape.size == 1)) {
    shape.pixels = true;  // a plane of one element is a pixel
    shape.size *= shape.batch;
    shape.batch = 1;
  }
  return shape;
}

// A parameter in the type of sums.
Tensor wide_parameter(const ChannelNorm& norm, const char* name, const OptionalTensor& parameter,
                      at::ScalarType type) {
  const Tensor contiguous = contiguous_parameter(parameter);
  parameter_data(norm.op(), name, contiguous);
  return contiguous.defined() ? contiguous.to(type) : contiguous;
}

// How many elements all stages are run on, one behind the other. Forward's two read the same
// tensor, which stays in the cache next to the arithmetic. Backward's write one more than they
// read, and while that comes from the last-level cache, nothing is gained by going back and forth.
constexpr int64_t kForwardUnit = 4096;
constexpr int64_t kBackwardUnit = 65536;
constexpr int64_t kWhole = std::numeric_limits<int64_t>::max();

// A stage of a kernel: `each` items of a unit, which is what can be computed for itself.
template <class Params>
struct Stage {
  void (*run)(const Params&, int64_t, int64_t);
  int64_t each;
};

// All stages of `together` elements, one behind the other, where there are units for all threads;
// otherwise stage by stage. The results have the same bits.
template <class Params, size_t kStages>
void run_stages(const Params& p, int64_t together,
                const std::array<Stage<Params>, kStages>& stages) {
  const ChannelShape& s = p.shape;
  const int64_t units = s.pixels ? s.batch : kernels::set_count(s);
  const int64_t elements = s.batch * s.channels * s.size / units;
  const auto run = [&](const Stage<Params>& stage, int64_t begin, int64_t end) {
    if (stage.run != nullptr) stage.run(p, begin * stage.each, end * stage.each);
  };
  if (units >= 2 * at::get_num_threads() || units * elements <= kGrainElements) {
    const int64_t most = std::clamp<int64_t>(together / elements, 1, units);
    parallel(units, elements, [&](int64_t begin, int64_t end) {
      for (int64_t unit = begin; unit < end; unit += most) {
        for (const auto& stage : stages) run(stage, unit, std::min(end, unit + most));
      }
    });
    return;
  }
  for (const auto& stage : stages) {
    const int64_t items = units * stage.each;
    if (stage.run == nullptr) continue;
    parallel(items, units * elements / items,
             [&](int64_t begin, int64_t end) { stage.run(p, begin, end); });
  }
}

int64_t each_unit(const ChannelShape& s, int64_t items) {
  return items / (s.pixels ? s.batch : kernels::set_count(s));
}

Tensor empty_parts(const ChannelShape& s, int64_t parts, int64_t numbers,
                   const at::TensorOptions& options) {
  return at::empty({parts, numbers, s.pixels ? s.channels : 1}, options);
}

struct Outputs {
  Tensor output;
  Tensor mean;
  Tensor rstd;
  Tensor variance;
};

void forward(const ChannelNorm& norm, const Tensor& input, const OptionalTensor& weight,
             const OptionalTensor& bias, double eps, bool given, const Outputs& out) {
  const at::ScalarType sums = accumulate_type(input);
  const Tensor w = wide_parameter(norm, "weight", weight, sums);
  const Tensor b = wide_parameter(norm, "bias", bias, sums);
  if (input.numel() == 0) {
    for (const Tensor& statistic : {out.mean, out.rstd, out.variance}) {
      if (!given && statistic.defined()) statistic.zero_();
    }
    return;
  }
  const Tensor x = input.contiguous(order_of(norm, input));
  ChannelNormForwardParams p{};
  p.x = x.const_data_ptr();
  p.weight = const_data(w);
  p.bias = const_data(b);
  p.y = out.output.mutable_data_ptr();
  p.mean = mutable_data(out.mean);
  p.rstd = mutable_data(out.rstd);
  p.variance = mutable_data(out.variance);
  p.shape = shape_of(norm, input);
  p.eps = eps;
  p.dtype = scalar_type(input);
  p.stream_stores = exceeds_cache(out.output, 2);
  Tensor parts;
  if (!given) {
    parts = empty_parts(p.shape, kernels::moment_parts(p.shape), 3, input.options().dtype(sums));
    p.parts = parts.mutable_data_ptr();
  }
  launch(
      norm.op(), input,
      [&](const Kernels& cpu) {
        const ChannelShape& s = p.shape;
        const Stage<ChannelNormForwardParams> output{cpu.channel_output,
                                                     each_unit(s, kernels::element_parts(s))};
        if (given) return run_stages(p, kForwardUnit, std::array{output});
        run_stages(p, kForwardUnit,
                   std::array{Stage<ChannelNormForwardParams>{
                                  cpu.channel_moments, each_unit(s, kernels::moment_parts(s))},
                              Stage<ChannelNormForwardParams>{cpu.channel_statistics,
                                                              each_unit(s, kernels::set_count(s))},
                              output});
      },
      MEMOPT_CUDA_KERNEL(channel_norm_forward), p);
}

void backward(const ChannelNorm& norm, const Tensor& grad_output, const Tensor& input,
              const Tensor& mean, const Tensor& rstd, const OptionalTensor& weight, bool given,
              const Tensor& dx, const Tensor& dweight, const Tensor& dbias) {
  const at::ScalarType sums = accumulate_type(input);
  const Tensor w = wide_parameter(norm, "weight", weight, sums);
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
  p.stream_stores = exceeds_cache(input, 3);
  const ChannelShape& s = p.shape;
  const auto options = input.options().dtype(sums);
  const bool has_means = dx.defined() && !given;
  const bool has_parameters = dweight.defined() || dbias.defined();
  Tensor parts, means;
  if (has_means) means = at::empty({kernels::set_count(s), 2}, options);
  if (has_means || has_parameters) parts = empty_parts(s, kernels::element_parts(s), 2, options);
  p.means = mutable_data(means);
  p.parts = mutable_data(parts);
  launch(
      norm.op(), input,
      [&](const Kernels& cpu) {
        using OfBackward = Stage<ChannelNormBackwardParams>;
        const int64_t each = each_unit(s, kernels::element_parts(s));
        const int64_t together = s.pixels || p.stream_stores ? kBackwardUnit : kWhole;
        run_stages(
            p, together,
            std::array{OfBackward{p.parts != nullptr ? cpu.channel_sums : nullptr, each},
                       OfBackward{has_means ? cpu.channel_means : nullptr,
                                  each_unit(s, kernels::set_count(s))},
                       OfBackward{dx.defined() ? cpu.channel_input_gradient : nullptr, each}});
        if (!has_parameters) return;
        parallel(s.channels, kernels::element_parts(s) / (s.pixels ? 1 : s.channels),
                 [&](int64_t begin, int64_t end) { cpu.channel_parameters(p, begin, end); });
      },
      MEMOPT_CUDA_KERNEL(channel_norm_backward), p);
}

Tensor empty_of(bool wanted, const c10::SymDimVector& shape, const Tensor& input) {
  if (!wanted) return Tensor();
  return at::empty_symint(shape, input.options().dtype(accumulate_type(input)));
}

// A parameter's gradient in its own dtype.
Tensor narrowed(const Tensor& gradient, const OptionalTensor& parameter) {
  return gradient.defined() ? gradient.to(parameter->scalar_type()) : gradient;
}

}  // namespace

Results4 _channel_norm_forward(const Tensor& input, int64_t groups, const OptionalTensor& mean,
                               const OptionalTensor& rstd, const OptionalTensor& weight,
                               const OptionalTensor& bias, double eps, std::string_view kind,
                               bool for_backward, bool with_variance) {
  const ChannelNorm norm = parse_channel_norm(kind, groups, /*backward=*/false);
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

Results3 _channel_norm_backward(const Tensor& grad_output, const Tensor& input, int64_t groups,
                                const Tensor& mean, const Tensor& rstd,
                                const OptionalTensor& weight, const OptionalTensor& bias,
                                bool given_statistics, std::array<bool, 3> output_mask,
                                std::string_view kind) {
  const ChannelNorm norm = parse_channel_norm(kind, groups, /*backward=*/true);
  check_channel_norm(norm, input, weight, bias);
  check_like_input(norm.op(), "grad_output", grad_output, input);
  check_statistics_of_sets(norm, input, "mean", mean);
  check_statistics_of_sets(norm, input, "rstd", rstd);
  const c10::SymDimVector channels{input.sym_size(1)};
  const Tensor dx = output_mask[0] ? empty_in_order(norm, input) : Tensor();
  const Tensor dweight = empty_of(output_mask[1] && is_given(weight), channels, input);
  const Tensor dbias = empty_of(output_mask[2] && is_given(bias), channels, input);
  const bool any = dx.defined() || dweight.defined() || dbias.defined();
  if (any && !input.is_meta()) {
    backward(norm, grad_output, input, mean, rstd, weight, given_statistics, dx, dweight, dbias);
  }
  return {dx, narrowed(dweight, weight), narrowed(dbias, bias)};
}

MEMOPT_DECLARE_PRIVATE(
    _channel_norm_forward, {},
    "_channel_norm_forward(Tensor input, int groups, Tensor? mean, Tensor? rstd, Tensor? weight,"
    " Tensor? bias, float eps, *, str norm, bool for_backward=True, bool with_variance=False)"
    " -> (Tensor output, Tensor mean, Tensor rstd, Tensor variance)");
MEMOPT_DECLARE_PRIVATE(
    _channel_norm_backward, {},
    "_channel_norm_backward(Tensor grad_output, Tensor input, int groups, Tensor mean,"
    " Tensor rstd, Tensor? weight, Tensor? bias, bool given_statistics, bool[3] output_mask, *,"
    " str norm) -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)");

}  // namespace memopt::ops
