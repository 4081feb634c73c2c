// Forward of the norms over channels. Formulas and parts: kernels/channel_norm.h.
//
// Memory: x is read twice, for the moments and for the output, and y written once: 6 bytes an
// element in 2-byte types. The moments of parts of planes take 12 bytes for up to 8192 elements,
// those of pixels 12 for 32.
#include <initializer_list>

#include "channel_norm.cuh"

namespace memopt::kernels::cuda {
namespace {

// Block: blockDim.x threads to a part, blockDim.y parts. The grid strides over the parts.
template <class T, Access kAccess>
__global__ void __launch_bounds__(kMaxRowThreads)
    channel_moments_of_runs(ChannelNormForwardParams p) {
  using A = Accumulate<T>;
  constexpr int kWidth = kGroup<T, kAccess>;
  constexpr int kVectors = kPartShare / kWidth;
  const int64_t parts = moment_parts(p.shape);
  const int64_t step = int64_t{gridDim.x} * blockDim.y;
  for (int64_t first = int64_t{blockIdx.x} * blockDim.y; first < parts; first += step) {
    const int64_t i = first + threadIdx.y;
    const bool exists = i < parts;
    const ChannelPart part = run_part(p.shape, exists ? i : first);
    const PartShare<T, kAccess> share(static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x),
                                      exists ? part.size : 0);
    Vector<T, kWidth> raw[kVectors];
    A x[kWidth];
    A sum = 0;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      load<Load::kPlain>(static_cast<const T*>(p.x) + part.begin, share, k, &raw[k]);
    }
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      widen(raw[k], x);
      sum += sum_of(x);
    }
    const A n = static_cast<A>(part.size);
    const A mean = row_sum(sum, 0) / n;
    Pair<A> sums = {0, 0};
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      widen(raw[k], x);
      add_centred(x, mean, share, k, &sums);
    }
    sums = row_sum(sums, 1);
    if (exists && threadIdx.x == 0) {
      static_cast<PartMoments<A>*>(p.parts)[i] = part_moments(mean, sums.first, sums.second, n);
    }
  }
}

template <class T, Access kAccess>
__global__ void __launch_bounds__(kPartBlockThreads)
    channel_moments_of_pixels(ChannelNormForwardParams p) {
  using A = Accumulate<T>;
  constexpr int kWidth = kGroup<T, kAccess>;
  const int64_t channels = p.shape.channels;
  for_pixel_tiles<T, kAccess>(p.shape, [&](int64_t i, int64_t tile, const auto& share) {
    const ChannelPart part = pixels_part(p.shape, i);
    const T* const from = static_cast<const T*>(p.x) + part.begin + tile;
    const A n = static_cast<A>(part.size);
    A x[kWidth], mean[kWidth] = {}, d[kWidth] = {}, d2[kWidth] = {};
    for (int64_t row = 0; row < part.size; ++row) {
      load<Load::kPlain>(from + row * channels, share, 0, x);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) mean[j] += x[j];
    }
#pragma unroll
    for (int j = 0; j < kWidth; ++j) mean[j] = mean[j] / n;
    for (int64_t first = 0; first < part.size; first += kSumPixels) {
      const int64_t last = part.size - first < kSumPixels ? part.size : first + kSumPixels;
      A of_d[kWidth] = {}, of_d2[kWidth] = {};
      for (int64_t row = first; row < last; ++row) {
        load<Load::kPlain>(from + row * channels, share, 0, x);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          const A e = x[j] - mean[j];
          of_d[j] += e;
          of_d2[j] = Math<A>::fma(e, e, of_d2[j]);
        }
      }
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        d[j] += of_d[j];
        d2[j] += of_d2[j];
      }
    }
    A* const to = static_cast<A*>(p.parts) + i * 3 * channels + tile;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      if (!share.owns(0, j)) continue;
      const PartMoments<A> m = part_moments(mean[j], d[j], d2[j], n);
      const int at = share.position(0, j);
      to[at] = m.mean;
      to[channels + at] = m.shift;
      to[2 * channels + at] = m.m2;
    }
  });
}

// Entry i of a set: what part of it that is, and its moments.
template <class A>
struct Entry {
  A n;
  PartMoments<A> moments;
};

template <class A>
__device__ __forceinline__ Entry<A> entry_of_pixels(const ChannelNormForwardParams& p,
                                                    const SetEntries& entries, int64_t i) {
  const ChannelShape& s = p.shape;
  const int64_t part = entries.first + i / entries.channels;
  const A* const from = static_cast<const A*>(p.parts) + part * 3 * s.channels + entries.channel +
                        i % entries.channels;
  return {static_cast<A>(pixels_part(s, part).size),
          {from[0], from[s.channels], from[2 * s.channels]}};
}

template <class A>
__device__ __forceinline__ Entry<A> entry_of_runs(const ChannelNormForwardParams& p,
                                                  const SetEntries& entries, int64_t i) {
  return {static_cast<A>(run_part(p.shape, entries.first + i).size),
          static_cast<const PartMoments<A>*>(p.parts)[entries.first + i]};
}

// A set to a block.
template <class A, bool kPixels>
__global__ void __launch_bounds__(kSetThreads) channel_statistics(ChannelNormForwardParams p) {
  const ChannelShape& s = p.shape;
  const int64_t elements = set_elements(s);
  const A n = static_cast<A>(elements);
  for (int64_t set = blockIdx.x; set < set_count(s); set += gridDim.x) {
    const int64_t of_set = runs_of_set(s) * parts_of_run(s);
    const SetEntries entries =
        kPixels ? entries_of_pixels(s, set) : SetEntries{of_set, set * of_set, 0, 1};
    const auto entry = [&](int64_t i) {
      if constexpr (kPixels) {
        return entry_of_pixels<A>(p, entries, i);
      } else {
        return entry_of_runs<A>(p, entries, i);
      }
    };
    TileSum<A> sum;
    for (int64_t i = threadIdx.x; i < entries.count; i += blockDim.x) {
      const Entry<A> e = entry(i);
      sum.add(e.n * e.moments.mean);
    }
    const A mean = row_sum(sum.total(), 0) / n;
    TileSum<Pair<A>> centred;
    for (int64_t i = threadIdx.x; i < entries.count; i += blockDim.x) {
      const Entry<A> e = entry(i);
      const A d = (e.moments.mean - mean) + e.moments.shift;
      centred.add({e.n * d, Math<A>::fma(e.n * d, d, e.moments.m2)});
    }
    const Pair<A> sums = row_sum(centred.total(), 1);
    if (threadIdx.x != 0) continue;
    const Moments<A> m = moments(mean, sums.first, sums.second, elements, p.eps);
    static_cast<A*>(p.mean)[set] = m.mean;
    if (p.rstd != nullptr) static_cast<A*>(p.rstd)[set] = m.rstd;
    if (p.shift != nullptr) static_cast<A*>(p.shift)[set] = (mean - m.mean) + sums.first / n;
    if (p.variance != nullptr) {
      static_cast<A*>(p.variance)[set] =
          variance(sums.first / n, sums.second, n) * static_cast<A>(p.unbias);
    }
  }
}

// Of the norm's output y: itself, what an activation makes of it, or, where there is dz, its
// gradient.
template <class T, class Share, int kWidth, class A>
__device__ __forceinline__ void write_result(const ChannelNormForwardParams& p, int64_t begin,
                                             const Share& share, int k, A (&y)[kWidth]) {
  T* const to = static_cast<T*>(p.y) + begin;
  if (p.dz == nullptr) {
    activate<T>(p.activation, y);
    return store(y, to, share, k);
  }
  A dy[kWidth];
  load<Load::kPlain>(static_cast<const T*>(p.dz) + begin, share, k, dy);
  go_through<T>(p.activation, [&](int j) { return y[j]; }, dy);
  store(dy, to, share, k);
}

template <class T, Access kAccess>
__global__ void __launch_bounds__(kMaxRowThreads)
    channel_output_of_planes(ChannelNormForwardParams p) {
  using A = Accumulate<T>;
  constexpr int kWidth = kGroup<T, kAccess>;
  constexpr int kVectors = kPartShare / kWidth;
  const int64_t parts = element_parts(p.shape);
  const int64_t step = int64_t{gridDim.x} * blockDim.y;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.y + threadIdx.y; i < parts; i += step) {
    const ChannelPart part = plane_part(p.shape, i);
    const PartShare<T, kAccess> share(static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x),
                                      part.size);
    const int64_t set = set_of(p.shape, part.sample, part.channel);
    const A mean = static_cast<const A*>(p.mean)[set], rstd = static_cast<const A*>(p.rstd)[set];
    const A w = of_channel(p.weight, part.channel, A(1)),
            b = of_channel(p.bias, part.channel, A(0));
    Vector<T, kWidth> raw[kVectors];
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      load<Load::kPlain>(static_cast<const T*>(p.x) + part.begin, share, k, &raw[k]);
    }
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      A x[kWidth];
      widen(raw[k], x);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        x[j] = Centred::affine(Centred::normalize(x[j], mean, rstd), w, b);
      }
      write_result<T>(p, part.begin, share, k, x);
    }
  }
}

