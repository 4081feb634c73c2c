// Copies between a device and pinned host memory, on two streams of their own.
//
// A device without streams (and the CPU, where a test takes it for a device) copies at once, in the
// calling thread. Memory is allocated for the stream that computes, never for those that copy,
// which could not give it to anything else later.
#pragma once

#include "tensor_device.h"

namespace memopt::saved {

class StreamBackend : public offload::Backend {
 public:
  // `most_host_bytes`: what the pool may grow to.
  StreamBackend(c10::Device device, size_t most_host_bytes);

  offload::StreamId current_stream() override { return device_.current_stream(); }
  offload::EventPtr now() override { return device_.now(); }
  offload::Memory allocate(size_t bytes) override { return device_.allocate(bytes); }
  void wait(const offload::EventPtr& event) override { device_.wait(event); }

  std::unique_ptr<offload::Room> reserve(size_t bytes) override;
  std::string no_room(size_t bytes) override;
  offload::EventPtr store(const offload::Memory& from, offload::Room& to,
                          const offload::EventPtr& ready) override;
  offload::EventPtr load(offload::Room& from, const offload::Memory& to,
                         const offload::EventPtr& ready, const offload::EventPtr& stored) override;
  offload::RoomUse room_use() override { return pool_->use(); }
  size_t trim() override { return pool_->trim(); }

 private:
  TensorDevice device_;
  // Away and back, so that the last copies of forward do not hold up the first of backward. Empty
  // where the device has no streams.
  std::optional<c10::Stream> out_, in_;
  size_t most_host_bytes_;
  std::shared_ptr<offload::Pool> pool_;
};

}  // namespace memopt::saved
