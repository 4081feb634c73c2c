// The CPU entry points. Each instruction set has its own copy of every kernel, compiled from the
// same sources into a namespace of its own; cpu_kernels() picks the table once.
#pragma once

#include "../activation.h"
#include "../channel_norm.h"
#include "../cross_entropy.h"
#include "../dropout.h"
#include "../gated.h"
#include "../norm.h"
#include "../split_sum.h"

namespace memopt::kernels::cpu {

// Every function works on the half-open range [begin, end) of what its comment names and may be
// called from several threads on disjoint ranges. Results do not depend on how the whole is cut
// into ranges.
struct Kernels {
  const char* name;  // "baseline", "avx2", "avx512"

  // elements; begin must be a multiple of 64
  void (*activation_forward)(const ActivationForwardParams& p, int64_t begin, int64_t end);
  void (*activation_backward)(const ActivationBackwardParams& p, int64_t begin, int64_t end);

  // elements of y, numbered through the rows; begin must be a multiple of 64
  void (*gated_forward)(const GatedForwardParams& p, int64_t begin, int64_t end);
  void (*gated_backward)(const GatedBackwardParams& p, int64_t begin, int64_t end);

  // elements; begin must be a multiple of 64
  void (*dropout)(const DropoutParams& p, int64_t begin, int64_t end);

  // rows
  void (*norm_forward)(const NormForwardParams& p, int64_t begin, int64_t end);
  // parts: part i holds the rows [i B, min((i + 1) B, rows)), B = norm_rows_per_part(rows)
  void (*norm_backward)(const NormBackwardParams& p, int64_t begin, int64_t end);
  // columns: the second step of the weight gradients, after all parts are done
  void (*norm_reduce_parts)(const NormBackwardParams& p, int64_t begin, int64_t end);

  // Of the norms over channels. Parts (moment_parts), sets, parts (element_parts).
  // channel_activation writes what an activation makes of the output or, where there is dz, the
  // output's gradient.
  void (*channel_moments)(const ChannelNormForwardParams& p, int64_t begin, int64_t end);
  void (*channel_statistics)(const ChannelNormForwardParams& p, int64_t begin, int64_t end);
  void (*channel_output)(const ChannelNormForwardParams& p, int64_t begin, int64_t end);
  void (*channel_activation)(const ChannelNormForwardParams& p, int64_t begin, int64_t end);
  // Parts, sets, channels, parts (element_parts). Of each stage all that a set or a channel
  // consists of must be done before the next begins.
  void (*channel_sums)(const ChannelNormBackwardParams& p, int64_t begin, int64_t end);
  void (*channel_means)(const ChannelNormBackwardParams& p, int64_t begin, int64_t end);
  void (*channel_parameters)(const ChannelNormBackwardParams& p, int64_t begin, int64_t end);
  void (*channel_input_gradient)(const ChannelNormBackwardParams& p, int64_t begin, int64_t end);

  // rows
  void (*cross_entropy)(const CrossEntropyParams& p, int64_t begin, int64_t end);

  // elements
  void (*split_sum)(const SplitSumParams& p, int64_t begin, int64_t end);
};

constexpr int64_t kMaxNormParts = 128;

// A function of rows alone: the same sums whatever the number of threads. A part's rows are added
// in order, the parts pairwise: so the fewer rows in a part, the less the sums lose to rounding.
inline int64_t norm_rows_per_part(int64_t rows) {
  constexpr int64_t kLeastRows = 16;
  const int64_t rows_per_part = ceil_div(rows, kMaxNormParts);
  return rows_per_part < kLeastRows ? kLeastRows : rows_per_part;
}

// The best table that this processor runs, or the one that the environment variable
// MEMOPT_CPU_CAPABILITY names (read once). Null, with *error set to a static text, when that names
// none of them or one that cannot run here.
const Kernels* cpu_kernels(const char** error);

// Names of the tables compiled in, in ascending order, ended by null.
const char* const* compiled_capabilities();

}  // namespace memopt::kernels::cpu
