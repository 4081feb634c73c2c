// What forward and backward of the norms over channels share: how parts are dealt out to threads,
// and sums over the parts of a set.
//
// Parts of planes are rows of a block (norm.cuh's row_block): a thread holds kPartShare elements,
// so that a part stays in registers between its uses. Of parts of pixels a thread owns neighbouring
// channels, a vector of them where rows of channels can be cut into vectors, and walks over the
// pixels; no thread meets another. How a part is dealt out depends on the sizes and the type alone.
#pragma once

#include "../channel_norm.h"
#include "launchers.h"
#include "norm.cuh"

namespace memopt::kernels::cuda {

constexpr int kPartShare = 16;
static_assert(kMaxRowThreads * kPartShare == kPartElements);

constexpr int kPartBlockThreads = 128;  // of short parts together, and of pixels
constexpr int kPixelThreads = 64;       // at most, of a row of channels
constexpr int kSetThreads = 256;        // at most, of a set's parts

// The block for parts of up to `elements` elements of planes.
inline dim3 part_block(int64_t elements) {
  return row_block<kPartShare>(elements < kPartElements ? elements : kPartElements,
                               kPartBlockThreads);
}

// f(AccessConstant<a>{}) for planes or runs of `elements` elements, which lie one behind the other.
template <class T, class F>
cudaError_t with_part_access(int64_t elements, std::initializer_list<const void*> arrays, F&& f) {
  bool aligned = true;
  for (const void* array : arrays) aligned = aligned && is_aligned(array);
  return dispatch_access<T>(elements, aligned, f);
}

template <class T, Access kAccess>
using PartShare = Share<kPartShare, kGroup<T, kAccess>, kAccess>;

// A thread's channels of parts of pixels: threads (a power of two) and blockDim.y parts to a block,
// so many tiles of channels to a part.
template <class T, Access kAccess>
using PixelShare = Share<kGroup<T, kAccess>, kGroup<T, kAccess>, kAccess>;

struct PixelBlocks {
  dim3 block;
  int64_t tiles;
};
template <class T, Access kAccess>
PixelBlocks pixel_blocks(int64_t channels) {
  const int64_t needed = ceil_div(channels, kGroup<T, kAccess>);
  int threads = 1;
  while (threads < needed && threads < kPixelThreads) threads *= 2;
  return {dim3(threads, kPartBlockThreads / threads), ceil_div(needed, threads)};
}

// body(part, first channel of the tile, share) for the tiles of channels of all parts of pixels.
template <class T, Access kAccess, class Body>
__device__ __forceinline__ void for_pixel_tiles(const ChannelShape& s, Body&& body) {
  constexpr int kWidth = kGroup<T, kAccess>;
  const int64_t tile_channels = int64_t{blockDim.x} * kWidth;
  const int64_t tiles = ceil_div(s.channels, tile_channels);
  const int64_t items = element_parts(s) * tiles;
  const int64_t step = int64_t{gridDim.x} * blockDim.y;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.y + threadIdx.y; i < items; i += step) {
    const int64_t tile = i % tiles * tile_channels;
    body(i / tiles, tile,
         PixelShare<T, kAccess>(static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x),
                                s.channels - tile));
  }
}

// An activation that is named at run time: a call, since its code would otherwise stand there once
// for each element of a thread. A memory-bound kernel has the time.
#define MEMOPT_ACTIVATION_CASE(name, kind, Function) \
  case Activation::kind:                             \
    return make_activation<Function>(spec).value(y);
template <class A>
__device__ __noinline__ A activated(ActivationSpec spec, A y) {
  switch (spec.kind) {
    MEMOPT_ACTIVATIONS(MEMOPT_ACTIVATION_CASE)
    case Activation::kIdentity:
      break;
  }
  return y;
}
#undef MEMOPT_ACTIVATION_CASE
#define MEMOPT_ACTIVATION_CASE(name, kind, Function) \
  case Activation::kind:                             \
    return chain<Function>(dz, make_activation<Function>(spec).value_and_grad(y).grad);
template <class A>
__device__ __noinline__ A activation_gradient(ActivationSpec spec, A y, A dz) {
  switch (spec.kind) {
    MEMOPT_ACTIVATIONS(MEMOPT_ACTIVATION_CASE)
    case Activation::kIdentity:
      break;
  }
  return dz;
}
#undef MEMOPT_ACTIVATION_CASE

