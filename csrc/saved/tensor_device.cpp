#include "tensor_device.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StreamGuard.h>

#include <malloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "../offload/host_event.h"
#include "current.h"

namespace memopt::saved {

namespace {

// Frees a block of PyTorch's own CPU allocator, which takes them from the C library, after its
// pages were given back to the system.
void free_with_pages(void* block) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto data = reinterpret_cast<uintptr_t>(block);
  const auto begin = (data + page - 1) / page * page;
  const auto end = (data + malloc_usable_size(block)) / page * page;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
  c10::GetDefaultCPUAllocator()->raw_deleter()(block);
}

// Memory that goes back to the system as soon as its tensor is freed. It is counted as PyTorch's
// own is.
at::Tensor mapped_tensor(size_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(data != MAP_FAILED, "offload: the system has no ", bytes, " bytes left");
  c10::profiledCPUMemoryReporter().New(data, bytes);
  return at::for_blob(data, {static_cast<int64_t>(bytes)})
      .options(at::TensorOptions().dtype(at::kByte))
      .target_device(c10::kCPU)
      .deleter([bytes](void* mapped) {
        c10::profiledCPUMemoryReporter().Delete(mapped);
        munmap(mapped, bytes);
      })
      .make_tensor();
}

// Less comes from the C library, whose blocks may be reused sooner.
constexpr size_t kMappedBytes = 64 * 1024;

}  // namespace

void give_pages_back_when_freed(const at::Tensor& bytes) {
  if (!bytes.is_cpu() || bytes.storage().nbytes() < kMappedBytes) return;
  auto& data = bytes.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  // Elsewhere, or of another allocator, it stays as it is.
  static_cast<void>(data.compare_exchange_deleter(c10::GetDefaultCPUAllocator()->raw_deleter(),
                                                  &free_with_pages));
}

offload::Memory memory_of(const at::Tensor& bytes) {
  return {const_cast<void*>(bytes.const_data_ptr()), static_cast<size_t>(bytes.nbytes()),
          std::make_shared<at::Tensor>(bytes)};
}

at::Tensor tensor_of(const offload::Memory& memory) {
  return *static_cast<at::Tensor*>(memory.owner.get());
}

at::Tensor bytes_at(void* data, size_t bytes, c10::Device device) {
  return at::for_blob(data, {static_cast<int64_t>(bytes)})
      .options(at::TensorOptions().dtype(at::kByte).device(device))
      .target_device(device)
      .make_tensor();
}

DeviceEvent::DeviceEvent(const c10::Stream& stream)
    : event_(stream.device_type(), c10::EventFlag::BACKEND_DEFAULT) {  // with times
  event_.record(stream);
}

double DeviceEvent::seconds_after(offload::Event& earlier) {
  const auto* of_device = dynamic_cast<DeviceEvent*>(&earlier);
  // A copy by an I/O thread was reached on the host's clock, which the device does not know.
  return of_device == nullptr ? 0 : of_device->event_.elapsedTime(event_) / 1000;
}

std::optional<c10::Stream> new_stream(c10::Device device, int priority) {
  if (device.is_cpu()) return std::nullopt;
  try {
    return c10::impl::VirtualGuardImpl(device.type()).getNewStream(device, priority);
  } catch (const c10::Error&) {
    return std::nullopt;
  }
}

offload::Slab pinned_slab(size_t bytes) {
  const Unseen unseen;
  try {
    auto tensor = std::make_shared<at::Tensor>(
        at::empty({static_cast<int64_t>(bytes)},
                  at::TensorOptions().dtype(at::kByte).device(c10::kCPU).pinned_memory(true)));
    auto* data = tensor->mutable_data_ptr();
    return {data, std::move(tensor), /*pinned=*/true};
  } catch (const c10::Error&) {
    TORCH_WARN_ONCE("offload: the host's memory cannot be pinned here, so that copies to it ",
                    "are slower and hold the host up (memory limits of a container or of WSL, or ",
                    "ulimit -l, are the usual cause)");
    return offload::pageable_slab(bytes);
  }
}

TensorDevice::TensorDevice(c10::Device device)
    : device_(device), stream_(new_stream(device, /*priority=*/0)) {}

offload::StreamId TensorDevice::current_stream() {
  const auto stream = saved::current_stream(device_);
  return stream.has_value() ? stream->id() : 0;
}

offload::EventPtr TensorDevice::now() {
  if (!stream_.has_value()) return offload::HostEvent::now();
  return std::make_shared<DeviceEvent>(*saved::current_stream(device_));
}

offload::Memory TensorDevice::allocate(size_t bytes) {
  const Unseen unseen;
  if (device_.is_cpu() && bytes >= kMappedBytes) return memory_of(mapped_tensor(bytes));
  return memory_of(at::empty({static_cast<int64_t>(bytes)},
                             at::TensorOptions().dtype(at::kByte).device(device_)));
}

void TensorDevice::wait(const offload::EventPtr& event) {
  const auto* of_device = dynamic_cast<DeviceEvent*>(event.get());
  if (of_device == nullptr) return event->wait();
  of_device->block(*saved::current_stream(device_));
}

void TensorDevice::read(void* host, const offload::Memory& from, size_t offset, size_t bytes) {
  copy(host, from, offset, bytes, /*to_host=*/true);
}

void TensorDevice::write(const offload::Memory& to, size_t offset, const void* host, size_t bytes) {
  copy(const_cast<void*>(host), to, offset, bytes, /*to_host=*/false);
}

void TensorDevice::copy(void* host, const offload::Memory& memory, size_t offset, size_t bytes,
                        bool to_host) {
  auto* data = static_cast<std::byte*>(memory.data) + offset;
  if (device_.is_cpu()) {
    std::memcpy(to_host ? host : data, to_host ? data : host, bytes);
    return;
  }
  const Unseen unseen;
  auto on_host = bytes_at(host, bytes, c10::kCPU);
  auto on_device = bytes_at(data, bytes, device_);
  c10::OptionalStreamGuard on;
  if (stream_.has_value()) on.reset_stream(*stream_);
  (to_host ? on_host : on_device).copy_(to_host ? on_device : on_host, /*non_blocking=*/true);
  if (stream_.has_value()) stream_->synchronize();
}

offload::Memory TensorDevice::host_buffer(size_t bytes) {
  if (device_.is_cpu()) return Device::host_buffer(bytes);
  auto slab = pinned_slab(bytes);
  return {slab.data, bytes, std::move(slab.owner)};
}

}  // namespace memopt::saved
