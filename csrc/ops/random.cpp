#include "random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/randint.h>

#include <limits>
#include <mutex>

namespace memopt::ops {
namespace {

// The numbers that one Philox call gives: what a kernel takes of each of the generator's streams.
constexpr uint64_t kStep = 4;

// The CPU's numbers are those of at::randint(kMost), which draws them in a traced graph.
constexpr uint64_t kMost = std::numeric_limits<int64_t>::max();

}  // namespace

RandomState draw_random_state(const at::Tensor& tensor) {
  if (tensor.is_cpu()) {
    auto* generator =
        at::check_generator<at::CPUGeneratorImpl>(at::detail::getDefaultCPUGenerator());
    const std::lock_guard<std::mutex> lock(generator->mutex_);
    const uint64_t seed = generator->random64() % kMost;
    return {seed, generator->random64() % kMost};
  }
  at::Generator generator = at::globalContext().defaultGenerator(tensor.device());
  const std::lock_guard<std::mutex> lock(generator.mutex());
  const RandomState state{generator.current_seed(), generator.get_offset()};
  generator.set_offset(state.offset + kStep);
  return state;
}

at::Tensor draw_random_state_on_device(const at::Tensor& tensor) {
  return at::randint(kMost, {2}, tensor.options().dtype(at::kLong));
}

}  // namespace memopt::ops
