#include "arena.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>

#include "current.h"

namespace memopt::saved {

namespace {

at::Tensor device_memory(c10::Device device, size_t bytes) {
  const Unseen unseen;
  return at::empty({static_cast<int64_t>(bytes)},
                   at::TensorOptions().dtype(at::kByte).device(device));
}

std::shared_ptr<DeviceEvent> now_on(const c10::Stream& stream) {
  return std::make_shared<DeviceEvent>(stream);
}

}  // namespace

Arena::Arena(c10::Device device, size_t bytes)
    : memory_(device_memory(device, bytes)),
      allocated_on_(current_stream(device)),
      written_on_(allocated_on_) {
  space_.grow(bytes, /*wall=*/false);
}

Arena::~Arena() {
  // The allocator gives the memory to the stream that it was allocated on.
  if (!allocated_on_.has_value()) return;
  try {
    if (*written_on_ != *allocated_on_) now_on(*written_on_)->block(*allocated_on_);
    for (const auto& read : reads_) read->block(*allocated_on_);
  } catch (const std::exception&) {  // the device is gone
  }
}

std::shared_ptr<Lease> Arena::copy(const at::Tensor& bytes) {
  const auto size = static_cast<size_t>(bytes.numel());
  const auto stream = current_stream(memory_.device());
  std::shared_ptr<Lease> lease;
  Events before;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto ranges = space_.allocate(size, /*most_pieces=*/1);
    if (ranges.empty()) return nullptr;
    lease = std::make_shared<Lease>(shared_from_this(), ranges[0], size);
    if (stream.has_value()) {
      if (*stream != *written_on_) before.push_back(now_on(*written_on_));
      before.insert(before.end(), reads_.begin(), reads_.end());
      reads_.clear();
      written_on_ = stream;
      lease->streams_.push_back(*stream);
    }
  }
  for (const auto& event : before) event->block(*stream);
  const Unseen unseen;
  bytes_at(lease->data(), size, memory_.device()).copy_(bytes, /*non_blocking=*/true);
  return lease;
}

size_t Arena::in_use() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return space_.in_use();
}

size_t Arena::high_water() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return space_.high_water();
}

void Arena::release(offload::Range range, const Streams& streams) {
  const std::lock_guard<std::mutex> lock(mutex_);
  try {
    for (const auto& stream : streams) {
      if (stream != *written_on_) reads_.push_back(now_on(stream));
    }
  } catch (const std::exception&) {  // the device is gone
  }
  space_.free(range);
}

Lease::Lease(std::shared_ptr<Arena> arena, offload::Range range, size_t bytes)
    : arena_(std::move(arena)), range_(range), bytes_(bytes) {}

Lease::~Lease() {
  arena_->release(range_, streams_);
}

void* Lease::data() const {
  return static_cast<std::byte*>(arena_->memory_.mutable_data_ptr()) + range_.offset;
}

at::Tensor Lease::tensor() {
  const auto device = arena_->memory_.device();
  if (const auto stream = current_stream(device)) {
    const std::lock_guard<std::mutex> lock(arena_->mutex_);
    if (std::find(streams_.begin(), streams_.end(), *stream) == streams_.end()) {
      now_on(streams_[0])->block(*stream);
      streams_.push_back(*stream);
    }
  }
  const Unseen unseen;
  return at::for_blob(data(), {static_cast<int64_t>(bytes_)})
      .options(at::TensorOptions().dtype(at::kByte).device(device))
      .target_device(device)
      .deleter([lease = shared_from_this()](void*) mutable { lease.reset(); })
      .make_tensor();
}

}  // namespace memopt::saved
