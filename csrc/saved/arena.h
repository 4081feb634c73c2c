// A slab of a device's memory for copies of tensors that come and go in each step in much the same
// way. It is allocated once, and the allocator of the device sees none of them.
//
// A range is lent: it serves the next tensor only when the handle that stands for the copy and
// every storage that restore() made of it are gone.
//
// On an accelerator the device works later than the host. The slab belongs to the stream that wrote
// to it last. A copy made on another stream waits for what that one was given so far; a range that
// was read on another stream is waited for by the next copy. What a user's own streams read is, as
// with PyTorch's allocator, theirs to wait for.
#pragma once

#include <c10/util/SmallVector.h>

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "../offload/space.h"
#include "tensor_device.h"

namespace memopt::saved {

// What PyTorch's allocators of accelerators align to; a host's kernels want 64 bytes at most.
inline constexpr size_t kArenaAlignment = 512;

class Lease;

class Arena : public std::enable_shared_from_this<Arena> {
 public:
  // Raises where the device has not so much memory.
  Arena(c10::Device device, size_t bytes);
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena();

  // A copy of `bytes`, a tensor of bytes, made on the current stream; null where no range is large
  // enough.
  std::shared_ptr<Lease> copy(const at::Tensor& bytes);

  size_t size() const { return static_cast<size_t>(memory_.numel()); }
  size_t in_use() const;
  size_t high_water() const;

 private:
  friend class Lease;
  using Streams = c10::SmallVector<c10::Stream, 1>;
  using Events = std::vector<std::shared_ptr<DeviceEvent>>;

  void release(offload::Range range, const Streams& streams);

  const at::Tensor memory_;
  const std::optional<c10::Stream> allocated_on_;  // none on the CPU
  mutable std::mutex mutex_;                       // nothing is freed under it
  offload::Space space_{kArenaAlignment};
  std::optional<c10::Stream> written_on_;
  Events reads_;  // of ranges that are free, on other streams than that
};

class Lease : public std::enable_shared_from_this<Lease> {
 public:
  Lease(std::shared_ptr<Arena> arena, offload::Range range, size_t bytes);
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  ~Lease();

  // The bytes, for the current stream: a tensor whose storage holds the lease.
  at::Tensor tensor();

 private:
  friend class Arena;
  void* data() const;

  const std::shared_ptr<Arena> arena_;
  const offload::Range range_;
  const size_t bytes_;
  Arena::Streams streams_;  // that write or read it; under the arena's mutex
};

}  // namespace memopt::saved
