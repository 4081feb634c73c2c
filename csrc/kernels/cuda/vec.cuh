// Which elements of an array a thread owns, and how they travel between memory and registers.
//
// A tile of neighbouring elements is dealt out to `threads` threads, at most kElements to each.
// Where the array can be cut into 16-byte vectors, thread t owns the vectors t, t + threads, t + 2
// threads, ...; elsewhere it owns the elements t, t + threads, ... . The rule looks at lengths and
// the element type alone; alignment decides only how vectors move. So a sum over what a thread owns
// has the same bits wherever the tensors lie in memory.
#pragma once

#include <cstring>
#include <type_traits>

#include "launch.cuh"

namespace memopt::kernels::cuda {

// Elements of T in 16 bytes.
template <class T>
constexpr int kVectorWidth = 16 / sizeof(T);

// Whether 16-byte accesses are allowed: to an array, and to rows that lie `stride` elements apart.
// True for null.
inline bool is_aligned(const void* p) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0;
}

template <class T>
bool rows_are_aligned(const void* p, int64_t stride) {
  return is_aligned(p) && stride % kVectorWidth<T> == 0;
}

enum class Access {
  kVector,       // vectors, by 16-byte accesses
  kSplitVector,  // the same vectors element by element: an array is not aligned
  kElement,      // elements: the array cannot be cut into vectors
};

template <Access kAccess>
using AccessConstant = std::integral_constant<Access, kAccess>;

// f(AccessConstant<a>{}) with the access for rows of `cols` elements of T.
template <class T, class F>
cudaError_t dispatch_access(int64_t cols, bool aligned, F&& f) {
  if (cols % kVectorWidth<T> != 0) return f(AccessConstant<Access::kElement>{});
  return aligned ? f(AccessConstant<Access::kVector>{}) : f(AccessConstant<Access::kSplitVector>{});
}

// The elements that a thread takes at a time: a vector, or the two that the 2-byte types convert at
// once.
template <class T, Access kAccess>
constexpr int kGroup = kAccess == Access::kElement ? 2 : kVectorWidth<T>;

// A thread's elements (k, j) of a tile: vector k = 0, 1, ..., place j = 0 .. kWidth-1 in it.
template <int kElements, int kWidth, Access kAccess>
struct Share {
  // So many neighbours in the order below are owned together or not at all.
  static constexpr int kUnit = kAccess == Access::kElement ? 1 : kWidth;
  int thread;
  int threads;
  int owned;  // this many elements, in the order (0, 0), (0, 1), ..., lie within the tile

  __device__ __forceinline__ Share(int thread_, int threads_, int64_t tile_size)
      : thread(thread_), threads(threads_), owned(kElements) {
    if (tile_size >= kElements * threads) return;
    const int size = static_cast<int>(tile_size);
    owned = 0;
#pragma unroll
    for (int e = 0; e < kElements; e += kUnit) {
      if (position(e / kWidth, e % kWidth) < size) owned = e + kUnit;
    }
  }

  // The share of a row: nothing, if the row does not exist, but the thread still comes to the
  // barriers. Where elements move one by one the thread's number is chosen anew as well: otherwise
  // the compiler keeps the address of every element in registers from row to row, and spills.
  __device__ __forceinline__ Share of_row(bool exists) const {
    Share share = *this;
    share.owned = exists ? owned : 0;
    if (kAccess != Access::kVector) share.thread = exists ? thread : 0;
    return share;
  }

  __device__ __forceinline__ int position(int k, int j = 0) const {
    if constexpr (kAccess == Access::kElement) {
      return thread + (k * kWidth + j) * threads;
    } else {
      return (thread + k * threads) * kWidth + j;
    }
  }

  __device__ __forceinline__ bool owns(int k, int j = 0) const {
    return (k * kWidth + j) / kUnit * kUnit < owned;
  }
};

// kWidth elements as they lie in memory, in registers: 4 to 32 bytes.
template <class T, int kWidth>
struct Vector {
  uint32_t words[kWidth * sizeof(T) / 4];
};

// The 2-byte types convert by pairs, one instruction for both.
__device__ __forceinline__ void convert(__half2 v, float2* out) {
  *out = __half22float2(v);
}
__device__ __forceinline__ void convert(__nv_bfloat162 v, float2* out) {
  // A bfloat16 is the upper half of a float. __bfloat1622float2() takes an instruction more.
  uint32_t bits;
  memcpy(&bits, &v, sizeof(bits));
  const uint32_t floats[2] = {bits << 16, bits & 0xffff0000u};
  memcpy(out, floats, sizeof(floats));
}
__device__ __forceinline__ void convert(float2 v, __half2* out) {
  *out = __floats2half2_rn(v.x, v.y);
}
__device__ __forceinline__ void convert(float2 v, __nv_bfloat162* out) {
  *out = __floats2bfloat162_rn(v.x, v.y);
}

