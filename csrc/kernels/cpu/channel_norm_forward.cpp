// Forward of the norms over channels: moments of parts, of sets, and the output. Formulas and
// parts: kernels/channel_norm.h.
#include <array>

#include "channel_norm.h"
#include "kernels.h"
#include "prefetch.h"
#include "row_sums.h"
#include "table.h"

namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE {
namespace {

template <class T>
void moments_of_runs(const ChannelNormForwardParams& p, int64_t begin, int64_t end) {
  using A = Accumulate<T>;
  for (int64_t i = begin; i < end; ++i) {
    const ChannelPart part = run_part(p.shape, i);
    const auto n = static_cast<A>(part.size);
    PlainRow<T> row{static_cast<const T*>(p.x) + part.begin};
    const A mean = sum_first_sweep<T>(row, part.size, AddStep()) / n;
    const auto [d, d2] = centred_sums(row.x, mean, part.size);
    static_cast<PartMoments<A>*>(p.parts)[i] = part_moments(mean, d, d2, n);
  }
}

// Of one part of pixels: of each channel.
template <class T>
void moments_of_pixels(const T* x, int64_t pixels, int64_t channels, Accumulate<T>* mean,
                       Accumulate<T>* shift, Accumulate<T>* m2,
                       const ChannelArrays<Accumulate<T>>& further) {
  using A = Accumulate<T>;
  using V = typename Elements<T>::V;
  using M = Math<V>;
  const V n(static_cast<A>(pixels));
  for (int64_t pixel = 0; pixel < pixels; ++pixel) {
    const T* const from = x + pixel * channels;
    for_steps<T>(0, channels, [&](int64_t i, auto extent) __attribute__((always_inline)) {
      Step<V> sum{V(0), V(0)};
      if (pixel > 0) sum = load(mean + i, extent);
      const Step<V> v = load(from + i, extent);
      store(mean + i, Step<V>{sum.lo + v.lo, sum.hi + v.hi}, extent);
    });
  }
  for_steps<T>(0, channels, [&](int64_t i, auto extent) __attribute__((always_inline)) {
    const Step<V> sum = load(mean + i, extent);
    store(mean + i, Step<V>{sum.lo / n, sum.hi / n}, extent);
  });
  sum_pixels(
      pixels, channels, shift, m2, further,
      [&](int64_t pixel, bool is_first, A* to, A* to_squares) {
        const T* const from = x + pixel * channels;
        for_steps<T>(0, channels, [&](int64_t i, auto extent) __attribute__((always_inline)) {
          const Step<V> m = load(mean + i, extent), v = load(from + i, extent);
          Step<V> sum{V(0), V(0)}, squares{V(0), V(0)};
          if (!is_first) {
            sum = load(to + i, extent);
            squares = load(to_squares + i, extent);
          }
          const Step<V> e{v.lo - m.lo, v.hi - m.hi};
          store(to + i, Step<V>{sum.lo + e.lo, sum.hi + e.hi}, extent);
          store(to_squares + i,
                Step<V>{M::fma(e.lo, e.lo, squares.lo), M::fma(e.hi, e.hi, squares.hi)}, extent);
        });
      });
  for (int64_t i = 0; i < channels; ++i) {
    const auto m = part_moments(mean[i], shift[i], m2[i], static_cast<A>(pixels));
    shift[i] = m.shift;
    m2[i] = m.m2;
  }
}

// The moments of what several parts hold. each(f) calls f(elements, moments) for every part, in the
// same order each time.
template <class A>
struct Together {
  A mean;
  A d;
  A d2;
};
template <class A, class Each>
Together<A> together(int64_t elements, Each each) {
  Cascade<A> sum, d_sum, d2_sum;
  each([&](int64_t n, PartMoments<A> part) { sum.add(static_cast<A>(n) * part.mean); });
  const A mean = sum.total() / static_cast<A>(elements);
  each([&](int64_t n, PartMoments<A> part) {
    const A d = (part.mean - mean) + part.shift;
    d_sum.add(static_cast<A>(n) * d);
    d2_sum.add(Math<A>::fma(static_cast<A>(n) * d, d, part.m2));
  });
  return {mean, d_sum.total(), d2_sum.total()};
}

template <class A>
void write_statistics(const ChannelNormForwardParams& p, int64_t set, const Together<A>& t) {
  const int64_t elements = set_elements(p.shape);
  const auto n = static_cast<A>(elements);
  const Moments<A> m = moments(t.mean, t.d, t.d2, elements, p.eps);
  static_cast<A*>(p.mean)[set] = m.mean;
  if (p.rstd != nullptr) static_cast<A*>(p.rstd)[set] = m.rstd;
  if (p.shift != nullptr) static_cast<A*>(p.shift)[set] = (t.mean - m.mean) + t.d / n;
  if (p.variance != nullptr)
    static_cast<A*>(p.variance)[set] = variance(t.d / n, t.d2, n) * static_cast<A>(p.unbias);
}

template <class A>
void statistics_of_runs(const ChannelNormForwardParams& p, int64_t begin, int64_t end) {
  const ChannelShape& s = p.shape;
  const int64_t parts = parts_of_run(s), of_set = runs_of_set(s) * parts;
  const int64_t last = run_elements(s) - (parts - 1) * kPartElements;
  for (int64_t set = begin; set < end; ++set) {
    const auto* const of_parts = static_cast<const PartMoments<A>*>(p.parts) + set * of_set;
    write_statistics<A>(p, set, together<A>(set_elements(s), [&](auto f) {
                          for (int64_t i = 0; i < of_set; ++i) {
                            f((i + 1) % parts == 0 ? last : kPartElements, of_parts[i]);
                          }
                        }));
  }
}

// The channels [begin, end) of parts of pixels: the moments of all their pixels.
template <class A>
void moments_of_channels(const ChannelNormForwardParams& p, int64_t first, int64_t last,
                         int64_t pixels, int64_t begin, int64_t end, const ChannelArrays<A>& to) {
  using V = typename Elements<A>::V;
  using M = Math<V>;
  const ChannelShape& s = p.shape;
  const auto* const parts = static_cast<const A*>(p.parts);
  const int64_t of_sample = parts_of_sample(s);
  const int64_t most = part_pixels(s);
  const A left = static_cast<A>(s.size - (of_sample - 1) * most), whole = static_cast<A>(most);
  const auto count = [&](int64_t part) { return V((part + 1) % of_sample == 0 ? left : whole); };
  A *const means = to[0], *const shifts = to[1], *const squares = to[2];
  const V n(static_cast<A>(pixels));
  sum_parts<3>(
      parts, s.channels, first, last, begin, end,
      [&](const auto& of_part, int64_t, auto, int64_t part) __attribute__((always_inline)) {
        const V weight = count(part);
        const auto [mean, shift, m2] = of_part;
        return std::array{Step<V>{mean.lo * weight, mean.hi * weight}, Step<V>{V(0), V(0)}};
      },
      [&](int64_t i, auto extent, auto sum, auto) __attribute__((always_inline)) {
        store(means + i - begin, Step<V>{sum.lo / n, sum.hi / n}, extent);
      });
  sum_parts<3>(
      parts, s.channels, first, last, begin, end,
      [&](const auto& of_part, int64_t i, auto extent, int64_t part)
          __attribute__((always_inline)) {
            const V weight = count(part);
            const auto [mean, shift, m2] = of_part;
            const Step<V> middle = load(means + i - begin, extent);
            const Step<V> d{(mean.lo - middle.lo) + shift.lo, (mean.hi - middle.hi) + shift.hi};
            const Step<V> weighted{d.lo * weight, d.hi * weight};
            return std::array{weighted, Step<V>{M::fma(weighted.lo, d.lo, m2.lo),
                                                M::fma(weighted.hi, d.hi, m2.hi)}};
          },
      [&](int64_t i, auto extent, auto sum, auto sum_d2) __attribute__((always_inline)) {
        store(shifts + i - begin, sum, extent);
        store(squares + i - begin, sum_d2, extent);
      });
  for (int64_t i = 0; i < end - begin; ++i) {
    const auto m = part_moments(means[i], shifts[i], squares[i], static_cast<A>(pixels));
    shifts[i] = m.shift;
    squares[i] = m.m2;
  }
}

// together() of channels with as many pixels each.
template <class A>
Together<A> channels_together(const A* means, const A* shifts, const A* squares, int64_t channels,
                              A pixels) {
  using V = typename Elements<A>::V;
  const PlainRow<A> row{means};
  const A mean = sum_first_sweep<A>(row, channels, AddStep()) / static_cast<A>(channels);
  const V middle(mean), n(pixels);
  const auto [d, d2] = sum_blocks<A>(channels, [&](int64_t begin, int64_t end) {
    Step<V> sum{V(0), V(0)}, sum_d2{V(0), V(0)};
    for_steps<A>(begin, end, [&](int64_t i, auto extent) __attribute__((always_inline)) {
      const Step<V> m = load(means + i, extent), shift = load(shifts + i, extent);
      const Step<V> m2 = load(squares + i, extent);
      const Step<V> d =
          keep_valid(Step<V>{(m.lo - middle) + shift.lo, (m.hi - middle) + shift.hi}, extent);
      const Step<V> weighted{d.lo * n, d.hi * n};
      sum = {sum.lo + weighted.lo, sum.hi + weighted.hi};
      sum_d2 = {sum_d2.lo + Math<V>::fma(weighted.lo, d.lo, m2.lo),
                sum_d2.hi + Math<V>::fma(weighted.hi, d.hi, m2.hi)};
    });
    return sum_lanes(sum.lo + sum.hi, sum_d2.lo + sum_d2.hi);
  });
  return {mean, d, d2};
}

template <class A>
void statistics_of_pixels(const ChannelNormForwardParams& p, int64_t begin, int64_t end) {
  const ChannelShape& s = p.shape;
  const int64_t each = group_channels(s), of_sample = parts_of_sample(s);
  const int64_t pixels = s.over_batch ? s.batch * s.size : s.size;
  for (int64_t set = begin; set < end;) {
    const int64_t sample = s.over_batch ? 0 : set / s.groups;
    const int64_t first_group = set - sample * s.groups;
    const int64_t groups = std::min(end - set, s.groups - first_group);
    const ChannelArrays<A> arrays(3, groups * each);
    moments_of_channels<A>(p, s.over_batch ? 0 : sample * of_sample,
                           s.over_batch ? s.batch * of_sample : (sample + 1) * of_sample, pixels,
                           first_group * each, (first_group + groups) * each, arrays);
    for (int64_t i = 0; i < groups; ++i, ++set) {
      write_statistics<A>(p, set,
                          channels_together(arrays[0] + i * each, arrays[1] + i * each,
                                            arrays[2] + i * each, each, static_cast<A>(pixels)));
    }
  }
}

template <class T>
void output_of_planes(const ChannelNormForwardParams p, int64_t begin, int64_t end) {
  using A = Accumulate<T>;
  using E = UnorderedElements<T>;
  using V = typename E::V;
  const auto of_channel = [](const void* parameter, int64_t channel, A otherwise) {
    return parameter == nullptr ? otherwise : static_cast<const A*>(parameter)[channel];
  };
  for_plane_parts(p.shape, begin, end, [&](const PlanePart& part) __attribute__((always_inline)) {
    const A rstd = static_cast<const A*>(p.rstd)[part.set];
    const V mean(plane_constant<T>(static_cast<const A*>(p.mean)[part.set]));
    const V scale(plane_constant<T>(rstd * of_channel(p.weight, part.channel, 1)));
    const V bias(plane_constant<T>(of_channel(p.bias, part.channel, 0)));
    const T* const x = static_cast<const T*>(p.x) + part.begin;
    T* const y = static_cast<T*>(p.y) + part.begin;
    const bool streamed = p.stream_stores && is_aligned(y);
    for_steps<T>(0, part.size, [=](int64_t j, auto extent) __attribute__((always_inline)) {
      if (!streamed) prefetch_stores<E>(y + j);
      const Step<V> v = load<E, T>(x + j, extent);
      const Step<V> z{channel_affine(v.lo, mean, scale, bias),
                      channel_affine(v.hi, mean, scale, bias)};
      store<E, T, V>(y + j, z, extent, streamed);
    });
  });
  if (p.stream_stores) stream_fence();
}

template <class T>
void output_of_pixels(const ChannelNormForwardParams& p, int64_t begin, int64_t end) {
  using A = Accumulate<T>;
  using V = typename Elements<T>::V;
  const ChannelShape& s = p.shape;
  const int64_t channels = s.channels;
  const ChannelArrays<A> arrays(2, channels);
  A *const means = arrays[0], *const scales = arrays[1];
  const auto* const weights = static_cast<const A*>(p.weight);
  const auto* const biases = static_cast<const A*>(p.bias);
  const bool streamed =
      p.stream_stores && is_aligned(p.y) && channels * static_cast<int64_t>(sizeof(T)) % 64 == 0;
  int64_t sample = -1;
  for (int64_t i = begin; i < end; ++i) {
    const ChannelPart part = pixels_part(s, i);
    if (part.sample != sample && (sample < 0 || !s.over_batch)) {
      spread(s, part.sample, static_cast<const A*>(p.mean), 1, means);
      spread(s, part.sample, static_cast<const A*>(p.rstd), 1, scales);
      for (int64_t c = 0; weights != nullptr && c < channels; ++c) scales[c] *= weights[c];
    }
    sample = part.sample;
    for (int64_t pixel = 0; pixel < part.size; ++pixel) {
      const T* const x = static_cast<const T*>(p.x) + part.begin + pixel * channels;
      T* const y = static_cast<T*>(p.y) + part.begin + pixel * channels;
      for_steps<T>(0, channels, [=](int64_t j, auto extent) __attribute__((always_inline)) {
        if (!streamed) prefetch_stores<Elements<T>>(y + j);
        const Step<V> v = load(x + j, extent);
        const Step<V> mean = load(means + j, extent), scale = load(scales + j, extent);
        const Step<V> bias = load_parameter<V>(biases, j, extent, 0.0f);
        const Step<V> z{channel_affine(v.lo, mean.lo, scale.lo, bias.lo),
                        channel_affine(v.hi, mean.hi, scale.hi, bias.hi)};
        store(y + j, z, extent, streamed);
      });
    }
  }
  if (streamed) stream_fence();
}

}  // namespace

void channel_moments(const ChannelNormForwardParams& p, int64_t begin, int64_t end) {
  with_type(p.dtype, [&](auto t) {
    using T = decltype(t);
    using A = Accumulate<T>;
    if (!p.shape.pixels) return moments_of_runs<T>(p, begin, end);
    const int64_t channels = p.shape.channels;
    const ChannelArrays<A> further(2, channels);
    for (int64_t i = begin; i < end; ++i) {
      const ChannelPart part = pixels_part(p.shape, i);
      A* const mean = static_cast<A*>(p.parts) + i * 3 * channels;
      moments_of_pixels<T>(static_cast<const T*>(p.x) + part.begin, part.size, channels, mean,
                           mean + channels, mean + 2 * channels, further);
    }
  });
}

void channel_statistics(const ChannelNormForwardParams& p, int64_t begin, int64_t end) {
  with_type(p.dtype, [&](auto t) {
    using A = Accumulate<decltype(t)>;
    if (p.shape.pixels) {
      statistics_of_pixels<A>(p, begin, end);
    } else {
      statistics_of_runs<A>(p, begin, end);
    }
  });
}

void channel_output(const ChannelNormForwardParams& p, int64_t begin, int64_t end) {
  with_type(p.dtype, [&](auto t) {
    if (p.shape.pixels) {
      output_of_pixels<decltype(t)>(p, begin, end);
    } else {
      output_of_planes<decltype(t)>(p, begin, end);
    }
  });
}

}  // namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE
