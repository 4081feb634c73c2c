// Norms over channels: group norm (Wu & He, arXiv:1803.08494), instance norm (Ulyanov et al.,
// arXiv:1607.08022), which is a group norm with a channel to a group, and batch norm (Ioffe &
// Szegedy, arXiv:1502.03167). x is [batch, channels, size], size = 1 or the product of the spatial
// dimensions. What is normalised together is a set: a group of channels of one sample, or one
// channel of all samples. N is the number of elements of a set.
//
//   mean = sum(x) / N         var = sum((x - mean)^2) / N       rstd = 1 / sqrt(var + eps)
//   xhat = (x - mean) rstd    y = xhat weight + bias            weight, bias: of the channel
//
//   dweight = sum of a channel (dy xhat)            dbias = sum of a channel (dy)
//   g = dy weight             dx = rstd (g - sum(g)/N - xhat sum(g xhat)/N)
//
// With statistics that are given (batch norm in evaluation) dx = rstd g.
//
// Saved for backward: x, and mean and rstd of each set (8 bytes). Neither xhat nor y: y is a
// function of x, the statistics, weight and bias, element by element, and is written again from
// them by the kernel that writes it in forward.
//
// With an activation behind it, in the same calls:
//
//   z = act(y)      dy = dz act'(y)      y and dy rounded to the tensors' type
//
// as the norm and the activation one after the other round them: so the bits are theirs, and z is
// the same function of x, the statistics, weight and bias, which are all that is saved. In elements
// forward and backward each write one less than the two calls; forward reads one less, backward two
// (on CUDA; on the CPU what lies between the two is in the cache).
//
// Both orders in memory are read as they lie: planes, [batch, channels, size], and pixels,
// [batch, size, channels] (channels-last).
//
// Moments are those of parts of a set, each centred around its own mean while it is in the cache,
// and then of the parts, centred once more (the pairwise algorithm of Chan, Golub & LeVeque, 1983):
// x is read from memory once for both. A part is at most kPartElements neighbours of a plane (in a
// group norm of the group's planes, which lie one behind the other), or of a channel 32 to 128
// pixels, a 64th of what there is: the numbers of parts take 9 % of x's bytes, or 2. How a set is
// cut depends on its own sizes alone.
#pragma once

#include "activation.h"
#include "layer_norm.h"