template <class T>
struct PairOf;
template <>
struct PairOf<__half> {
  using type = __half2;
};
template <>
struct PairOf<__nv_bfloat16> {
  using type = __nv_bfloat162;
};

template <class T, int kWidth, class A>
__device__ __forceinline__ void widen(const Vector<T, kWidth>& v, A (&out)[kWidth]) {
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) {
      typename PairOf<T>::type pair;
      float2 f;
      memcpy(&pair, v.words + i, sizeof(pair));
      convert(pair, &f);
      out[2 * i] = f.x;
      out[2 * i + 1] = f.y;
    }
  } else {
    T values[kWidth];
    memcpy(values, v.words, sizeof(values));
#pragma unroll
    for (int j = 0; j < kWidth; ++j) out[j] = static_cast<A>(values[j]);
  }
}

template <class T, int kWidth, class A>
__device__ __forceinline__ void narrow(const A (&in)[kWidth], Vector<T, kWidth>* v) {
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) {
      typename PairOf<T>::type pair;
      convert(float2{in[2 * i], in[2 * i + 1]}, &pair);
      memcpy(v->words + i, &pair, sizeof(pair));
    }
  } else {
    T values[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) values[j] = static_cast<T>(in[j]);
    memcpy(v->words, values, sizeof(values));
  }
}

template <class T, class A>
__device__ __forceinline__ T narrow(A value) {
  const A in[2] = {value, A(0)};
  Vector<T, 2> v;
  narrow(in, &v);
  T out;
  memcpy(&out, v.words, sizeof(out));
  return out;
}

// Rows are read once, and should not push out of the caches the parameters, which each row reads.
// An elementwise kernel has nothing else to keep; there evict-first loads took 1 % longer on an
// H100.
enum class Load { kPlain, kEvictFirst };

// Vector k of a share of the tile at p; zeros in the place of what is beyond the tile.
template <Load kLoad, class T, int kElements, int kWidth, Access kAccess>
__device__ __forceinline__ void load(const T* p, const Share<kElements, kWidth, kAccess>& share,
                                     int k, Vector<T, kWidth>* v) {
  *v = {};
  if constexpr (kAccess == Access::kVector) {
    using Chunk = std::conditional_t<sizeof(*v) % 16 == 0, uint4, uint2>;
    if (!share.owns(k)) return;
    const Chunk* from = reinterpret_cast<const Chunk*>(p + share.position(k));
    Chunk chunks[sizeof(*v) / sizeof(Chunk)];
#pragma unroll
    for (int i = 0; i < int{sizeof(*v) / sizeof(Chunk)}; ++i) {
      chunks[i] = kLoad == Load::kEvictFirst ? __ldcs(from + i) : from[i];
    }
    memcpy(v->words, chunks, sizeof(*v));
  } else {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      if (!share.owns(k, j)) continue;
      const T value = p[share.position(k, j)];
      memcpy(reinterpret_cast<unsigned char*>(v->words) + j * sizeof(T), &value, sizeof(T));
    }
  }
}

template <class T, int kElements, int kWidth, Access kAccess>
__device__ __forceinline__ void store(const Vector<T, kWidth>& v, T* p,
                                      const Share<kElements, kWidth, kAccess>& share, int k) {
  if constexpr (kAccess == Access::kVector) {
    using Chunk = std::conditional_t<sizeof(v) % 16 == 0, uint4, uint2>;
    if (!share.owns(k)) return;
    Chunk* to = reinterpret_cast<Chunk*>(p + share.position(k));
    Chunk chunks[sizeof(v) / sizeof(Chunk)];
    memcpy(chunks, v.words, sizeof(v));
#pragma unroll
    for (int i = 0; i < int{sizeof(v) / sizeof(Chunk)}; ++i) to[i] = chunks[i];
  } else {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      if (!share.owns(k, j)) continue;
      T value;
      memcpy(&value, reinterpret_cast<const unsigned char*>(v.words) + j * sizeof(T), sizeof(T));
      p[share.position(k, j)] = value;
    }
  }
}

// The same with conversion from and to the type that is computed in.
template <Load kLoad, class T, int kElements, int kWidth, Access kAccess, class A>
__device__ __forceinline__ void load(const T* p, const Share<kElements, kWidth, kAccess>& share,
                                     int k, A (&out)[kWidth]) {
  Vector<T, kWidth> v;
  load<kLoad>(p, share, k, &v);
  widen(v, out);
}

template <class T, int kElements, int kWidth, Access kAccess, class A>
__device__ __forceinline__ void store(const A (&in)[kWidth], T* p,
                                      const Share<kElements, kWidth, kAccess>& share, int k) {
  Vector<T, kWidth> v;
  narrow(in, &v);
  store(v, p, share, k);
}

}  // namespace memopt::kernels::cuda
