// Labels that are dropped against a comparison of each with each.
#include <tuple>

#include "../../../csrc/plan/labels.h"
#include "../../support/check.h"
#include "brute_force.h"

using brute_force::one_of;
using brute_force::Random;
using brute_force::up_to;
using memopt::plan::Bytes;
using memopt::plan::drop_dominated;
using memopt::plan::Label;

namespace {

std::vector<Bytes> all_of(const Label& label) {
  return {label.ticks,        label.peak,           label.held.resident,
          label.held.leaving, label.held.returning, label.offloaded};
}

bool is_as_good(const Label& one, const Label& other) {
  const auto mine = all_of(one);
  const auto its = all_of(other);
  for (size_t i = 0; i < mine.size(); ++i) {
    if (mine[i] > its[i]) return false;
  }
  return true;
}

// Few values in some of the numbers, as in real chains: many labels are equal in them.
std::vector<Label> random_labels(Random& random) {
  const auto most = one_of<Bytes>(random, {1, 4, 1000});
  const auto spread = one_of<Bytes>(random, {0, 1, 4, 1000});
  std::vector<Label> labels(1 + random() % 400);
  for (uint32_t i = 0; i < labels.size(); ++i) {
    labels[i] = {up_to(random, most),
                 up_to(random, spread),
                 {up_to(random, most), up_to(random, spread), up_to(random, spread)},
                 up_to(random, spread),
                 i,
                 0};
  }
  return labels;
}

}  // namespace

TEST(what_is_left_is_what_nothing_is_as_good_as) {
  Random random(1);
  for (int n = 0; n < 60; ++n) {
    const auto given = random_labels(random);
    auto left = given;
    drop_dominated(left, 0);
    for (const auto& label : given) {
      const auto covers = [&](const Label& other) { return is_as_good(other, label); };
      CHECK(std::count_if(left.begin(), left.end(), covers) >= 1);
    }
    for (size_t i = 0; i < left.size(); ++i) {
      CHECK(all_of(left[i]) == all_of(given[left[i].before]));  // whole, and one of those given
      for (size_t k = 0; k < left.size(); ++k) CHECK(k == i || !is_as_good(left[k], left[i]));
      CHECK(i == 0 || left[i - 1].ticks <= left[i].ticks);
    }
  }
}

TEST(a_grid_drops_only_what_is_nearly_the_same) {
  Random random(2);
  size_t dropped = 0;
  for (int n = 0; n < 60; ++n) {
    const auto given = random_labels(random);
    const Bytes grid = one_of<Bytes>(random, {1, 2, 16, 1024});
    auto exact = given;
    drop_dominated(exact, 0);
    auto left = given;
    drop_dominated(left, grid);
    dropped += exact.size() - std::min(exact.size(), left.size());
    for (const auto& label : given) {
      const auto covers = [&](const Label& other) {
        auto more = label;
        for (auto* bytes : {&more.peak, &more.held.resident, &more.held.leaving,
                            &more.held.returning, &more.offloaded}) {
          *bytes += grid;
        }
        return is_as_good(other, more);
      };
      CHECK(std::count_if(left.begin(), left.end(), covers) >= 1);
    }
  }
  CHECK(dropped > 100);
}
