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
    if (kept_.size() % (kGroup * kGroup) == 0) sort_last_group();
  }

 private:
  // By what is resident: so that the least of 16 members is much like each of them.
  void sort_last_group() {
    const auto begin = kept_.size() - kGroup * kGroup;
    std::sort(kept_.begin() + begin, kept_.end());
    for (auto k = begin; k < kept_.size(); ++k) {
      auto& least = inner_[k / kGroup];
      if (k % kGroup == 0) least = kept_[k];
      lower(least, kept_[k]);
    }
  }

  static constexpr size_t kGroup = 16;
  std::vector<Bounds> kept_;
  std::vector<Bounds> inner_;
  std::vector<Bounds> outer_;
};

bool is_before(const Label& a, const Label& b) {
  if (a.ticks != b.ticks) return a.ticks < b.ticks;
  return bounds(a) < bounds(b);
}

uint64_t cell(const Bounds& place, int log2_grid) {
  uint64_t hash = 0x9e3779b97f4a7c15;
  for (const auto bytes : place) {
    hash ^= static_cast<uint64_t>(bytes >> log2_grid);
    hash *= 0xff51afd7ed558ccd;
    hash ^= hash >> 32;
  }
  return hash;
}

// Leaves of each cell its first label, in a table of open addresses. A cell is known by its hash:
// where two had the same, a label more would go.
void keep_one_of_each_cell(std::vector<Label>& labels, Bytes grid) {
  int log2_grid = 0;
  while ((Bytes{1} << log2_grid) < grid) ++log2_grid;
  size_t size = 16;
  while (size < 2 * labels.size()) size *= 2;
  struct Place {
    uint64_t cell = 0;
    size_t label_plus_one = 0;  // 0: free
  };
  std::vector<Place> places(size);
  size_t count = 0;
  for (size_t i = 0; i < labels.size(); ++i) {
    const auto hash = cell(bounds(labels[i]), log2_grid);
    auto at = hash & (size - 1);
    while (places[at].label_plus_one != 0 && places[at].cell != hash) at = (at + 1) & (size - 1);
    if (places[at].label_plus_one == 0) {
      places[at] = {hash, count + 1};
      labels[count++] = labels[i];
    } else if (auto& there = labels[places[at].label_plus_one - 1]; is_before(labels[i], there)) {
      there = labels[i];
    }
  }
  labels.resize(count);
}

}  // namespace

void drop_dominated(std::vector<Label>& labels, Bytes grid) {
  if (grid > 0) keep_one_of_each_cell(labels, grid);
  // Whoever is at least as good as another one comes before it.
  std::sort(labels.begin(), labels.end(), is_before);
  Kept kept;
  size_t count = 0;
  for (size_t i = 0; i < labels.size(); ++i) {
    const auto candidate = bounds(labels[i]);
    if (kept.has_one_within(candidate)) continue;
    kept.add(candidate);
    labels[count++] = labels[i];
  }
  labels.resize(count);
}

}  // namespace memopt::plan
