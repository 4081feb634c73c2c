#include "slot.h"

#include <algorithm>

#include "region.h"

namespace memopt::saved {

Slot::Slot(c10::intrusive_ptr<Region> region, size_t index)
    : region_(std::move(region)), index_(index) {}

Slot::~Slot() = default;

void Slot::release_resources() {
  rebuilt_.clear();
  region_.reset();
}

at::Tensor Slot::restore() {
  return region_->fill(*this);
}

std::optional<Slot::Rebuilt> Slot::put(int64_t task, at::Tensor tensor) {
  auto before = take(task);
  const Version version(tensor);
  rebuilt_.push_back({task, std::move(tensor), version});
  return before;
}

std::optional<Slot::Rebuilt> Slot::take(int64_t task) {
  const auto found = std::find_if(rebuilt_.begin(), rebuilt_.end(),
                                  [&](const Rebuilt& rebuilt) { return rebuilt.task == task; });
  if (found == rebuilt_.end()) return std::nullopt;
  auto rebuilt = std::move(*found);
  rebuilt_.erase(found);
  return rebuilt;
}

}  // namespace memopt::saved
