// Space against a model that has a byte for each unit: random requests, in random order.
#include <algorithm>
#include <random>

#include "../../../csrc/offload/space.h"
#include "../../support/check.h"

using memopt::offload::Range;
using memopt::offload::Space;

namespace {

constexpr size_t kUnit = 64;

// Who has each unit: 0 nobody, -1 it was taken out.
class Model {
 public:
  void grow(size_t bytes) { owners_.resize(owners_.size() + bytes / kUnit, 0); }

  void give(const std::vector<Range>& ranges, int owner) {
    for (const Range& range : ranges) {
      CHECK(range.bytes > 0 && range.bytes % kUnit == 0 && range.offset % kUnit == 0);
      CHECK((range.offset + range.bytes) / kUnit <= owners_.size());
      for (size_t unit = range.offset; unit < range.offset + range.bytes; unit += kUnit) {
        CHECK(owners_[unit / kUnit] == 0);
        owners_[unit / kUnit] = owner;
      }
    }
  }

  void free(int owner) { std::replace(owners_.begin(), owners_.end(), owner, 0); }

  bool is_free(Range range) const {
    const auto begin = owners_.begin() + range.offset / kUnit;
    return std::all_of(begin, begin + range.bytes / kUnit, [](int owner) { return owner == 0; });
  }

  // Free runs between walls, in bytes.
  std::vector<size_t> runs(const std::vector<size_t>& walls) const {
    std::vector<size_t> found;
    size_t run = 0;
    for (size_t unit = 0; unit <= owners_.size(); ++unit) {
      const bool wall = std::find(walls.begin(), walls.end(), unit * kUnit) != walls.end();
      const bool free = unit < owners_.size() && owners_[unit] == 0;
      if ((wall || !free) && run > 0) found.push_back(run), run = 0;
      if (free) run += kUnit;
    }
    return found;
  }

  size_t in_use() const {
    return kUnit *
           std::count_if(owners_.begin(), owners_.end(), [](int owner) { return owner > 0; });
  }

 private:
  std::vector<int> owners_;
};

struct Given {
  int owner;
  std::vector<Range> ranges;
};

bool crosses(const Range& range, const std::vector<size_t>& walls) {
  return std::any_of(walls.begin(), walls.end(), [&](size_t wall) {
    return wall > range.offset && wall < range.offset + range.bytes;
  });
}

void check_request(const Space& space, const std::vector<size_t>& runs, size_t asked, size_t most,
                   const std::vector<Range>& ranges, const std::vector<size_t>& walls) {
  const size_t bytes = space.rounded(asked);
  const size_t largest = runs.empty() ? 0 : *std::max_element(runs.begin(), runs.end());
  // Largest first: there is no way with fewer pieces.
  std::vector<size_t> sorted = runs;
  std::sort(sorted.rbegin(), sorted.rend());
  size_t fewest = 0, covered = 0;
  while (covered < bytes && fewest < sorted.size()) covered += sorted[fewest++];
  if (covered < bytes || fewest > most) {
    CHECK(ranges.empty());
    return;
  }
  CHECK(ranges.size() == fewest);
  CHECK(largest < bytes || ranges.size() == 1);
  size_t got = 0;
  for (const Range& range : ranges) {
    CHECK(!crosses(range, walls));
    got += range.bytes;
  }
  CHECK(got == bytes);
}

void random_operations(unsigned seed) {
  std::mt19937 random(seed);
  const auto below = [&](size_t n) { return random() % n; };
  Space space(kUnit);
  Model model;
  std::vector<size_t> walls;
  std::vector<Range> grown;
  std::vector<Given> given;
  size_t high_water = 0;
  int owners = 0;
  for (int step = 0; step < 1500; ++step) {
    const size_t what = below(20);
    if (grown.empty() || (what == 0 && grown.size() < 12)) {
      const size_t bytes = kUnit * (1 + below(40));
      const bool wall = below(2);
      if (wall) walls.push_back(space.end());
      grown.push_back({space.end(), bytes});
      space.grow(bytes, wall);
      model.grow(bytes);
    } else if (what < 11) {
      const auto runs = model.runs(walls);
      const size_t asked = 1 + below(kUnit * 30), most = 1 + below(5);
      const auto ranges = space.allocate(asked, most);
      check_request(space, runs, asked, most, ranges, walls);
      if (ranges.empty()) continue;
      model.give(ranges, ++owners);
      given.push_back({owners, ranges});
      high_water = std::max(high_water, model.in_use());
    } else if (what < 19 && !given.empty()) {
      const size_t k = below(given.size());
      for (const Range& range : given[k].ranges) space.free(range);
      model.free(given[k].owner);
      given.erase(given.begin() + k);
    } else if (what == 19) {
      const size_t k = below(grown.size());
      // Between walls: what was grown without one is one range with what lies before.
      const auto at = grown[k].offset, after = at + grown[k].bytes;
      const auto is_wall = [&](size_t offset) {
        return offset == 0 || offset == space.end() ||
               std::find(walls.begin(), walls.end(), offset) != walls.end();
      };
      if (!is_wall(at) || !is_wall(after)) continue;
      const bool is_free = model.is_free(grown[k]);
      CHECK(space.remove(grown[k]) == is_free);
      if (is_free) model.give({grown[k]}, -1), grown.erase(grown.begin() + k);
    }
    CHECK(space.in_use() == model.in_use());
    CHECK(space.high_water() == high_water);
    size_t total = 0;
    for (size_t run : model.runs(walls)) total += run;
    CHECK(space.available() == total);
  }
}

}  // namespace

