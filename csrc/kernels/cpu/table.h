// The entry points of one instruction set.
#pragma once

#include "kernels.h"

namespace memopt::kernels::cpu {

#define MEMOPT_DECLARE_KERNELS                                                                 \
  extern const Kernels kernels;                                                                \
  void activation_forward(const ActivationForwardParams& p, int64_t begin, int64_t end);       \
  void activation_backward(const ActivationBackwardParams& p, int64_t begin, int64_t end);     \
  void gated_forward(const GatedForwardParams& p, int64_t begin, int64_t end);                 \
  void gated_backward(const GatedBackwardParams& p, int64_t begin, int64_t end);               \
  void dropout(const DropoutParams& p, int64_t begin, int64_t end);                            \
  void norm_forward(const NormForwardParams& p, int64_t begin, int64_t end);                   \
  void norm_backward(const NormBackwardParams& p, int64_t begin, int64_t end);                 \
  void norm_reduce_parts(const NormBackwardParams& p, int64_t begin, int64_t end);             \
  void channel_moments(const ChannelNormForwardParams& p, int64_t begin, int64_t end);         \
  void channel_statistics(const ChannelNormForwardParams& p, int64_t begin, int64_t end);      \
  void channel_output(const ChannelNormForwardParams& p, int64_t begin, int64_t end);          \
  void channel_activation(const ChannelNormForwardParams& p, int64_t begin, int64_t end);      \
  void channel_sums(const ChannelNormBackwardParams& p, int64_t begin, int64_t end);           \
  void channel_means(const ChannelNormBackwardParams& p, int64_t begin, int64_t end);          \
  void channel_parameters(const ChannelNormBackwardParams& p, int64_t begin, int64_t end);     \
  void channel_input_gradient(const ChannelNormBackwardParams& p, int64_t begin, int64_t end); \
  void cross_entropy(const CrossEntropyParams& p, int64_t begin, int64_t end);                 \
  void split_sum(const SplitSumParams& p, int64_t begin, int64_t end);

namespace MEMOPT_CPU_NAMESPACE {
MEMOPT_DECLARE_KERNELS
}
#if defined(CPU_CAPABILITY_AVX512)
namespace avx2 {  // for float64
MEMOPT_DECLARE_KERNELS
}
#endif

}  // namespace memopt::kernels::cpu
