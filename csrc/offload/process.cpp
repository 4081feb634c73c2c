#include "process.h"

#include <pthread.h>

#include <atomic>

namespace memopt::offload {

namespace {

std::atomic<uint64_t> forks = 0;

}  // namespace

Process::Process() {
  static const int counted =
      pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
  static_cast<void>(counted);
  forks_ = forks.load(std::memory_order_relaxed);
}

bool Process::is_current() const {
  return forks_ == forks.load(std::memory_order_relaxed);
}

}  // namespace memopt::offload
