// Inline functions of csrc/kernels/*.h, for ctypes. Launchers need no binding: Device.launch finds
// them in the symbol table and passes them their Params.
#include <iterator>

#include "cuda/launchers.h"

namespace k = memopt::kernels;

namespace {

template <int kWidth>
struct Chunk {
  float values[kWidth];
};

k::DropoutRule rule_of(double p, const int64_t* saved_state, int64_t seed, int64_t offset) {
  return k::dropout_rule(p, saved_state, static_cast<uint64_t>(seed),
                         static_cast<uint64_t>(offset));
}

}  // namespace

extern "C" {

int simt_dropout_rule(double p, const int64_t* saved_state, int64_t seed, int64_t offset,
                      k::DropoutRule* out) {
  *out = rule_of(p, saved_state, seed, offset);
  return 0;
}

int simt_philox(const uint32_t* counter, const uint32_t* key, uint32_t* out) {
  const k::PhiloxWords words =
      k::philox4x32_10({counter[0], counter[1], counter[2], counter[3]}, {key[0], key[1]});
  out[0] = words.x0;
  out[1] = words.x1;
  out[2] = words.x2;
  out[3] = words.x3;
  return 0;
}

// keep_scale() and keep_scales() of elements 0 .. size-1, width at a time (1: keep_scale).
int simt_keep_scales(int64_t seed, int64_t offset, double p, int64_t first, int64_t size, int width,
                     float* out) {
  const auto keeper = k::make_keeper<float>(rule_of(p, nullptr, seed, offset));
  const auto fill = [&](auto chunk) {
    for (int64_t i = 0; i < size; i += std::size(chunk.values)) {
      k::keep_scales(keeper, static_cast<uint64_t>(first + i), chunk.values);
      for (float value : chunk.values) *out++ = value;
    }
  };
  switch (width) {
    case 1:
      for (int64_t i = 0; i < size; ++i)
        out[i] = k::keep_scale(keeper, static_cast<uint64_t>(first + i));
      return 0;
    case 2:
      return fill(Chunk<2>{}), 0;
    case 4:
      return fill(Chunk<4>{}), 0;
    case 8:
      return fill(Chunk<8>{}), 0;
    default:
      return fill(Chunk<16>{}), 0;
  }
}

}  // extern "C"
