// Every plan of a small problem, by formulas of its own, and small problems at random.
#pragma once

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "../../../csrc/plan/problem.h"

namespace brute_force {

using memopt::plan::Bytes;
using memopt::plan::Choice;
using memopt::plan::Problem;
using memopt::plan::Stage;

using Random = std::mt19937_64;

struct Found {
  std::vector<size_t> choices;
  double seconds = 0;
  Bytes peak = 0;
  Bytes offloaded = 0;
};

// One plan, instant by instant: forward of each stage, then backward from the last one on, with a
// queue of bytes on their way out and what the stage before has to bring back.
inline Found take(const Problem& problem, const std::vector<size_t>& choices) {
  const auto count = problem.stages.size();
  const auto choice = [&](size_t i) { return problem.stages[i].choices[choices[i]]; };
  Found found{choices, 0, problem.base + problem.optimizer, 0};
  std::vector<Bytes> resident{0};  // before each stage
  std::vector<Bytes> queue{0};
  for (size_t i = 0; i < count; ++i) {
    const Choice& now = choice(i);
    found.peak = std::max(found.peak, problem.base + resident[i] + queue[i] + now.forward);
    const auto sent = static_cast<Bytes>(std::floor(problem.link.out * now.forward_seconds));
    auto left = std::max<Bytes>(0, queue[i] + now.offloaded - sent);
    const auto too_many = std::max<Bytes>(0, left - problem.link.in_flight);
    left -= too_many;
    found.seconds += now.forward_seconds + static_cast<double>(too_many) / problem.link.out;
    found.offloaded += now.offloaded;
    resident.push_back(resident[i] + now.resident);
    queue.push_back(left);
  }
  found.seconds += static_cast<double>(choice(count - 1).offloaded) / problem.link.back;
  for (size_t i = count; i-- > 0;) {
    const Choice& now = choice(i);
    const Bytes returning = i > 0 ? choice(i - 1).offloaded : 0;
    const Bytes held = resident[i] + queue[i + 1] + returning;
    found.peak = std::max(found.peak,
                          problem.base + held + now.backward + problem.stages[i].before_backward);
    const double back = static_cast<double>(returning) / problem.link.back;
    found.seconds += now.backward_seconds + std::max(0.0, back - now.backward_seconds);
  }
  return found;
}

// All that there is room for.
inline std::vector<Found> all_plans(const Problem& problem) {
  std::vector<Found> plans;
  std::vector<size_t> choices(problem.stages.size(), 0);
  while (true) {
    auto found = take(problem, choices);
    if (found.offloaded <= problem.link.room) plans.push_back(std::move(found));
    size_t i = 0;
    while (i < choices.size() && ++choices[i] == problem.stages[i].choices.size()) choices[i++] = 0;
    if (i == choices.size()) return plans;
  }
}

template <typename T>
T one_of(Random& random, std::initializer_list<T> values) {
  return values.begin()[random() % values.size()];
}

// From 0 to `most`.
inline Bytes up_to(Random& random, Bytes most) {
  return static_cast<Bytes>(random() % static_cast<uint64_t>(most + 1));
}

// Seconds are multiples of 1/8 and rates powers of two: all sums are exact, and many plans take the
// same time.
inline Problem random_problem(Random& random) {
  const auto most = one_of<Bytes>(random, {3, 20, 1000});
  const bool offloads = random() % 10 < 7;
  Problem problem;
  problem.base = up_to(random, most);
  problem.optimizer = up_to(random, 5 * most);
  Bytes needed = 0;
  for (auto count = 1 + random() % 5; count > 0; --count) {
    const auto before = up_to(random, most);
    if (!problem.stages.empty() && random() % 2 == 0) {
      problem.stages.push_back(problem.stages.back());
      problem.stages.back().before_backward = before;
    } else {
      Stage stage;
      stage.before_backward = before;
      for (auto choices = 1 + random() % 4; choices > 0; --choices) {
        stage.choices.push_back({up_to(random, most), up_to(random, most), up_to(random, most),
                                 static_cast<double>(random() % 25) / 8,
                                 static_cast<double>(random() % 25) / 8,
                                 offloads && random() % 10 < 6 ? up_to(random, most) : 0});
      }
      problem.stages.push_back(std::move(stage));
    }
    Bytes least = problem.stages.back().choices[0].offloaded;
    for (const auto& choice : problem.stages.back().choices) {
      least = std::min(least, choice.offloaded);
    }
    needed += least;
  }
  problem.link = {std::ldexp(1.0, static_cast<int>(random() % 13) - 2),
                  std::ldexp(1.0, static_cast<int>(random() % 13) - 2),
                  needed + one_of<Bytes>(random, {0, most, 3 * most, 1000000}),
                  one_of<Bytes>(random, {0, most, 2 * most, 1000000})};
  return problem;
}

}  // namespace brute_force
