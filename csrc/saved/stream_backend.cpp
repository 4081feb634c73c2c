#include "stream_backend.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include "../offload/host_event.h"

namespace memopt::saved {

namespace {

using offload::EventPtr;
using offload::Memory;
using offload::Room;

// What a copy waits for, and the stream that it runs on; without one it runs at once.
template <class Copy>
EventPtr run_on(const std::optional<c10::Stream>& stream, std::initializer_list<EventPtr> after,
                const Copy& copy) {
  const Unseen unseen;
  if (!stream.has_value()) {
    copy(/*non_blocking=*/false);
    return offload::HostEvent::now();
  }
  for (const auto& event : after) dynamic_cast<DeviceEvent&>(*event).block(*stream);
  const c10::StreamGuard on(*stream);
  try {
    copy(/*non_blocking=*/true);
  } catch (...) {
    // Of several pieces the first ones may be on their way to memory that is freed now.
    stream->synchronize();
    throw;
  }
  return std::make_shared<DeviceEvent>(*stream);
}

// copy(bytes of the device, bytes of the host) for each piece of a room.
template <class Copy>
void for_pieces(const Memory& memory, const Room& room, c10::Device device, const Copy& copy) {
  auto* data = static_cast<std::byte*>(memory.data);
  for (const auto& piece : dynamic_cast<const offload::PoolRoom&>(room).pieces()) {
    copy(bytes_at(data, piece.bytes, device), bytes_at(piece.data, piece.bytes, c10::kCPU));
    data += piece.bytes;
  }
}

}  // namespace

StreamBackend::StreamBackend(c10::Device device, size_t most_host_bytes)
    : device_(device),
      out_(new_stream(device, /*priority=*/0)),
      in_(new_stream(device, /*priority=*/-1)),
      most_host_bytes_(most_host_bytes) {
  offload::PoolOptions options;
  if (!device.is_cpu()) options.make_slab = pinned_slab;
  options.most_bytes = most_host_bytes;
  pool_ = offload::Pool::make(std::move(options));
}

std::unique_ptr<Room> StreamBackend::reserve(size_t bytes) {
  const c10::DeviceGuard guard(device_.device());
  return pool_->reserve(bytes);
}

std::string StreamBackend::no_room(size_t bytes) {
  const auto use = pool_->use();
  return c10::str("offload: ", bytes, " bytes stay on ", device_.device(),
                  ", since the pool of host memory has no space for them: ", use.in_use, " of ",
                  use.allocated, " bytes are in use, and it may grow to ", most_host_bytes_,
                  " (memopt.offload.configure)");
}

EventPtr StreamBackend::store(const Memory& from, Room& to, const EventPtr& ready) {
  return run_on(out_, {ready}, [&](bool non_blocking) {
    for_pieces(from, to, device_.device(), [&](const at::Tensor& device, const at::Tensor& host) {
      host.copy_(device, non_blocking);
    });
  });
}

EventPtr StreamBackend::load(Room& from, const Memory& to, const EventPtr& ready,
                             const EventPtr& stored) {
  return run_on(in_, {ready, stored}, [&](bool non_blocking) {
    for_pieces(to, from, device_.device(), [&](const at::Tensor& device, const at::Tensor& host) {
      device.copy_(host, non_blocking);
    });
  });
}

}  // namespace memopt::saved
