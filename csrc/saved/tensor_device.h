// A device as the engine's backends see it, by PyTorch's device-generic interfaces: its streams,
// events and allocator. Memory is a tensor of bytes.
//
// The stream that is current is asked for at each call and never remembered: backward runs in
// other threads than forward, and users change it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <optional>

#include "../offload/device.h"
#include "../offload/pool.h"
#include "untracked.h"

namespace memopt::saved {

// A tensor of bytes, as memory of the engine's; the memory keeps the tensor.
offload::Memory memory_of(const at::Tensor& bytes);
// The tensor that such memory keeps.
at::Tensor tensor_of(const offload::Memory& memory);
// Bytes of the device or the host as a tensor, which does not keep them.
at::Tensor bytes_at(void* data, size_t bytes, c10::Device device);

// Has the storage give its pages back to the system when it is freed, if PyTorch's CPU allocator
// made it. The C library keeps freed memory that lies between other blocks, and that is where
// activations lie: without this, resident memory falls by a sixth of what leaves the process.
void give_pages_back_when_freed(const at::Tensor& bytes);

class DeviceEvent : public offload::Event {
 public:
  // Recorded on the stream now.
  explicit DeviceEvent(const c10::Stream& stream);

  bool reached() override { return event_.query(); }
  void wait() override { event_.synchronize(); }
  double seconds_after(offload::Event& earlier) override;

  // What the stream is given from now on runs after it.
  void block(const c10::Stream& stream) const { event_.block(stream); }

 private:
  c10::Event event_;
};

// A stream of the device's own pool; empty where it has none. Negative priorities go first.
std::optional<c10::Stream> new_stream(c10::Device device, int priority);

// Host memory that the device copies to and from without the host's help. Where it cannot be
// pinned, ordinary memory, with which copies hold the host up; that warns once.
offload::Slab pinned_slab(size_t bytes);

class TensorDevice : public offload::Device {
 public:
  explicit TensorDevice(c10::Device device);

  c10::Device device() const { return device_; }

  offload::StreamId current_stream() override;
  offload::EventPtr now() override;
  offload::Memory allocate(size_t bytes) override;
  void wait(const offload::EventPtr& event) override;
  void read(void* host, const offload::Memory& from, size_t offset, size_t bytes) override;
  void write(const offload::Memory& to, size_t offset, const void* host, size_t bytes) override;
  offload::Memory host_buffer(size_t bytes) override;

 private:
  // On a stream of its own; returns when that is done.
  void copy(void* host, const offload::Memory& memory, size_t offset, size_t bytes, bool to_host);

  c10::Device device_;
  std::optional<c10::Stream> stream_;  // of read() and write()
};

}  // namespace memopt::saved
