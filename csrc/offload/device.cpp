#include "device.h"

#include <new>

#include "pool.h"

namespace memopt::offload {

Memory Device::host_buffer(size_t bytes) {
  const size_t whole_pages = (bytes + kPage - 1) / kPage * kPage;
  Slab slab = pageable_slab(whole_pages);
  if (slab.data == nullptr) throw std::bad_alloc();
  return {slab.data, bytes, std::move(slab.owner)};
}

}  // namespace memopt::offload
