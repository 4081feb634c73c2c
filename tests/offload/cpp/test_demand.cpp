// Demand: the slab that it asks for has room for the step that it was told of, and for no more.
#include <algorithm>
#include <map>
#include <random>

#include "../../../csrc/offload/demand.h"
#include "../../../csrc/offload/space.h"
#include "../../support/check.h"

using memopt::offload::Demand;
using memopt::offload::Range;
using memopt::offload::Space;

namespace {

constexpr size_t kUnit = 64;

bool all(Demand::Id) {
  return true;
}

// A step, as (id, bytes): bytes of 0 are the end.
using Steps = std::vector<std::pair<Demand::Id, size_t>>;

Demand demand_of(const Steps& steps) {
  Demand demand(kUnit);
  for (const auto& [id, bytes] : steps) {
    if (bytes == 0) {
      demand.end(id);
    } else {
      CHECK(demand.begin(bytes) == id);
    }
  }
  return demand;
}

bool finds_room(const Steps& steps, size_t slab) {
  Space space(kUnit);
  space.grow(slab, /*wall=*/false);
  std::map<Demand::Id, Range> held;
  for (const auto& [id, bytes] : steps) {
    if (bytes == 0) {
      space.free(held.at(id));
      continue;
    }
    const auto ranges = space.allocate(bytes, /*most_pieces=*/1);
    if (ranges.empty()) return false;
    held[id] = ranges[0];
  }
  return true;
}

Steps random_step(std::mt19937& random, size_t requests) {
  Steps steps;
  std::vector<Demand::Id> held;
  size_t begun = 0;
  while (begun < requests || !held.empty()) {
    if (begun < requests && (held.empty() || random() % 2 == 0)) {
      steps.emplace_back(begun, 1 + random() % (8 * kUnit));
      held.push_back(begun++);
    } else {
      const size_t which = random() % held.size();
      steps.emplace_back(held[which], 0);
      held.erase(held.begin() + static_cast<std::ptrdiff_t>(which));
    }
  }
  return steps;
}

}  // namespace

TEST(what_comes_last_goes_first_needs_the_peak_to_the_byte) {
  Demand demand(kUnit);
  for (const size_t bytes : {1, 64, 65, 1000}) demand.begin(bytes);
  for (const Demand::Id id : {3, 2, 1, 0}) demand.end(id);
  CHECK(demand.begun() == 4 && demand.most_held() == 4);
  demand.begin(1);
  demand.end(4);
  CHECK(demand.begun() == 5 && demand.most_held() == 4);
  CHECK(demand.most() == (1 + 1 + 2 + 16) * kUnit);
  CHECK(demand.slab_bytes(all) == demand.most());
}

TEST(what_is_still_held_counts) {
  Demand demand(kUnit);
  demand.begin(kUnit);
  demand.begin(kUnit);
  CHECK(demand.slab_bytes(all) == 2 * kUnit);
}

TEST(an_empty_step_needs_nothing) {
  CHECK(Demand(kUnit).slab_bytes(all) == 0);
}

TEST(what_does_not_count_needs_no_room) {
  Demand demand(kUnit);
  for (int i = 0; i < 3; ++i) demand.begin((1 + i) * kUnit);
  CHECK(demand.slab_bytes([](Demand::Id id) { return id != 1; }) == 4 * kUnit);
  CHECK(demand.slab_bytes([](Demand::Id) { return false; }) == 0);
}

TEST(gaps_take_more_than_the_peak) {
  // Two small ones with a gap between, and then one that is as large as both gaps together.
  const Steps steps = {{0, kUnit}, {1, kUnit}, {2, kUnit}, {0, 0}, {2, 0}, {3, 2 * kUnit}};
  const Demand demand = demand_of(steps);
  CHECK(demand.most() == 3 * kUnit);
  CHECK(!finds_room(steps, demand.most()));
  CHECK(finds_room(steps, demand.slab_bytes(all)));
  CHECK(demand.slab_bytes(all) < 6 * kUnit);
}

TEST(random_steps_find_room) {
  std::mt19937 random(0);
  size_t exact = 0;
  for (int round = 0; round < 300; ++round) {
    const Steps steps = random_step(random, 1 + random() % 40);
    const Demand demand = demand_of(steps);
    const size_t slab = demand.slab_bytes(all);
    CHECK(slab >= demand.most());
    CHECK(finds_room(steps, slab));
    CHECK(demand.most() == kUnit || !finds_room(steps, demand.most() - kUnit));
    exact += slab == demand.most();
  }
  CHECK(exact > 50);
}
