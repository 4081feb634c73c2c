// One instruction set's table of kernels: constants alone, so that loading the library runs none of
// its instructions.
#include "table.h"

#define MEMOPT_STRING_(x) #x
#define MEMOPT_STRING(x) MEMOPT_STRING_(x)

namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE {
namespace {

#if defined(CPU_CAPABILITY_AVX512)
// float64 is computed without vectors, so AVX2's copy is as good.
template <auto kOwn, auto kScalar>
struct Entry;
template <class Params, void (*kOwn)(const Params&, int64_t, int64_t),
          void (*kScalar)(const Params&, int64_t, int64_t)>
struct Entry<kOwn, kScalar> {
  static void run(const Params& p, int64_t begin, int64_t end) {
    (p.dtype == ScalarType::kDouble ? kScalar : kOwn)(p, begin, end);
  }
};
#define MEMOPT_KERNEL(name) Entry<name, avx2::name>::run
#else
#define MEMOPT_KERNEL(name) name
#endif

}  // namespace

constexpr Kernels kernels{
    .name = MEMOPT_STRING(MEMOPT_CPU_NAMESPACE),
    .activation_forward = MEMOPT_KERNEL(activation_forward),
    .activation_backward = MEMOPT_KERNEL(activation_backward),
    .gated_forward = MEMOPT_KERNEL(gated_forward),
    .gated_backward = MEMOPT_KERNEL(gated_backward),
    .dropout = MEMOPT_KERNEL(dropout),
    .norm_forward = MEMOPT_KERNEL(norm_forward),
    .norm_backward = MEMOPT_KERNEL(norm_backward),
    .norm_reduce_parts = MEMOPT_KERNEL(norm_reduce_parts),
    .channel_moments = MEMOPT_KERNEL(channel_moments),
    .channel_statistics = MEMOPT_KERNEL(channel_statistics),
    .channel_output = MEMOPT_KERNEL(channel_output),
    .channel_activation = MEMOPT_KERNEL(channel_activation),
    .channel_sums = MEMOPT_KERNEL(channel_sums),
    .channel_means = MEMOPT_KERNEL(channel_means),
    .channel_parameters = MEMOPT_KERNEL(channel_parameters),
    .channel_input_gradient = MEMOPT_KERNEL(channel_input_gradient),
    .cross_entropy = MEMOPT_KERNEL(cross_entropy),
    .split_sum = split_sum,
};

}  // namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE
