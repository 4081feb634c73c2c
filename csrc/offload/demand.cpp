#include "demand.h"

#include <algorithm>
#include <unordered_map>

#include "space.h"

namespace memopt::offload {

size_t Demand::rounded(size_t bytes) const {
  return Space(alignment_).rounded(bytes);
}

Demand::Id Demand::begin(size_t bytes) {
  sizes_.push_back(rounded(bytes));
  events_.push_back(sizes_.size() - 1);
  most_held_ = std::max(most_held_, ++held_);
  bytes_ += sizes_.back();
  most_ = std::max(most_, bytes_);
  return sizes_.size() - 1;
}

void Demand::end(Id id) {
  events_.push_back(id);
  --held_;
  bytes_ -= sizes_.at(id);
}

size_t Demand::slab_bytes(const std::function<bool(Id)>& counts) const {
  std::vector<bool> is_held(sizes_.size());
  size_t now = 0;
  size_t most = 0;
  for (const Id id : events_) {
    if (!counts(id)) continue;
    now = is_held[id] ? now - sizes_[id] : now + sizes_[id];
    is_held[id] = !is_held[id];
    most = std::max(most, now);
  }
  // Whatever is taken from the end of a slab is taken once, so this ends.
  while (const size_t missing = first_without_room(most, counts)) most += missing;
  return most;
}

size_t Demand::first_without_room(size_t slab, const std::function<bool(Id)>& counts) const {
  if (slab == 0) return 0;
  Space space(alignment_);
  space.grow(slab, /*wall=*/false);
  std::unordered_map<Id, Range> held;
  for (const Id id : events_) {
    if (!counts(id)) continue;
    if (const auto found = held.find(id); found != held.end()) {
      space.free(found->second);
      held.erase(found);
      continue;
    }
    const auto ranges = space.allocate(sizes_[id], /*most_pieces=*/1);
    if (ranges.empty()) return sizes_[id];
    held.emplace(id, ranges[0]);
  }
  return 0;
}

}  // namespace memopt::offload
