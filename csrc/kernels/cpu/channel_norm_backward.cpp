// Backward of the norms over channels: sums of parts, means of sets, gradients of weight and bias,
// and of x. Formulas and parts: kernels/channel_norm.h.
#include "channel_norm.h"
#include "kernels.h"
#include "prefetch.h"
#include "table.h"

namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE {
namespace {

template <class T>
const T* elements(const void* tensor, int64_t begin) {
  return static_cast<const T*>(tensor) + begin;
}

// Of dy and of dy (x - mean), over neighbours in one plane. Past a tail's end dy is 0.
template <class T, class V>
MEMOPT_INLINE TwoSums<Accumulate<T>> sums_of_block(const T* x, const T* dy, int64_t begin,
                                                   int64_t end, V mean) {
  using E = UnorderedElements<T>;
  using M = Math<V>;
  Step<V> s{V(0), V(0)}, q{V(0), V(0)};
  for_steps<T>(begin, end, [&](int64_t j, auto extent) __attribute__((always_inline)) {
    const Step<V> v = load<E, T>(x + j, extent), g = load<E, T>(dy + j, extent);
    s = {s.lo + g.lo, s.hi + g.hi};
    q = {M::fma(g.lo, v.lo - mean, q.lo), M::fma(g.hi, v.hi - mean, q.hi)};
  });
  return sum_lanes(s.lo + s.hi, q.lo + q.hi);
}

template <class T>
void sums_of_planes(const ChannelNormBackwardParams p, int64_t begin, int64_t end) {
  using A = Accumulate<T>;
  using V = typename Elements<T>::V;
  A* const parts = static_cast<A*>(p.parts);
  for_plane_parts(p.shape, begin, end, [&](const PlanePart& part) __attribute__((always_inline)) {
    const V mean(static_cast<const A*>(p.mean)[part.set]);
    const T* const x = elements<T>(p.x, part.begin);
    const T* const dy = elements<T>(p.dy, part.begin);
    const TwoSums<A> total = sum_blocks<T>(
        part.size, [&](int64_t from, int64_t to) { return sums_of_block(x, dy, from, to, mean); });
    A* const to = parts + part.row * 2 * p.shape.channels + part.channel;
    to[0] = total.first;
    to[p.shape.channels] = total.second * static_cast<const A*>(p.rstd)[part.set];
  });
}

// Numbers of each set for each channel of the sample that is under way.
template <class A>
class OfSample {
 public:
  OfSample(const ChannelShape& shape, int64_t count)
      : shape_(shape), arrays_(count, shape.channels) {}

  // fill(sample) where the numbers are those of another sample.
  template <class Fill>
  void start(int64_t sample, Fill fill) {
    if (sample != sample_ && (sample_ < 0 || !shape_.over_batch)) fill(arrays_);
    sample_ = sample;
  }
  A* operator[](int64_t i) const { return arrays_[i]; }

 private:
  const ChannelShape& shape_;
  ChannelArrays<A> arrays_;
  int64_t sample_ = -1;
};

template <class T>
void sums_of_pixels(const ChannelNormBackwardParams& p, int64_t begin, int64_t end) {
  using A = Accumulate<T>;
  using V = typename Elements<T>::V;
  using M = Math<V>;
  const ChannelShape& s = p.shape;
  const int64_t channels = s.channels;
  OfSample<A> statistics(s, 2);
  const ChannelArrays<A> further(2, channels);
  for (int64_t i = begin; i < end; ++i) {
    const ChannelPart part = pixels_part(s, i);
    statistics.start(part.sample, [&](const ChannelArrays<A>& to) {
      spread(s, part.sample, static_cast<const A*>(p.mean), 1, to[0]);
      spread(s, part.sample, static_cast<const A*>(p.rstd), 1, to[1]);
    });
    const A *const means = statistics[0], *const rstds = statistics[1];
    A* const sums = static_cast<A*>(p.parts) + i * 2 * channels;
    A* const products = sums + channels;
    sum_pixels(part.size, channels, sums, products, further,
               [&](int64_t pixel, bool is_first, A* to, A* to_products) {
                 const T* const x = elements<T>(p.x, part.begin + pixel * channels);
                 const T* const dy = elements<T>(p.dy, part.begin + pixel * channels);
                 for_steps<T>(0, channels,
                              [&](int64_t j, auto extent) __attribute__((always_inline)) {
                                prefetch_loads<Elements<T>>(x + j);
                                prefetch_loads<Elements<T>>(dy + j);
                                const Step<V> v = load(x + j, extent), g = load(dy + j, extent);
                                const Step<V> mean = load(means + j, extent);
                                Step<V> sum{V(0), V(0)}, product{V(0), V(0)};
                                if (!is_first) {
                                  sum = load(to + j, extent);
                                  product = load(to_products + j, extent);
                                }
                                store(to + j, Step<V>{sum.lo + g.lo, sum.hi + g.hi}, extent);
                                store(to_products + j,
                                      Step<V>{M::fma(g.lo, v.lo - mean.lo, product.lo),
                                              M::fma(g.hi, v.hi - mean.hi, product.hi)},
                                      extent);
                              });
               });
    for (int64_t c = 0; c < channels; ++c) products[c] *= rstds[c];
  }
}

// The sums of dy and of dy xhat of the channels [begin, end), over the rows [first, last) of parts.
template <class A>
void sums_of_channels(const A* parts, int64_t channels, int64_t first, int64_t last, int64_t begin,
                      int64_t end, A* sums, A* products) {
  sum_parts<2>(
      parts, channels, first, last, begin, end,
      [](const auto& of_part, int64_t, auto, int64_t)
          __attribute__((always_inline)) { return of_part; },
      [&](int64_t i, auto extent, auto sum, auto product) __attribute__((always_inline)) {
        if (sums != nullptr) store(sums + i - begin, sum, extent);
        if (products != nullptr) store(products + i - begin, product, extent);
      });
}

// weights: null for 1.
template <class A>
A weighted_sum(const A* numbers, const A* weights, int64_t n) {
  using V = typename Elements<A>::V;
  return sum_blocks<A>(n, [&](int64_t begin, int64_t end) {
    Step<V> sum{V(0), V(0)};
    for_steps<A>(begin, end, [&](int64_t i, auto extent) __attribute__((always_inline)) {
      const Step<V> v = load(numbers + i, extent);
      const Step<V> w = load_parameter<V>(weights, i, extent, 1.0f);
      sum = {Math<V>::fma(v.lo, w.lo, sum.lo), Math<V>::fma(v.hi, w.hi, sum.hi)};
    });
    return sum_lanes(sum.lo + sum.hi);
  });
}

// How many rows of parts a sample has.
int64_t rows_of_sample(const ChannelShape& s) {
  return s.pixels ? parts_of_sample(s) : parts_of_plane(s);
}

template <class A>
void means_of_sets(const ChannelNormBackwardParams& p, int64_t begin, int64_t end) {
  const ChannelShape& s = p.shape;
  const int64_t each = group_channels(s), rows = rows_of_sample(s);
  const auto* const weights = static_cast<const A*>(p.weight);
  const auto n = static_cast<A>(set_elements(s));
  const ChannelArrays<A> arrays(2, std::min(end - begin, s.groups) * each);
  for (int64_t set = begin; set < end;) {
    const int64_t sample = s.over_batch ? 0 : set / s.groups;
    const int64_t first_group = set - sample * s.groups;
    const int64_t groups = std::min(end - set, s.groups - first_group);
    sums_of_channels<A>(static_cast<const A*>(p.parts), s.channels, sample * rows,
                        (s.over_batch ? s.batch : sample + 1) * rows, first_group * each,
                        (first_group + groups) * each, arrays[0], arrays[1]);
    for (int64_t i = 0; i < groups; ++i, ++set) {
      const A* const w = weights == nullptr ? nullptr : weights + (first_group + i) * each;
      A* const means = static_cast<A*>(p.means) + 2 * set;
      means[0] = weighted_sum(arrays[0] + i * each, w, each) / n;
      means[1] = weighted_sum(arrays[1] + i * each, w, each) / n;
    }
  }
}

template <class T>
void input_gradient_of_planes(const ChannelNormBackwardParams p, int64_t begin, int64_t end) {
  using A = Accumulate<T>;
  using E = UnorderedElements<T>;
  using V = typename E::V;
  for_plane_parts(p.shape, begin, end, [&](const PlanePart& part) __attribute__((always_inline)) {
    const A weight = p.weight == nullptr ? A(1) : static_cast<const A*>(p.weight)[part.channel];
    const A rstd = static_cast<const A*>(p.rstd)[part.set];
    const V scale(plane_constant<T>(rstd * weight));
    const T* const dy = elements<T>(p.dy, part.begin);
    T* const dx = static_cast<T*>(p.dx) + part.begin;
    const bool streamed = p.stream_stores && is_aligned(dx);
    if (p.means == nullptr) {
      for_steps<T>(0, part.size, [=](int64_t j, auto extent) __attribute__((always_inline)) {
        const Step<V> g = load<E, T>(dy + j, extent);
        store<E, T, V>(dx + j, Step<V>{g.lo * scale, g.hi * scale}, extent, streamed);
      });
      return;
    }
    const A* const means = static_cast<const A*>(p.means) + 2 * part.set;
    const V mean(plane_constant<T>(static_cast<const A*>(p.mean)[part.set])),
        mean_g(plane_constant<T>(rstd * means[0]));
    const V slope(plane_constant<T>(-rstd * rstd * means[1]));
    const T* const x = elements<T>(p.x, part.begin);
    for_steps<T>(0, part.size, [=](int64_t j, auto extent) __attribute__((always_inline)) {
      if (!streamed) prefetch_stores<E>(dx + j);
      const Step<V> v = load<E, T>(x + j, extent), g = load<E, T>(dy + j, extent);
      const Step<V> d{channel_input_grad(g.lo, v.lo, mean, scale, mean_g, slope),
                      channel_input_grad(g.hi, v.hi, mean, scale, mean_g, slope)};
      store<E, T, V>(dx + j, d, extent, streamed);
    });
  });
  if (p.stream_stores) stream_fence();
}

template <class T>
void input_gradient_of_pixels(const ChannelNormBackwardParams& p, int64_t begin, int64_t end) {
  using A = Accumulate<T>;
  using V = typename Elements<T>::V;
  const ChannelShape& s = p.shape;
  const int64_t channels = s.channels;
  const auto* const weights = static_cast<const A*>(p.weight);
  const bool streamed =
      p.stream_stores && is_aligned(p.dx) && channels * static_cast<int64_t>(sizeof(T)) % 64 == 0;
  const bool given = p.means == nullptr;
  OfSample<A> of_sets(s, 4);
  for (int64_t i = begin; i < end; ++i) {
    const ChannelPart part = pixels_part(s, i);
    of_sets.start(part.sample, [&](const ChannelArrays<A>& to) {
      spread(s, part.sample, static_cast<const A*>(p.rstd), 1, to[0]);
      if (!given) {
        spread(s, part.sample, static_cast<const A*>(p.mean), 1, to[1]);
        spread(s, part.sample, static_cast<const A*>(p.means), 2, to[2]);
        spread(s, part.sample, static_cast<const A*>(p.means) + 1, 2, to[3]);
        for (int64_t c = 0; c < channels; ++c) {
          to[2][c] *= to[0][c];
          to[3][c] *= -to[0][c] * to[0][c];
        }
      }
      for (int64_t c = 0; weights != nullptr && c < channels; ++c) to[0][c] *= weights[c];
    });
    const A *const scales = of_sets[0], *const means = of_sets[1];
    const A *const means_g = of_sets[2], *const slopes = of_sets[3];
    for (int64_t pixel = 0; pixel < part.size; ++pixel) {
      const T* const x = elements<T>(p.x, part.begin + pixel * channels);
      const T* const dy = elements<T>(p.dy, part.begin + pixel * channels);
      T* const dx = static_cast<T*>(p.dx) + part.begin + pixel * channels;
      for_steps<T>(0, channels, [=](int64_t j, auto extent) __attribute__((always_inline)) {
        if (!streamed) prefetch_stores<Elements<T>>(dx + j);
        const Step<V> scale = load(scales + j, extent);
        Step<V> g = load(dy + j, extent);
        if (given) {
          g = {g.lo * scale.lo, g.hi * scale.hi};
        } else {
          const Step<V> v = load(x + j, extent), mean = load(means + j, extent);
          const Step<V> mean_g = load(means_g + j, extent), slope = load(slopes + j, extent);
          g = {channel_input_grad(g.lo, v.lo, mean.lo, scale.lo, mean_g.lo, slope.lo),
               channel_input_grad(g.hi, v.hi, mean.hi, scale.hi, mean_g.hi, slope.hi)};
        }
        store(dx + j, g, extent, streamed);
      });
    }
  }
  if (streamed) stream_fence();
}

}  // namespace

void channel_sums(const ChannelNormBackwardParams& p, int64_t begin, int64_t end) {
  with_type(p.dtype, [&](auto t) {
    if (p.shape.pixels) {
      sums_of_pixels<decltype(t)>(p, begin, end);
    } else {
      sums_of_planes<decltype(t)>(p, begin, end);
    }
  });
}

void channel_means(const ChannelNormBackwardParams& p, int64_t begin, int64_t end) {
  with_type(p.dtype, [&](auto t) { means_of_sets<Accumulate<decltype(t)>>(p, begin, end); });
}

void channel_parameters(const ChannelNormBackwardParams& p, int64_t begin, int64_t end) {
  with_type(p.dtype, [&](auto t) {
    using A = Accumulate<decltype(t)>;
    auto* const dbias = static_cast<A*>(p.dbias);
    auto* const dweight = static_cast<A*>(p.dweight);
    sums_of_channels<A>(static_cast<const A*>(p.parts), p.shape.channels, 0,
                        p.shape.batch * rows_of_sample(p.shape), begin, end,
                        dbias == nullptr ? nullptr : dbias + begin,
                        dweight == nullptr ? nullptr : dweight + begin);
  });
}

void channel_input_gradient(const ChannelNormBackwardParams& p, int64_t begin, int64_t end) {
  with_type(p.dtype, [&](auto t) {
    if (p.shape.pixels) {
      input_gradient_of_pixels<decltype(t)>(p, begin, end);
    } else {
      input_gradient_of_planes<decltype(t)>(p, begin, end);
    }
  });
}

}  // namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE
