#include "memory_peak.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <sys/resource.h>

namespace memopt::saved {

size_t memory_peak(c10::Device device) {
  if (device.is_cpu()) {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return static_cast<size_t>(usage.ru_maxrss) * 1024;
  }
  auto* allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device.type()));
  if (allocator == nullptr || !allocator->initialized()) return 0;
  const auto stats = allocator->getDeviceStats(device.index());
  constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  return static_cast<size_t>(stats.allocated_bytes[kAll].peak);
}

void PeakWatch::see(c10::Device device, size_t away) {
  const size_t bytes = memory_peak(device);
  const std::lock_guard<std::mutex> lock(mutex_);
  // Less, where a user has reset the allocator's count.
  if (bytes != seen_) peak_ = {bytes, away_};
  seen_ = bytes;
  away_ = away;
}

void PeakWatch::restart() {
  const std::lock_guard<std::mutex> lock(mutex_);
  peak_ = {};
}

PeakWatch::Peak PeakWatch::peak() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return peak_;
}

}  // namespace memopt::saved
