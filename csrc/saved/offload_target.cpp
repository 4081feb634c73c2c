#include "offload_target.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>

#include "../offload/file_backend.h"
#include "stream_backend.h"

namespace memopt::saved {

namespace {

struct Registry {
  std::mutex mutex;
  OffloadLimits limits;
  std::map<std::string, std::shared_ptr<OffloadTarget>> targets;

  static Registry& get() {
    static auto* registry = new Registry;  // kept at exit, as tensors may be that hold engines
    return *registry;
  }
};

void warn(const std::string& text) {
  TORCH_WARN(text);
}

}  // namespace

std::shared_ptr<OffloadTarget> OffloadTarget::get(const std::string& directory) {
  auto& registry = Registry::get();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  auto& target = registry.targets[directory];
  if (target == nullptr) target = std::make_shared<OffloadTarget>(directory);
  return target;
}

std::vector<std::shared_ptr<OffloadTarget>> OffloadTarget::all() {
  auto& registry = Registry::get();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  std::vector<std::shared_ptr<OffloadTarget>> targets;
  for (const auto& entry : registry.targets) targets.push_back(entry.second);
  return targets;
}

void OffloadTarget::set_limits(OffloadLimits limits) {
  {
    auto& registry = Registry::get();
    const std::lock_guard<std::mutex> lock(registry.mutex);
    registry.limits = limits;
  }
  empty_cache();
}

OffloadLimits OffloadTarget::limits() {
  auto& registry = Registry::get();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  return registry.limits;
}

size_t OffloadTarget::empty_cache() {
  size_t bytes = 0;
  for (const auto& target : all()) bytes += target->trim();
  return bytes;
}

std::shared_ptr<OffloadDevice> OffloadTarget::device(c10::Device device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (const auto found = devices_.find(device); found != devices_.end()) return found->second;
  const auto limits = OffloadTarget::limits();
  std::unique_ptr<offload::Backend> backend;
  if (is_disk()) {
    offload::FileBackendOptions options;
    options.file.directory = directory_;
    options.checksums = limits.checksums;
    backend = std::make_unique<offload::FileBackend>(std::make_shared<TensorDevice>(device),
                                                     std::move(options));
  } else {
    backend = std::make_unique<StreamBackend>(device, limits.most_host_bytes);
  }
  const auto made = std::make_shared<OffloadDevice>(
      device, std::make_shared<offload::Engine>(
                  std::move(backend), offload::EngineOptions{limits.copies_in_flight, warn}));
  devices_.emplace(device, made);
  return made;
}

OffloadTarget::Devices OffloadTarget::devices() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return devices_;
}

size_t OffloadTarget::copies_in_flight() {
  size_t most = limits().copies_in_flight;
  for (const auto& [_, device] : devices()) {
    most = std::max(most, device->engine->copies_in_flight());
  }
  return most;
}

std::shared_ptr<offload::Sequence> OffloadDevice::sequence_of_thread() {
  const std::lock_guard<std::mutex> lock(mutex_);
  // Threads come and go.
  for (auto entry = sequences_.begin(); entry != sequences_.end();) {
    const bool is_unused = entry->second.use_count() == 1;
    entry = is_unused ? sequences_.erase(entry) : std::next(entry);
  }
  auto& sequence = sequences_[std::this_thread::get_id()];
  if (sequence == nullptr) sequence = std::make_shared<offload::Sequence>();
  return sequence;
}

size_t OffloadTarget::trim() {
  size_t bytes = 0;
  for (const auto& [device, made] : devices()) {
    made->engine->synchronize();
    bytes += made->engine->backend().trim();
    // One that nothing is away in can be made anew, with the limits of then.
    const auto stats = made->engine->stats();
    if (stats.bytes_away != 0 || stats.bytes_held != 0) continue;
    bytes += stats.room.allocated;  // a file goes whole
    const std::lock_guard<std::mutex> lock(mutex_);
    devices_.erase(device);
  }
  return bytes;
}

}  // namespace memopt::saved