TEST(agrees_with_a_model) {
  for (unsigned seed = 0; seed < 20; ++seed) random_operations(seed);
}

TEST(takes_the_smallest_range_that_fits) {
  Space space(kUnit);
  space.grow(10 * kUnit, false);
  const Range a = space.allocate(4 * kUnit)[0], b = space.allocate(kUnit)[0];
  const Range c = space.allocate(2 * kUnit)[0];
  space.free(a);
  CHECK(space.allocate(3 * kUnit)[0].offset == c.offset + c.bytes);  // and not from the 4 of a
  CHECK(space.allocate(4 * kUnit)[0].offset == a.offset);
  CHECK(b.offset == 4 * kUnit);
}

TEST(the_same_requests_find_the_same_places) {
  Space space(kUnit);
  space.grow(100 * kUnit, false);
  std::vector<std::vector<Range>> first, second;
  for (auto* step : {&first, &second}) {
    for (size_t bytes : {700, 64, 1000, 300, 64}) step->push_back(space.allocate(bytes));
    for (auto ranges = step->rbegin(); ranges != step->rend(); ++ranges) space.free((*ranges)[0]);
  }
  for (size_t k = 0; k < first.size(); ++k) CHECK(first[k][0].offset == second[k][0].offset);
}

TEST(no_room_changes_nothing) {
  Space space(kUnit);
  space.grow(4 * kUnit, true);
  space.grow(4 * kUnit, true);
  CHECK(space.allocate(5 * kUnit, 1).empty());
  CHECK(space.allocate(9 * kUnit).empty());
  CHECK(space.allocate(SIZE_MAX).empty());
  CHECK(space.in_use() == 0 && space.high_water() == 0);
  CHECK(space.allocate(8 * kUnit).size() == 2);
}

TEST(mistakes_are_found) {
  Space space(kUnit);
  CHECK_RAISES("multiple", space.grow(kUnit + 1, false));
  space.grow(8 * kUnit, false);
  const Range range = space.allocate(4 * kUnit)[0];
  CHECK_RAISES("not in use", space.free({range.offset + 3 * kUnit, 2 * kUnit}));
  space.free(range);
  CHECK_RAISES("not in use", space.free(range));
  CHECK_RAISES("not in use", space.free({8 * kUnit, kUnit}));
}
