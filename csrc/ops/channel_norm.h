// What forward and backward of the norms over channels share below autograd: group, instance and
// batch norm, and batch norm across ranks (kernels/channel_norm.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "../kernels/channel_norm.h"
#include "launch.h"

namespace memopt::ops {

using OptionalTensor = std::optional<at::Tensor>;

struct ChannelNorm {
  std::string name;
  int64_t groups;
  bool over_batch;
  bool is_instance_norm;
  kernels::ActivationSpec activation;  // behind it

  const char* op() const { return name.c_str(); }  // in errors: what a user calls
};

struct ActivationBehind {
  std::optional<std::string_view> name;
  std::optional<double> scalar;
};
ChannelNorm parse_channel_norm(std::string_view kind, int64_t groups, bool backward,
                               const ActivationBehind& activation = {});

c10::SymDimVector sets_of(const ChannelNorm& norm, const at::Tensor& input);

void check_channel_norm(const ChannelNorm& norm, const at::Tensor& input,
                        const OptionalTensor& weight, const OptionalTensor& bias);

void check_statistics_of_sets(const ChannelNorm& norm, const at::Tensor& input, const char* name,
                              const at::Tensor& statistics);

// Which of the two orders in memory a tensor is read in, its own or that of a copy: that of the
// results, which PyTorch's instance norm makes contiguous.
at::MemoryFormat order_of(const ChannelNorm& norm, const at::Tensor& tensor);

// Like input in that order, uninitialised.
at::Tensor empty_in_order(const ChannelNorm& norm, const at::Tensor& input);

// Uninitialised, in the type of sums; undefined where it is not wanted.
at::Tensor empty_of(bool wanted, const c10::SymDimVector& shape, const at::Tensor& input);

kernels::ChannelShape shape_of(const ChannelNorm& norm, const at::Tensor& input);

// A parameter in the type of sums.
at::Tensor wide_parameter(const ChannelNorm& norm, const char* name,
                          const OptionalTensor& parameter, at::ScalarType type);

// What a kernel's parts are in.
at::Tensor empty_parts(const kernels::ChannelShape& shape, int64_t parts, int64_t numbers,
                       const at::TensorOptions& options);

// How many elements all stages of forward are run on, one behind the other: they read the same
// tensor, which stays in the cache next to the arithmetic.
constexpr int64_t kForwardUnit = 2048;

inline bool activates(const ChannelNorm& norm) {
  return norm.activation.kind != kernels::Activation::kIdentity;
}

// A stage of a kernel: `each` items of a unit, which is what can be computed for itself.
struct Stage {
  std::function<void(int64_t, int64_t)> run;  // null: nothing is to be done
  int64_t each;
};

// A kernel's function of its params and a range of items.
template <class Params>
Stage stage(bool wanted, void (*run)(const Params&, int64_t, int64_t), const Params& p,
            int64_t each) {
  if (!wanted) return {nullptr, each};
  return {[run, &p](int64_t begin, int64_t end) { run(p, begin, end); }, each};
}

// All stages of `together` elements, one behind the other, where there are units for all threads;
// otherwise stage by stage. The results have the same bits.
template <size_t kStages>
void run_stages(const kernels::ChannelShape& s, int64_t together,
                const std::array<Stage, kStages>& stages) {
  const int64_t units = s.pixels ? s.batch : kernels::set_count(s);
  const int64_t elements = s.batch * s.channels * s.size / units;
  const auto run = [&](const Stage& stage, int64_t begin, int64_t end) {
    if (stage.run) stage.run(begin * stage.each, end * stage.each);
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
    if (stage.run) parallel(items, units * elements / items, stage.run);
  }
}

// How many of all `items` a unit has.
inline int64_t each_unit(const kernels::ChannelShape& s, int64_t items) {
  return items / (s.pixels ? s.batch : kernels::set_count(s));
}

}  // namespace memopt::ops
