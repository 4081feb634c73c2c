#include "labels.h"

#include <algorithm>
#include <array>
#include <limits>
#include <tuple>

namespace memopt::plan {

namespace {

using Bounds = std::array<Bytes, 5>;

Bounds bounds(const Label& label) {
  return {label.held.resident, label.peak, label.held.leaving, label.offloaded,
          label.held.returning};
}

bool is_within(const Bounds& less, const Bounds& more) {
  bool within = true;
  for (size_t i = 0; i < less.size(); ++i) within &= less[i] <= more[i];
  return within;
}

void lower(Bounds& least, const Bounds& other) {
  for (size_t i = 0; i < least.size(); ++i) least[i] = std::min(least[i], other[i]);
}

// What was kept so far, in the order of ticks. Groups of groups, each with the least of its
// members: most of them are passed over by one comparison. From the last to the first, since those
// with much less time hold more.
class Kept {
 public:
  bool has_one_within(const Bounds& candidate) const {
    for (size_t o = outer_.size(); o-- > 0;) {
      if (!is_within(outer_[o], candidate)) continue;
      const auto inner_end = std::min(inner_.size(), (o + 1) * kGroup);
      for (size_t i = inner_end; i-- > o * kGroup;) {
        if (!is_within(inner_[i], candidate)) continue;
        const auto end = std::min(kept_.size(), (i + 1) * kGroup);
        for (size_t k = end; k-- > i * kGroup;) {
          if (is_within(kept_[k], candidate)) return true;
        }
      }
    }
    return false;
  }

  void add(const Bounds& added) {
    constexpr auto kMost = std::numeric_limits<Bytes>::max();
    constexpr Bounds kNone = {kMost, kMost, kMost, kMost, kMost};
    if (kept_.size() % kGroup == 0) inner_.push_back(kNone);
    if (kept_.size() % (kGroup * kGroup) == 0) outer_.push_back(kNone);
    kept_.push_back(added);
    lower(inner_.back(), added);
    lower(outer_.back(), added);
  }

 private:
  static constexpr size_t kGroup = 16;
  std::vector<Bounds> kept_;
  std::vector<Bounds> inner_;
  std::vector<Bounds> outer_;
};

// Cells that were seen, by a hash of their place: where two places had the same, a label more would
// be dropped.
class Cells {
 public:
  Cells(size_t most, Bytes grid) : grid_(grid) {
    size_t size = 16;
    while (size < 2 * most) size *= 2;
    seen_.resize(size, 0);
  }

  // Whether it was not there.
  bool insert(const Bounds& place) {
    uint64_t hash = 0x9e3779b97f4a7c15;
    for (const auto bytes : place) {
      hash ^= static_cast<uint64_t>(bytes / grid_);
      hash *= 0xff51afd7ed558ccd;
      hash ^= hash >> 32;
    }
    hash |= 1;  // 0 is an empty place
    auto slot = (hash >> 1) & (seen_.size() - 1);
    for (; seen_[slot] != 0; slot = (slot + 1) & (seen_.size() - 1)) {
      if (seen_[slot] == hash) return false;
    }
    seen_[slot] = hash;
    return true;
  }

 private:
  Bytes grid_;
  std::vector<uint64_t> seen_;
};

}  // namespace

void drop_dominated(std::vector<Label>& labels, Bytes grid) {
  // Whoever is at least as good as another one comes before it.
  std::sort(labels.begin(), labels.end(), [](const Label& a, const Label& b) {
    if (a.ticks != b.ticks) return a.ticks < b.ticks;
    return bounds(a) < bounds(b);
  });
  Kept kept;
  Cells cells(grid > 0 ? labels.size() : 0, grid);
  size_t count = 0;
  for (size_t i = 0; i < labels.size(); ++i) {
    const auto candidate = bounds(labels[i]);
    if (grid > 0 && !cells.insert(candidate)) continue;
    if (kept.has_one_within(candidate)) continue;
    kept.add(candidate);
    labels[count++] = labels[i];
  }
  labels.resize(count);
}

}  // namespace memopt::plan
