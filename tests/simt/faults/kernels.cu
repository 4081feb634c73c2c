// Small kernels, each right and with one planted fault, that prove what the interpreter finds.
// `kFault` switches the fault on. All work on one row of n floats.
#include <cuda_runtime.h>

extern __shared__ __align__(16) unsigned char memopt_shared[];

namespace {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kThreads = 96;

struct Params {
  const float* x;
  float* y;
  int n;
};

__device__ float* shared_floats() {
  return reinterpret_cast<float*>(memopt_shared);
}

__device__ float warp_sum(float v) {
  for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(kAllLanes, v, offset);
  return v;
}

// y[i] = x[i] + sum of x over the block: partial sums travel between warps through shared memory.
// Fault: no barrier between writing the partial sums and reading them.
template <bool kFault>
__global__ void missing_barrier(Params p) {
  const int t = threadIdx.x;
  const float mine = t < p.n ? p.x[t] : 0.0f;
  const float sum = warp_sum(mine);
  if (t % warpSize == 0) shared_floats()[t / warpSize] = sum;
  if (!kFault) __syncthreads();
  float total = 0.0f;
  for (int w = 0; w < kThreads / warpSize; ++w) total += shared_floats()[w];
  if (t < p.n) p.y[t] = mine + total;
}

// Two sums through the same shared memory. Fault: no barrier before it is written again, which
// poison cannot show, only another order of the threads.
template <bool kFault>
__global__ void reused_too_early(Params p) {
  const int t = threadIdx.x;
  float total = 0.0f;
  for (int round = 0; round < 2; ++round) {
    const float sum = warp_sum(t < p.n ? p.x[t] * static_cast<float>(round + 1) : 0.0f);
    if (t % warpSize == 0) shared_floats()[t / warpSize] = sum;
    __syncthreads();
    for (int w = 0; w < kThreads / warpSize; ++w) total += shared_floats()[w];
    if (!kFault) __syncthreads();
  }
  if (t < p.n) p.y[t] = total;
}

// y[0] = sum of the first 32, by a tree in shared memory. Fault: it trusts the lanes of a warp to
// run in lockstep.
template <bool kFault>
__global__ void trusts_lockstep(Params p) {
  const int t = threadIdx.x;
  float* values = shared_floats();
  values[t] = t < p.n ? p.x[t] : 0.0f;
  for (int offset = 16; offset > 0; offset /= 2) {
    if (!kFault) __syncwarp();
    if (t < offset) values[t] += values[t + offset];
  }
  if (t == 0) p.y[0] = values[0];
}

// y[i] = x[i], two at a time. Fault: the tail of an odd n is moved as a pair.
template <bool kFault>
__global__ void wrong_tail_write(Params p) {
  for (int i = 2 * threadIdx.x; i < p.n; i += 2 * kThreads) {
    p.y[i] = p.x[i];
    if (i + 1 < p.n) {
      p.y[i + 1] = p.x[i + 1];
    } else if (kFault) {
      p.y[i + 1] = 0.0f;
    }
  }
}

// y[i] = x[i] + x[i + 1], the last y = its x. Fault: the last one reads on, and the value is even
// thrown away.
template <bool kFault>
__global__ void wrong_tail_read(Params p) {
  const int i = threadIdx.x;
  if (i >= p.n) return;
  const float here = p.x[i];
  const float next = kFault || i + 1 < p.n ? *const_cast<const volatile float*>(p.x + i + 1) : 0.0f;
  p.y[i] = i + 1 < p.n ? here + next : here;
}

// y = x. Fault: x, too, is written.
template <bool kFault>
__global__ void writes_its_input(Params p) {
  const int i = threadIdx.x;
  if (i >= p.n) return;
  p.y[i] = p.x[i];
  if (kFault && i == 3) const_cast<float*>(p.x)[i] += 1.0f;
}

// y[i] = sum of n values in shared memory. Fault: it sums one for each thread, of which the last
// were never written.
template <bool kFault>
__global__ void uninitialised_shared(Params p) {
  const int t = threadIdx.x;
  if (t < p.n) shared_floats()[t] = p.x[t];
  __syncthreads();
  float total = 0.0f;
  for (int i = 0; i < (kFault ? kThreads : p.n); ++i) total += shared_floats()[i];
  if (t < p.n) p.y[t] = total;
}

// y[i] = x[n - 1 - i] through shared memory. Fault: one float more than the launch asked for is
// written.
template <bool kFault>
__global__ void shared_overrun(Params p) {
  const int t = threadIdx.x;
  if (t < p.n) shared_floats()[t] = p.x[p.n - 1 - t];
  if (kFault && t == 0) shared_floats()[kThreads] = 1.0f;
  __syncthreads();
  if (t < p.n) p.y[t] = shared_floats()[t];
}

// y[i] = x[0]. Fault: threads beyond n leave before the barrier.
template <bool kFault>
__global__ void exit_before_barrier(Params p) {
  const int t = threadIdx.x;
  if (kFault && t >= p.n) return;
  if (t == 0) shared_floats()[0] = p.x[0];
  __syncthreads();
  if (t < p.n) p.y[t] = shared_floats()[0];
}

// The same. Fault: the two halves of a branch have a barrier each.
template <bool kFault>
__global__ void two_barriers(Params p) {
  const int t = threadIdx.x;
  if (t == 0) shared_floats()[0] = p.x[0];
  if (kFault && t >= 64) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  if (t < p.n) p.y[t] = shared_floats()[0];
}

// y[i] = sum over the warp. Fault: lanes beyond n have exited when the others shuffle.
template <bool kFault>
__global__ void shuffle_after_exit(Params p) {
  const int t = threadIdx.x;
  if (kFault && t >= p.n) return;
  const float sum = warp_sum(t < p.n ? p.x[t] : 0.0f);
  if (t < p.n) p.y[t] = sum;
}

// The same. Fault: only the lanes below n shuffle, the others wait at the barrier behind it.
template <bool kFault>
__global__ void shuffle_in_branch(Params p) {
  const int t = threadIdx.x;
  float sum = 0.0f;
  if (!kFault || t < p.n) sum = warp_sum(t < p.n ? p.x[t] : 0.0f);
  __syncthreads();
  if (t < p.n) p.y[t] = sum;
}

// y[i] = x of the even lane beside it. Fault: the mask names the even lanes, the odd ones call as
// well.
template <bool kFault>
__global__ void mask_without_caller(Params p) {
  const int t = threadIdx.x;
  const float v = __shfl_sync(kFault ? 0x55555555u : kAllLanes, t < p.n ? p.x[t] : 0.0f, t & ~1);
  if (t < p.n) p.y[t] = v;
}

// y[i] = x of the lane beside it, by the even lanes alone. Fault: they read the odd ones, which
// take no part.
template <bool kFault>
__global__ void reads_lane_outside_mask(Params p) {
  const int t = threadIdx.x;
  float v = t < p.n ? p.x[t] : 0.0f;
  if (t % 2 == 0) v = __shfl_xor_sync(0x55555555u, v, kFault ? 1 : 2);
  if (t < p.n) p.y[t] = v;
}

// y[i] = 1000 x[4 places on] + x[1 place beside], in groups of 8 lanes; a place outside of the
// group is one's own. Fault: groups of 12.
template <bool kFault>
__global__ void shuffle_in_groups(Params p) {
  const int t = threadIdx.x;
  const int width = kFault ? 12 : 8;
  const float v = t < p.n ? p.x[t] : 0.0f;
  const float sum =
      1000.0f * __shfl_down_sync(kAllLanes, v, 4, width) + __shfl_xor_sync(kAllLanes, v, 1, width);
  if (t < p.n) p.y[t] = sum;
}

// y = x by vectors. Fault: from an address that is no multiple of 16.
template <bool kFault>
__global__ void misaligned_vector(Params p) {
  const int i = 4 * threadIdx.x;
  if (i + 5 > p.n) return;
  const float4 v = *reinterpret_cast<const float4*>(p.x + i + (kFault ? 1 : 0));
  p.y[i] = v.x;
  p.y[i + 1] = v.y;
  p.y[i + 2] = v.z;
  p.y[i + 3] = v.w;
}

// y[i] = x[i] by way of an array of 4 in registers. Fault: the array is indexed with 4.
template <bool kFault>
__global__ void register_array_overrun(Params p) {
  const int t = threadIdx.x;
  float values[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  const int slot = t % (kFault ? 5 : 4);
  values[slot] = t < p.n ? p.x[t] : 0.0f;
  if (t < p.n) p.y[t] = values[slot];
}

// Each block writes its part of y. Fault: all blocks write the same part, and the last one stays.
template <bool kFault>
__global__ void blocks_collide(Params p) {
  const int t = threadIdx.x;
  if (t < p.n)
    p.y[kFault ? t : t + static_cast<int>(blockIdx.x) * p.n] =
        p.x[t] + static_cast<float>(blockIdx.x);
}

using Kernel = void (*)(Params);

struct Case {
  const char* name;
  Kernel right;
  Kernel faulty;
};

#define CASE(name) {#name, name<false>, name<true>}

constexpr Case kCases[] = {
    CASE(missing_barrier),      CASE(reused_too_early),        CASE(trusts_lockstep),
    CASE(wrong_tail_write),     CASE(wrong_tail_read),         CASE(writes_its_input),
    CASE(uninitialised_shared), CASE(shared_overrun),          CASE(exit_before_barrier),
    CASE(two_barriers),         CASE(shuffle_after_exit),      CASE(shuffle_in_branch),
    CASE(mask_without_caller),  CASE(reads_lane_outside_mask), CASE(shuffle_in_groups),
    CASE(misaligned_vector),    CASE(register_array_overrun),  CASE(blocks_collide),
};

#undef CASE

}  // namespace

// Launches the named kernel.
extern "C" int run_sample(const char* name, bool faulty, const float* x, float* y, int n,
                          const dim3* grid, const dim3* block, int64_t shared) {
  for (const Case& c : kCases) {
    if (std::strcmp(c.name, name) != 0) continue;
    cudaLaunchConfig_t config = {};
    config.gridDim = *grid;
    config.blockDim = *block;
    config.dynamicSmemBytes = static_cast<size_t>(shared);
    return cudaLaunchKernelEx(&config, faulty ? c.faulty : c.right, Params{x, y, n});
  }
  return cudaErrorInvalidDeviceFunction;
}
