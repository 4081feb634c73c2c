// Cross entropy over rows of logits, and its gradient. Formulas: kernels/cross_entropy.h.
//
// A row is read from memory once and then from the cache: for its maximum, for its sums, for its
// gradient.
#include "../cross_entropy.h"

#include <cmath>
#include <limits>

#include "cascade.h"
#include "kernels.h"
#include "table.h"

namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE {
namespace {

// NaN if either is.
template <class V>
MEMOPT_INLINE V larger(V a, V b) {
  return a > b || a != a ? a : b;
}
template <class V>
MEMOPT_INLINE Step<V> or_lowest(Step<V> s, Whole) {
  return s;
}
template <class V>
MEMOPT_INLINE Step<V> or_lowest(Step<V> s, Tail) {
  return {s.lo, s.lo};
}
MEMOPT_INLINE double largest_lane(double v) {
  return v;
}
#if defined(MEMOPT_NO_VECTORS)
MEMOPT_INLINE float largest_lane(float v) {
  return v;
}
#else
MEMOPT_INLINE FloatVec larger(FloatVec a, FloatVec b) {
  return at::vec::maximum(a, b);
}
// The lanes past a tail's end are those of no number.
MEMOPT_INLINE Step<FloatVec> or_lowest(Step<FloatVec> s, Tail tail) {
  const int64_t n = FloatVec::size();
  const FloatVec lowest(-std::numeric_limits<float>::infinity());
  return {FloatVec::set(lowest, s.lo, tail.count),
          FloatVec::set(lowest, s.hi, tail.count < n ? 0 : tail.count - n)};
}
MEMOPT_INLINE float largest_lane(FloatVec v) {
  return at::vec::vec_reduce_all<float>([](FloatVec a, FloatVec b) { return larger(a, b); }, v);
}
#endif

template <class T, class Logit>
__attribute__((noinline)) Accumulate<T> row_maximum(const Logit& logit, const T* x, int64_t cols) {
  using V = typename Elements<T>::V;
  using A = Accumulate<T>;
  Step<V> most{V(-std::numeric_limits<A>::infinity()), V(-std::numeric_limits<A>::infinity())};
  for_steps<T>(0, cols, [&](int64_t i, auto extent) __attribute__((always_inline)) {
    const Step<V> l = load(x + i, extent);
    const Step<V> z = or_lowest(Step<V>{logit.value(l.lo), logit.value(l.hi)}, extent);
    most = {larger(most.lo, z.lo), larger(most.hi, z.hi)};
  });
  return largest_lane(larger(most.lo, most.hi));
}

template <class A>
struct RowSums {
  A exponentials;  // of e^t
  A products;      // of e^t t, for the entropy
  A q;             // of q, where that is dense
  A q_distances;   // of q t
};

// q of a step where it is dense. One-hot parts are added by the callers.
template <class A>
struct DenseTarget {
  const A* probabilities;  // of the row; null: smoothing alone
  const A* weight;         // null: 1
  A keep;                  // what is left of the probabilities
  A uniform;

  template <class Extent>
  MEMOPT_INLINE auto at(int64_t i, Extent extent) const {
    using V = typename Elements<A>::V;
    Step<V> q{V(uniform), V(uniform)};
    if (probabilities != nullptr) {
      const Step<V> r = load(probabilities + i, extent);
      q = {Math<V>::fma(V(keep), r.lo, q.lo), Math<V>::fma(V(keep), r.hi, q.hi)};
    }
    if (weight != nullptr) {
      const Step<V> w = load(weight + i, extent);
      q = {w.lo * q.lo, w.hi * q.hi};
    }
    return q;
  }
};

template <bool kDense, class T, class Logit>
__attribute__((noinline)) RowSums<Accumulate<T>> row_sums(const Logit& logit, const T* x,
                                                          int64_t cols, Accumulate<T> maximum,
                                                          bool with_products,
                                                          DenseTarget<Accumulate<T>> target) {
  using V = typename Elements<T>::V;
  using A = Accumulate<T>;
  const V m(maximum);
  Cascade<A> exponentials, products, q_sum, q_distances;
  for_blocks<T>(cols, [&](int64_t begin, int64_t end) {
    Step<V> e_part{V(0), V(0)}, et_part{V(0), V(0)}, q_part{V(0), V(0)}, qt_part{V(0), V(0)};
    for_steps<T>(begin, end, [&](int64_t i, auto extent) __attribute__((always_inline)) {
      const Step<V> l = load(x + i, extent);
      const Step<V> t{logit.value(l.lo) - m, logit.value(l.hi) - m};
      const Step<V> d{limited(t.lo), limited(t.hi)};
      const Step<V> e = keep_valid(Step<V>{exp_of_limited(d.lo), exp_of_limited(d.hi)}, extent);
      e_part = {e_part.lo + e.lo, e_part.hi + e.hi};
      if constexpr (kDense) {
        const Step<V> q = keep_valid(target.at(i, extent), extent);
        const Step<V> qt = keep_valid(Step<V>{q.lo * t.lo, q.hi * t.hi}, extent);
        q_part = {q_part.lo + q.lo, q_part.hi + q.hi};
        qt_part = {qt_part.lo + qt.lo, qt_part.hi + qt.hi};
      } else if (with_products) {
        // (A logit of -infinity has no part in the entropy.)
        const Step<V> et = keep_valid(Step<V>{e.lo * d.lo, e.hi * d.hi}, extent);
        et_part = {et_part.lo + et.lo, et_part.hi + et.hi};
      }
    });
    exponentials.add(sum_lanes(e_part.lo + e_part.hi));
    if constexpr (kDense) {
      q_sum.add(sum_lanes(q_part.lo + q_part.hi));
      q_distances.add(sum_lanes(qt_part.lo + qt_part.hi));
    } else if (with_products) {
      products.add(sum_lanes(et_part.lo + et_part.hi));
    }
  });
  return {exponentials.total(), products.total(), q_sum.total(), q_distances.total()};
}

// dl over the row. `hot`: the class with a part of q of its own; it is written last, from its
// logit, which dx may have been written over.
template <bool kDense, class T, class Logit>
__attribute__((noinline)) void write_gradient(const Logit& logit, const T* x, T* dx, int64_t cols,
                                              Accumulate<T> maximum, Accumulate<T> log_sum,
                                              RowGrad<Accumulate<T>> grad,
                                              DenseTarget<Accumulate<T>> target, int64_t hot,
                                              Accumulate<T> hot_q) {
  using V = typename Elements<T>::V;
  const V m(maximum), log(log_sum);
  const auto of_z = [&](V l, V q) __attribute__((always_inline)) {
    const ValueGrad<V> z = logit.value_and_grad(l);
    return logit_gradient(grad, (z.value - m) - log, q) * z.grad;
  };
  const auto of_logits = [&](int64_t i, Step<V> l, V hot_part,
                             auto extent) __attribute__((always_inline)) {
    if constexpr (kDense) {
      const Step<V> q = target.at(i, extent);
      return Step<V>{of_z(l.lo, q.lo + hot_part), of_z(l.hi, q.hi + hot_part)};
    } else {
      return Step<V>{of_z(l.lo, hot_part), of_z(l.hi, hot_part)};
    }
  };
  const Step<V> hot_logit = hot < 0 ? Step<V>{V(0), V(0)} : load(x + hot, Tail{1});
  for_steps<T>(0, cols, [&](int64_t i, auto extent) __attribute__((always_inline)) {
    store(dx + i, of_logits(i, load(x + i, extent), V(0), extent), extent);
  });
  if (hot >= 0) store(dx + hot, of_logits(hot, hot_logit, V(hot_q), Tail{1}), Tail{1});
}

template <class A>
MEMOPT_INLINE A number(const void* array, int64_t i, A otherwise) {
  return array == nullptr ? otherwise : static_cast<const A*>(array)[i];
}
template <class A>
MEMOPT_INLINE void put(void* array, int64_t i, A value) {
  if (array != nullptr) static_cast<A*>(array)[i] = value;
}

template <bool kDense, class T, class Logit>
void run_row(const CrossEntropyParams& p, const Logit& logit, int64_t row) {
  using A = Accumulate<T>;
  constexpr A kNothing = std::numeric_limits<A>::quiet_NaN();
  const T* const x = static_cast<const T*>(p.x) + row * p.x_row_stride;
  T* const dx = p.dx == nullptr ? nullptr : static_cast<T*>(p.dx) + row * p.dx_row_stride;
  const bool has_class = p.target != nullptr;
  const int64_t hot = has_class ? p.target[row] : -1;
  const bool ignored = has_class && hot == p.ignore_index;
  if (ignored || (has_class && (hot < 0 || hot >= p.cols))) {
    // No class of that number: the callers check, and nothing is read for it here.
    const A value = ignored ? A(0) : kNothing;
    if (!p.again) {
      put(p.loss, row, value);
      put(p.log_sum, row, value);
      put(p.entropy, row, value);
    }
    if (dx != nullptr) std::fill_n(dx, p.cols, static_cast<T>(value));
    return;
  }
  const auto smoothing = static_cast<A>(p.label_smoothing);
  const A* const weight = static_cast<const A*>(p.class_weight);
  const DenseTarget<A> target{p.probabilities == nullptr ? nullptr
                                                         : static_cast<const A*>(p.probabilities) +
                                                               row * p.probabilities_row_stride,
                              weight, A(1) - smoothing, smoothing / static_cast<A>(p.cols)};
  const A hot_q = has_class ? (A(1) - smoothing) * number<A>(weight, hot, A(1)) : A(0);

  const A maximum = row_maximum<T>(logit, x, p.cols);
  A log_sum = 0, entropy = 0;
  A q_sum = is_logsumexp(p) ? A(1) : hot_q, q_distance = 0;
  if (p.again && !kDense) {
    log_sum = static_cast<const A*>(p.log_sum)[row];
    entropy = number<A>(p.entropy, row, A(0));
  } else {
    const RowSums<A> sums =
        row_sums<kDense, T>(logit, x, p.cols, maximum, p.entropy != nullptr, target);
    log_sum = std::log(sums.exponentials);
    entropy = log_sum - sums.products / sums.exponentials;
    q_sum += sums.q;
    q_distance = sums.q_distances;
  }
  const A lse = maximum + log_sum, z_loss = static_cast<A>(p.z_loss);
  if (!p.again) {
    A loss = q_sum * log_sum - q_distance;
    if (has_class) {
      const A t = logit.value(static_cast<A>(x[hot])) - maximum;
      loss = kDense ? loss - hot_q * t : hot_q * (log_sum - t);
    } else if (is_logsumexp(p)) {
      loss = lse;
    }
    if (z_loss != 0) loss += z_loss * lse * lse;
    put(p.loss, row, loss);
    put(p.log_sum, row, log_sum);
    put(p.entropy, row, entropy);
  }
  if (dx != nullptr) {
    const A dloss = number<A>(p.dloss, row * p.dloss_stride, A(1));
    const A dentropy = number<A>(p.dentropy, row, A(0));
    const RowGrad<A> grad{dloss, q_sum, A(2) * z_loss * lse, dentropy, entropy};
    write_gradient<kDense, T>(logit, x, dx, p.cols, maximum, log_sum, grad, target, hot, hot_q);
  }
}

template <class T, class Logit>
void run_rows(const CrossEntropyParams& p, const Logit& logit, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    is_dense(p) ? run_row<true, T>(p, logit, row) : run_row<false, T>(p, logit, row);
  }
}

}  // namespace

void cross_entropy(const CrossEntropyParams& p, int64_t begin, int64_t end) {
  with_type(p.dtype, [&](auto t) {
    using T = decltype(t);
    using A = Accumulate<T>;
    const auto scale = static_cast<A>(p.logit_scale);
    if (p.softcap != 0) {
      run_rows<T>(p, CappedLogit<A>{scale, {p.softcap}}, begin, end);
    } else {
      run_rows<T>(p, ScaledLogit<A>{scale}, begin, end);
    }
  });
}

}  // namespace memopt::kernels::cpu::MEMOPT_CPU_NAMESPACE
