// Backward of the norms over channels. Formulas and parts: kernels/channel_norm.h.
//
// Memory: x and dy are read twice, for the sums and for dx, and dx written once: 10 bytes an
// element in 2-byte types. With statistics that are given dx reads dy alone. With an activation dy
// is computed both times from x and the activation's gradient: no bytes, a few instructions.
#include <initializer_list>

#include "channel_norm.cuh"

namespace memopt::kernels::cuda {
namespace {

// The sums of dy and of dy xhat. Block: blockDim.x threads to a part, blockDim.y parts.
template <class T, Access kAccess>
__global__ void __launch_bounds__(kMaxRowThreads)
    channel_sums_of_planes(ChannelNormBackwardParams p) {
  using A = Accumulate<T>;
  constexpr int kWidth = kGroup<T, kAccess>;
  constexpr int kVectors = kPartShare / kWidth;
  const int64_t parts = element_parts(p.shape);
  const int64_t step = int64_t{gridDim.x} * blockDim.y;
  int64_t first = int64_t{blockIdx.x} * blockDim.y;
  for (int turn = 0; first < parts; first += step, turn ^= 1) {
    const int64_t i = first + threadIdx.y;
    const bool exists = i < parts;
    const ChannelPart part = plane_part(p.shape, exists ? i : first);
    const PartShare<T, kAccess> share(static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x),
                                      exists ? part.size : 0);
    const int64_t set = set_of(p.shape, part.sample, part.channel);
    const A mean = static_cast<const A*>(p.mean)[set], rstd = static_cast<const A*>(p.rstd)[set];
    const A w = of_channel(p.weight, part.channel, A(1)),
            b = of_channel(p.bias, part.channel, A(0));
    Pair<A> sums = {0, 0};
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      A x[kWidth], dy[kWidth];
      load<Load::kPlain>(static_cast<const T*>(p.x) + part.begin, share, k, x);
      load<Load::kPlain>(static_cast<const T*>(p.dy) + part.begin, share, k, dy);
      go_through<T>(
          p.activation,
          [&](int j) { return Centred::affine(Centred::normalize(x[j], mean, rstd), w, b); }, dy);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const A xhat = share.owns(k, j) ? Centred::normalize(x[j], mean, rstd) : A(0);
        sums.first += dy[j];
        sums.second = Math<A>::fma(dy[j], xhat, sums.second);
      }
    }
    sums = row_sum(sums, turn);
    if (exists && threadIdx.x == 0) {
      static_cast<A*>(p.parts)[2 * i] = sums.first;
      static_cast<A*>(p.parts)[2 * i + 1] = sums.second;
    }
  }
}

template <class T, Access kAccess>
__global__ void __launch_bounds__(kPartBlockThreads)
    channel_sums_of_pixels(ChannelNormBackwardParams p) {
  using A = Accumulate<T>;
  constexpr int kWidth = kGroup<T, kAccess>;
  const int64_t channels = p.shape.channels;
  for_pixel_tiles<T, kAccess>(p.shape, [&](int64_t i, int64_t tile, const auto& share) {
    const ChannelPart part = pixels_part(p.shape, i);
    A mean[kWidth], rstd[kWidth], w[kWidth], b[kWidth], sum[kWidth] = {}, product[kWidth] = {};
    load_of_sets(p.shape, part.sample, p.mean, 1, tile, share, mean);
    load_of_sets(p.shape, part.sample, p.rstd, 1, tile, share, rstd);
    load_of_channels(p.weight, tile, share, A(1), w);
    load_of_channels(p.bias, tile, share, A(0), b);
    for (int64_t first = 0; first < part.size; first += kSumPixels) {
      const int64_t last = part.size - first < kSumPixels ? part.size : first + kSumPixels;
      A of_dy[kWidth] = {}, of_product[kWidth] = {};
      for (int64_t row = first; row < last; ++row) {
        const int64_t at = part.begin + row * channels + tile;
        A x[kWidth], dy[kWidth];
        load<Load::kPlain>(static_cast<const T*>(p.x) + at, share, 0, x);
        load<Load::kPlain>(static_cast<const T*>(p.dy) + at, share, 0, dy);
        go_through<T>(
            p.activation,
            [&](int j) {
              return Centred::affine(Centred::normalize(x[j], mean[j], rstd[j]), w[j], b[j]);
            },
            dy);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          of_dy[j] += dy[j];
          of_product[j] =
              Math<A>::fma(dy[j], Centred::normalize(x[j], mean[j], rstd[j]), of_product[j]);
        }
      }
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        sum[j] += of_dy[j];
        product[j] += of_product[j];
      }
    }
    A* const to = static_cast<A*>(p.parts) + i * 2 * channels + tile;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      if (!share.owns(0, j)) continue;
      to[share.position(0, j)] = sum[j];
      to[channels + share.position(0, j)] = product[j];
    }
  });
}

