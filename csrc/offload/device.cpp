#include "device.h"

#include <cstring>
#include <new>

#include "host_event.h"
#include "pool.h"

namespace memopt::offload {

Memory Device::host_buffer(size_t bytes) {
  const size_t whole_pages = (bytes + kPage - 1) / kPage * kPage;
  Slab slab = pageable_slab(whole_pages);
  if (slab.data == nullptr) throw std::bad_alloc();
  return {slab.data, bytes, std::move(slab.owner)};
}

EventPtr CpuDevice::now() {
  return HostEvent::now();
}

Memory CpuDevice::allocate(size_t bytes) {
  return host_buffer(bytes);
}

void CpuDevice::read(void* host, const Memory& from, size_t offset, size_t bytes) {
  std::memcpy(host, static_cast<const std::byte*>(from.data) + offset, bytes);
}

void CpuDevice::write(const Memory& to, size_t offset, const void* host, size_t bytes) {
  std::memcpy(static_cast<std::byte*>(to.data) + offset, host, bytes);
}

}  // namespace memopt::offload
