// Tells whether offloading lowers the peak of memory: the bytes that were offloaded when the peak
// was reached.
//
// The allocator's peak is read at moments that the engine passes anyway. Where it has grown since
// the moment before, it was reached between the two, with as much offloaded as there was then.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <mutex>

namespace memopt::saved {

// The most memory that the device has had allocated at one time, in bytes: PyTorch's count, on a
// CPU that of the operating system (resident memory). 0 where it is not known.
size_t memory_peak(c10::Device device);

class PeakWatch {
 public:
  explicit PeakWatch(c10::Device device) : seen_(memory_peak(device)) {}

  // From now on `away` bytes are away; until now it was what was said before.
  void see(c10::Device device, size_t away);

  // All 0 while the peak is one of before the watch began.
  struct Peak {
    size_t bytes = 0;
    size_t away = 0;  // when it was reached
  };
  Peak peak() const;
  // Forgets the peak, until a higher one is reached.
  void restart();

 private:
  mutable std::mutex mutex_;
  size_t seen_;
  size_t away_ = 0;
  Peak peak_;
};

}  // namespace memopt::saved