// Both sums of an entry, which is of the channel.
template <class A>
struct ChannelSums {
  int64_t channel;
  Pair<A> sums;
};

template <class A>
__device__ __forceinline__ ChannelSums<A> sums_of_entry(const ChannelNormBackwardParams& p,
                                                        const SetEntries& entries, int64_t i) {
  const int64_t channels = p.shape.channels;
  const int64_t channel = entries.channel + i % entries.channels;
  const A* const from = static_cast<const A*>(p.parts) +
                        (entries.first + i / entries.channels) * 2 * channels + channel;
  return {channel, {from[0], from[channels]}};
}

template <class A>
__device__ __forceinline__ Pair<A> sums_of_plane(const ChannelNormBackwardParams& p, int64_t part) {
  const A* const from = static_cast<const A*>(p.parts) + 2 * part;
  return {from[0], from[1]};
}

// A set to a block.
template <class A, bool kPixels>
__global__ void __launch_bounds__(kSetThreads) channel_means(ChannelNormBackwardParams p) {
  const ChannelShape& s = p.shape;
  const A n = static_cast<A>(set_elements(s));
  const int64_t of_plane = parts_of_plane(s), of_set = planes_of_set(s) * of_plane;
  int64_t set = blockIdx.x;
  for (int turn = 0; set < set_count(s); set += gridDim.x, turn ^= 1) {
    const SetEntries entries =
        kPixels ? entries_of_pixels(s, set) : SetEntries{of_set, set * of_set, 0, 1};
    TileSum<Pair<A>> sum;
    for (int64_t i = threadIdx.x; i < entries.count; i += blockDim.x) {
      ChannelSums<A> e;
      if constexpr (kPixels) {
        e = sums_of_entry<A>(p, entries, i);
      } else {
        e = {plane_of_set(s, set, i / of_plane) % s.channels,
             sums_of_plane<A>(p, entries.first + i)};
      }
      const A w = p.weight == nullptr ? A(1) : static_cast<const A*>(p.weight)[e.channel];
      sum.add({e.sums.first * w, e.sums.second * w});
    }
    const Pair<A> total = row_sum(sum.total(), turn);
    if (threadIdx.x != 0) continue;
    static_cast<A*>(p.means)[2 * set] = total.first / n;
    static_cast<A*>(p.means)[2 * set + 1] = total.second / n;
  }
}

// A channel to a block.
template <class A, bool kPixels>
__global__ void __launch_bounds__(kSetThreads) channel_parameters(ChannelNormBackwardParams p) {
  const ChannelShape& s = p.shape;
  const int64_t of_plane = parts_of_plane(s);
  const int64_t count = kPixels ? element_parts(s) : s.batch * of_plane;
  int64_t channel = blockIdx.x;
  for (int turn = 0; channel < s.channels; channel += gridDim.x, turn ^= 1) {
    TileSum<Pair<A>> sum;
    for (int64_t i = threadIdx.x; i < count; i += blockDim.x) {
      if constexpr (kPixels) {
        sum.add(sums_of_entry<A>(p, {count, 0, channel, 1}, i).sums);
      } else {
        const int64_t sample = i / of_plane;
        const int64_t plane =
            s.over_batch ? channel * s.batch + sample : sample * s.channels + channel;
        sum.add(sums_of_plane<A>(p, plane * of_plane + i % of_plane));
      }
    }
    const Pair<A> total = row_sum(sum.total(), turn);
    if (threadIdx.x != 0) continue;
    if (p.dbias != nullptr) static_cast<A*>(p.dbias)[channel] = total.first;
    if (p.dweight != nullptr) static_cast<A*>(p.dweight)[channel] = total.second;
  }
}