template <class T, Access kAccess>
__global__ void __launch_bounds__(kPartBlockThreads)
    channel_output_of_pixels(ChannelNormForwardParams p) {
  using A = Accumulate<T>;
  constexpr int kWidth = kGroup<T, kAccess>;
  const int64_t channels = p.shape.channels;
  for_pixel_tiles<T, kAccess>(p.shape, [&](int64_t i, int64_t tile, const auto& share) {
    const ChannelPart part = pixels_part(p.shape, i);
    A mean[kWidth], rstd[kWidth], w[kWidth], b[kWidth];
    load_of_sets(p.shape, part.sample, p.mean, 1, tile, share, mean);
    load_of_sets(p.shape, part.sample, p.rstd, 1, tile, share, rstd);
    load_of_channels(p.weight, tile, share, A(1), w);
    load_of_channels(p.bias, tile, share, A(0), b);
    for (int64_t row = 0; row < part.size; ++row) {
      const int64_t at = part.begin + row * channels + tile;
      A x[kWidth];
      load<Load::kPlain>(static_cast<const T*>(p.x) + at, share, 0, x);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        x[j] = Centred::affine(Centred::normalize(x[j], mean[j], rstd[j]), w[j], b[j]);
      }
      write_result<T>(p, at, share, 0, x);
    }
  });
}

template <class T>
cudaError_t forward_of_pixels(const ChannelNormForwardParams& p, const DeviceLimits& limits,
                              cudaStream_t stream) {
  using A = Accumulate<T>;
  const ChannelShape& s = p.shape;
  return with_part_access<T>(s.channels, {p.x, p.y, p.dz}, [&](auto a) {
    constexpr Access kAccess = decltype(a)::value;
    cudaError_t error = cudaSuccess;
    if (p.parts != nullptr) {
      error = launch_pixels<T, kAccess>(channel_moments_of_pixels<T, kAccess>, limits, stream, p);
      if (error != cudaSuccess) return error;
      error = launch_sets<A>(channel_statistics<A, true>, set_count(s),
                             entries_of_pixels(s, 0).count, limits, stream, p);
    }
    if (error != cudaSuccess || p.y == nullptr) return error;
    return launch_pixels<T, kAccess>(channel_output_of_pixels<T, kAccess>, limits, stream, p);
  });
}

template <class T>
cudaError_t forward_of_planes(const ChannelNormForwardParams& p, const DeviceLimits& limits,
                              cudaStream_t stream) {
  using A = Accumulate<T>;
  const ChannelShape& s = p.shape;
  if (p.parts != nullptr) {
    cudaError_t error = with_part_access<T>(run_elements(s), {p.x}, [&](auto a) {
      return launch_parts<A>(channel_moments_of_runs<T, decltype(a)::value>, moment_parts(s),
                             run_elements(s), limits, stream, p);
    });
    if (error != cudaSuccess) return error;
    error = launch_sets<A>(channel_statistics<A, false>, set_count(s),
                           runs_of_set(s) * parts_of_run(s), limits, stream, p);
    if (error != cudaSuccess || p.y == nullptr) return error;
  }
  return with_part_access<T>(s.size, {p.x, p.y, p.dz}, [&](auto a) {
    return launch_parts<A>(channel_output_of_planes<T, decltype(a)::value>, element_parts(s),
                           s.size, limits, stream, p);
  });
}

}  // namespace

cudaError_t channel_norm_forward(const ChannelNormForwardParams& p, cudaStream_t stream) {
  if (p.shape.batch * p.shape.channels * p.shape.size == 0) return cudaSuccess;
  DeviceLimits limits;
  const cudaError_t error = current_device_limits(&limits);
  if (error != cudaSuccess) return error;
  return dispatch(p.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    return p.shape.pixels ? forward_of_pixels<T>(p, limits, stream)
                          : forward_of_planes<T>(p, limits, stream);
  });
}

}  // namespace memopt::kernels::cuda