// To the tensors' type and back.
template <class T, int kWidth, class A>
__device__ __forceinline__ void round_to(A (&values)[kWidth]) {
  Vector<T, kWidth> rounded;
  narrow(values, &rounded);
  widen(rounded, values);
}

// y <- act(y), where there is an activation.
template <class T, int kWidth, class A>
__device__ __forceinline__ void activate(const ActivationSpec& spec, A (&y)[kWidth]) {
  if (spec.kind == Activation::kIdentity) return;
  round_to<T>(y);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) y[j] = activated(spec, y[j]);
}

// dy <- the gradient of y, of which dy has been act(y)'s, where there is an activation; y of one
// element from y_of(j).
template <class T, int kWidth, class A, class Y>
__device__ __forceinline__ void go_through(const ActivationSpec& spec, Y&& y_of, A (&dy)[kWidth]) {
  if (spec.kind == Activation::kIdentity) return;
  A y[kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) y[j] = y_of(j);
  round_to<T>(y);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) dy[j] = activation_gradient(spec, y[j], dy[j]);
  round_to<T>(dy);
}

template <class A>
__device__ __forceinline__ A of_channel(const void* parameter, int64_t channel, A otherwise) {
  return parameter == nullptr ? otherwise : static_cast<const A*>(parameter)[channel];
}

// A number of each channel's set, of which there are `stride` side by side.
template <int kElements, int kWidth, Access kAccess, class A>
__device__ __forceinline__ void load_of_sets(const ChannelShape& s, int64_t sample,
                                             const void* of_set, int64_t stride, int64_t tile,
                                             const Share<kElements, kWidth, kAccess>& share,
                                             A (&out)[kWidth]) {
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    out[j] = A(0);
    if (!share.owns(0, j)) continue;
    const int64_t set = set_of(s, sample, tile + share.position(0, j));
    out[j] = static_cast<const A*>(of_set)[set * stride];
  }
}

// A parameter's number of each channel.
template <int kElements, int kWidth, Access kAccess, class A>
__device__ __forceinline__ void load_of_channels(const void* parameter, int64_t tile,
                                                 const Share<kElements, kWidth, kAccess>& share,
                                                 A otherwise, A (&out)[kWidth]) {
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    out[j] = of_channel(parameter, share.owns(0, j) ? tile + share.position(0, j) : 0, otherwise);
  }
}

// The entries of a set among the numbers of parts: entry i of entry_count(). Of pixels each channel
// of a part is one.
struct SetEntries {
  int64_t count;
  int64_t first;     // part
  int64_t channel;   // the first one; of pixels
  int64_t channels;  // of pixels, in a part
};
MEMOPT_HD SetEntries entries_of_pixels(const ChannelShape& s, int64_t set) {
  const int64_t of_sample = parts_of_sample(s), each = group_channels(s);
  if (s.over_batch) return {s.batch * of_sample, 0, set, 1};
  return {of_sample * each, set / s.groups * of_sample, set % s.groups * each, each};
}

// Threads for `entries` entries of each of `sets` sets, and the launch of a kernel that strides
// over the sets, a block to each.
template <class A, class Params>
cudaError_t launch_sets(void (*kernel)(Params), int64_t sets, int64_t entries,
                        const DeviceLimits& limits, cudaStream_t stream, const Params& p) {
  const int threads = entries <= 2 * kWarp ? kWarp : kSetThreads;
  return launch(kernel, dim3(strided_grid(sets, limits)), dim3(threads), kRowSumBytes<A>, stream,
                p);
}

// Launches a kernel over parts of planes or runs: `elements` of each.
template <class A, class Params>
cudaError_t launch_parts(void (*kernel)(Params), int64_t parts, int64_t elements,
                         const DeviceLimits& limits, cudaStream_t stream, const Params& p) {
  const dim3 block = part_block(elements);
  return launch(kernel, dim3(strided_grid(ceil_div(parts, block.y), limits)), block,
                kRowSumBytes<A>, stream, p);
}

template <class T, Access kAccess, class Params>
cudaError_t launch_pixels(void (*kernel)(Params), const DeviceLimits& limits, cudaStream_t stream,
                          const Params& p) {
  const PixelBlocks blocks = pixel_blocks<T, kAccess>(p.shape.channels);
  const int64_t items = element_parts(p.shape) * blocks.tiles;
  return launch(kernel, dim3(strided_grid(ceil_div(items, blocks.block.y), limits)), blocks.block,
                0, stream, p);
}

}  // namespace memopt::kernels::cuda