template <class T, Access kAccess>
__global__ void __launch_bounds__(kMaxRowThreads)
    channel_input_gradient_of_planes(ChannelNormBackwardParams p) {
  using A = Accumulate<T>;
  constexpr int kWidth = kGroup<T, kAccess>;
  constexpr int kVectors = kPartShare / kWidth;
  const bool activates = p.activation.kind != Activation::kIdentity;
  const int64_t parts = element_parts(p.shape);
  const int64_t step = int64_t{gridDim.x} * blockDim.y;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.y + threadIdx.y; i < parts; i += step) {
    const ChannelPart part = plane_part(p.shape, i);
    const PartShare<T, kAccess> share(static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x),
                                      part.size);
    const int64_t set = set_of(p.shape, part.sample, part.channel);
    const A w = of_channel(p.weight, part.channel, A(1)),
            b = of_channel(p.bias, part.channel, A(0));
    const A mean = static_cast<const A*>(p.mean)[set], rstd = static_cast<const A*>(p.rstd)[set];
    const bool given = p.means == nullptr, reads_x = !given || activates;
    const A mean_g = given ? A(0) : static_cast<const A*>(p.means)[2 * set];
    const A mean_gx = given ? A(0) : static_cast<const A*>(p.means)[2 * set + 1];
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      A x[kWidth], g[kWidth];
      load<Load::kPlain>(static_cast<const T*>(p.dy) + part.begin, share, k, g);
      if (reads_x) load<Load::kPlain>(static_cast<const T*>(p.x) + part.begin, share, k, x);
      go_through<T>(
          p.activation,
          [&](int j) { return Centred::affine(Centred::normalize(x[j], mean, rstd), w, b); }, g);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        g[j] = given ? g[j] * w * rstd
                     : Centred::input_grad(g[j] * w, Centred::normalize(x[j], mean, rstd), mean_g,
                                           mean_gx, rstd);
      }
      store(g, static_cast<T*>(p.dx) + part.begin, share, k);
    }
  }
}

template <class T, Access kAccess>
__global__ void __launch_bounds__(kPartBlockThreads)
    channel_input_gradient_of_pixels(ChannelNormBackwardParams p) {
  using A = Accumulate<T>;
  constexpr int kWidth = kGroup<T, kAccess>;
  const int64_t channels = p.shape.channels;
  const bool given = p.means == nullptr;
  const bool reads_x = !given || p.activation.kind != Activation::kIdentity;
  for_pixel_tiles<T, kAccess>(p.shape, [&](int64_t i, int64_t tile, const auto& share) {
    const ChannelPart part = pixels_part(p.shape, i);
    A mean[kWidth], rstd[kWidth], mean_g[kWidth] = {}, mean_gx[kWidth] = {}, w[kWidth], b[kWidth];
    load_of_sets(p.shape, part.sample, p.mean, 1, tile, share, mean);
    load_of_sets(p.shape, part.sample, p.rstd, 1, tile, share, rstd);
    load_of_channels(p.weight, tile, share, A(1), w);
    load_of_channels(p.bias, tile, share, A(0), b);
    if (!given) {
      load_of_sets(p.shape, part.sample, p.means, 2, tile, share, mean_g);
      load_of_sets(p.shape, part.sample, static_cast<const A*>(p.means) + 1, 2, tile, share,
                   mean_gx);
    }
    for (int64_t row = 0; row < part.size; ++row) {
      const int64_t at = part.begin + row * channels + tile;
      A x[kWidth], g[kWidth];
      load<Load::kPlain>(static_cast<const T*>(p.dy) + at, share, 0, g);
      if (reads_x) load<Load::kPlain>(static_cast<const T*>(p.x) + at, share, 0, x);
      go_through<T>(
          p.activation,
          [&](int j) {
            return Centred::affine(Centred::normalize(x[j], mean[j], rstd[j]), w[j], b[j]);
          },
          g);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        g[j] = given ? g[j] * w[j] * rstd[j]
                     : Centred::input_grad(g[j] * w[j], Centred::normalize(x[j], mean[j], rstd[j]),
                                           mean_g[j], mean_gx[j], rstd[j]);
      }
      store(g, static_cast<T*>(p.dx) + at, share, 0);
    }
  });
}