namespace memopt::kernels {

constexpr int64_t kPartElements = 8192;

struct ChannelShape {
  int64_t batch;
  int64_t channels;
  int64_t size;
  int64_t groups;   // of channels; with over_batch each channel is one
  bool over_batch;  // a set is a channel of all samples
  bool pixels;      // the order in memory
};

MEMOPT_HD int64_t group_channels(const ChannelShape& s) {
  return s.channels / s.groups;
}
MEMOPT_HD int64_t set_count(const ChannelShape& s) {
  return s.over_batch ? s.channels : s.batch * s.groups;
}
MEMOPT_HD int64_t set_elements(const ChannelShape& s) {
  return (s.over_batch ? s.batch : group_channels(s)) * s.size;
}
MEMOPT_HD int64_t set_of(const ChannelShape& s, int64_t sample, int64_t channel) {
  return s.over_batch ? channel : sample * s.groups + channel / group_channels(s);
}

// Planes. A set lies in runs of neighbours: its group, or its channel's plane of each sample.
MEMOPT_HD int64_t runs_of_set(const ChannelShape& s) {
  return s.over_batch ? s.batch : 1;
}
MEMOPT_HD int64_t run_elements(const ChannelShape& s) {
  return s.over_batch ? s.size : group_channels(s) * s.size;
}
MEMOPT_HD int64_t run_begin(const ChannelShape& s, int64_t set, int64_t run) {
  return s.over_batch ? (run * s.channels + set) * s.size : set * run_elements(s);
}
MEMOPT_HD int64_t planes_of_set(const ChannelShape& s) {
  return s.over_batch ? s.batch : group_channels(s);
}
// The number, sample channels + channel, of a set's plane.
MEMOPT_HD int64_t plane_of_set(const ChannelShape& s, int64_t set, int64_t plane) {
  return s.over_batch ? plane * s.channels + set : set * group_channels(s) + plane;
}

// The parts, numbered set by set (planes) or sample by sample (pixels; there a part is of all
// channels): those that moments are made of, and those that everything else is done in, which are
// parts of one plane each.
MEMOPT_HD int64_t parts_of_run(const ChannelShape& s) {
  return ceil_div(run_elements(s), kPartElements);
}
MEMOPT_HD int64_t parts_of_plane(const ChannelShape& s) {
  return ceil_div(s.size, kPartElements);
}
// Sums are those of kSumPixels neighbours, one after the other.
constexpr int64_t kSumPixels = 32;
MEMOPT_HD int64_t part_pixels(const ChannelShape& s) {
  const int64_t share = s.size / 64 / kSumPixels * kSumPixels;
  return share < kSumPixels ? kSumPixels : share < 4 * kSumPixels ? share : 4 * kSumPixels;
}
MEMOPT_HD int64_t parts_of_sample(const ChannelShape& s) {
  return ceil_div(s.size, part_pixels(s));
}
MEMOPT_HD int64_t moment_parts(const ChannelShape& s) {
  if (s.pixels) return s.batch * parts_of_sample(s);
  return set_count(s) * runs_of_set(s) * parts_of_run(s);
}
MEMOPT_HD int64_t element_parts(const ChannelShape& s) {
  if (s.pixels) return s.batch * parts_of_sample(s);
  return s.batch * s.channels * parts_of_plane(s);
}

// Where elements and numbers of parts are.
struct ChannelPart {
  int64_t begin;    // the first element
  int64_t size;     // elements of a plane or a run, or pixels
  int64_t sample;   // these two not of a part of a run
  int64_t channel;  // not of pixels
};

MEMOPT_HD ChannelPart pixels_part(const ChannelShape& s, int64_t part) {
  const int64_t parts = parts_of_sample(s);
  const int64_t pixels = part_pixels(s), sample = part / parts, first = part % parts * pixels;
  const int64_t left = s.size - first;
  return {(sample * s.size + first) * s.channels, left < pixels ? left : pixels, sample, 0};
}
MEMOPT_HD ChannelPart run_part(const ChannelShape& s, int64_t part) {
  const int64_t parts = parts_of_run(s), first = part % parts * kPartElements;
  const int64_t run = part / parts;
  const int64_t left = run_elements(s) - first;
  return {run_begin(s, run / runs_of_set(s), run % runs_of_set(s)) + first,
          left < kPartElements ? left : kPartElements, 0, 0};
}
MEMOPT_HD ChannelPart plane_part(const ChannelShape& s, int64_t part) {
  const int64_t parts = parts_of_plane(s), first = part % parts * kPartElements;
  const int64_t plane =
      plane_of_set(s, part / parts / planes_of_set(s), part / parts % planes_of_set(s));
  const int64_t left = s.size - first;
  return {plane * s.size + first, left < kPartElements ? left : kPartElements, plane / s.channels,
          plane % s.channels};
}

// Of some numbers: a rounded mean, what it lacks, and the sum of the squares of their deviations
// from both together. (A mean that is rounded once more would be an error of its size in every
// difference of two parts' means, which is as large as the deviations where mean/std is large.)
template <class V>
struct PartMoments {
  V mean;
  V shift;
  V m2;
};

// From a rounded first mean m and the sums of d = x - m and d^2, as moments() has it.
template <class V>
MEMOPT_HD PartMoments<V> part_moments(V m, V sum_d, V sum_d2, V n) {
  const V shift = sum_d / n;
  return {m, shift, variance(shift, sum_d2, n) * n};
}

// y of one element; scale = rstd weight.
template <class V>
MEMOPT_HD V channel_affine(V x, V mean, V scale, V bias) {
  return Math<V>::fma(x - mean, scale, bias);
}

// dx of one element: scale = rstd weight, mean_g = rstd sum(g)/N, slope = -rstd^2 sum(g xhat)/N.
template <class V>
MEMOPT_HD V channel_input_grad(V dy, V x, V mean, V scale, V mean_g, V slope) {
  return Math<V>::fma(x - mean, slope, Math<V>::fma(dy, scale, -mean_g));
}

// Everything but x, y, dy and dx has the type of sums. weight, bias: [channels]; null: 1 and 0.
struct ChannelNormForwardParams {
  const void* x;
  const void* weight;
  const void* bias;
  void* y;         // in x's order, z where there is an activation; null: not wanted
  void* mean;      // [sets]; written by moments, read for y
  void* rstd;      // likewise; null: not wanted, and neither is y
  void* variance;  // [sets], times `unbias`; null: not wanted
  void* shift;     // [sets], what mean lacks of the mean (PartMoments); null: not wanted
  void* parts;     // [parts, 3] PartMoments, or of pixels [parts, 3, channels]
  ChannelShape shape;
  double eps;
  double unbias;
  ScalarType dtype;
  bool stream_stores;
  ActivationSpec activation;
  const void* dz;  // null, or dz act'(y) is written to y
};

struct ChannelNormBackwardParams {
  const void* dy;  // in x's order, and so is dx; on CUDA dz where there is an activation
  const void* x;
  const void* weight;
  const void* mean;
  const void* rstd;
  void* dx;       // null: not wanted
  void* dweight;  // [channels]; null: not wanted
  void* dbias;    // likewise
  void* means;  // [sets, 2]: sum(g)/N and sum(g xhat)/N; null: the statistics were given, or no dx.
                // Written where there are parts, given otherwise (those of a batch across ranks)
  const void* bias;  // with an activation, on CUDA: y is computed again
  ActivationSpec activation;
  void* parts;  // [parts, 2] or of pixels, and on the CPU, [rows of parts, 2, channels]: sums of dy
                // and of dy xhat; null: neither means nor a gradient of weight or bias is wanted
  ChannelShape shape;
  ScalarType dtype;
  bool stream_stores;
};

}  // namespace memopt::kernels