// The means and the gradients of weight and bias, from the sums of parts.
template <class A, bool kPixels>
cudaError_t from_sums(const ChannelNormBackwardParams& p, const DeviceLimits& limits,
                      cudaStream_t stream) {
  const ChannelShape& s = p.shape;
  const int64_t of_plane = parts_of_plane(s);
  if (p.means != nullptr) {
    const int64_t entries = kPixels ? entries_of_pixels(s, 0).count : planes_of_set(s) * of_plane;
    const cudaError_t error =
        launch_sets<A>(channel_means<A, kPixels>, set_count(s), entries, limits, stream, p);
    if (error != cudaSuccess) return error;
  }
  if (p.dweight == nullptr && p.dbias == nullptr) return cudaSuccess;
  const int64_t entries = kPixels ? element_parts(s) : s.batch * of_plane;
  return launch_sets<A>(channel_parameters<A, kPixels>, s.channels, entries, limits, stream, p);
}

template <class T>
cudaError_t backward_of_pixels(const ChannelNormBackwardParams& p, const DeviceLimits& limits,
                               cudaStream_t stream) {
  return with_part_access<T>(p.shape.channels, {p.x, p.dy, p.dx}, [&](auto a) {
    constexpr Access kAccess = decltype(a)::value;
    if (p.parts != nullptr) {
      cudaError_t error =
          launch_pixels<T, kAccess>(channel_sums_of_pixels<T, kAccess>, limits, stream, p);
      if (error == cudaSuccess) error = from_sums<Accumulate<T>, true>(p, limits, stream);
      if (error != cudaSuccess) return error;
    }
    if (p.dx == nullptr) return cudaSuccess;
    return launch_pixels<T, kAccess>(channel_input_gradient_of_pixels<T, kAccess>, limits, stream,
                                     p);
  });
}

template <class T>
cudaError_t backward_of_planes(const ChannelNormBackwardParams& p, const DeviceLimits& limits,
                               cudaStream_t stream) {
  using A = Accumulate<T>;
  const ChannelShape& s = p.shape;
  return with_part_access<T>(s.size, {p.x, p.dy, p.dx}, [&](auto a) {
    constexpr Access kAccess = decltype(a)::value;
    if (p.parts != nullptr) {
      cudaError_t error = launch_parts<A>(channel_sums_of_planes<T, kAccess>, element_parts(s),
                                          s.size, limits, stream, p);
      if (error == cudaSuccess) error = from_sums<A, false>(p, limits, stream);
      if (error != cudaSuccess) return error;
    }
    if (p.dx == nullptr) return cudaSuccess;
    return launch_parts<A>(channel_input_gradient_of_planes<T, kAccess>, element_parts(s), s.size,
                           limits, stream, p);
  });
}

}  // namespace

cudaError_t channel_norm_backward(const ChannelNormBackwardParams& p, cudaStream_t stream) {
  if (p.shape.batch * p.shape.channels * p.shape.size == 0) return cudaSuccess;
  DeviceLimits limits;
  const cudaError_t error = current_device_limits(&limits);
  if (error != cudaSuccess) return error;
  return dispatch(p.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    return p.shape.pixels ? backward_of_pixels<T>(p, limits, stream)
                          : backward_of_planes<T>(p, limits, stream);
  });
}

}  // namespace memopt::kernels::cuda
