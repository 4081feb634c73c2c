// What a plan takes: by numbers worked out on paper, against the formulas of brute_force.h, and in
// times of which no power of two is a unit.
#include <cmath>

#include "../../../csrc/plan/timeline.h"
#include "../../support/check.h"
#include "brute_force.h"

using brute_force::all_plans;
using brute_force::Random;
using brute_force::random_problem;
using memopt::plan::Bytes;
using memopt::plan::Chain;
using memopt::plan::Choice;
using memopt::plan::evaluate;
using memopt::plan::kMostBytes;
using memopt::plan::Phase;
using memopt::plan::Problem;
using memopt::plan::Stage;

TEST(by_hand) {
  Problem problem;
  problem.base = 100;
  problem.optimizer = 60;
  problem.link = {8, 4, 1000, 20};
  problem.stages = {Stage{{Choice{10, 20, 30, 1, 2, 16}}, 7},
                    Stage{{Choice{3, 25, 12, 2, 3, 40}}, 4}, Stage{{Choice{0, 1, 2, 0.5, 1}}, 0}};
  const auto found = evaluate(Chain(problem), {0, 0, 0});
  // On the way out: 0, 16 - 8 = 8, 8 + 40 - 16 = 32 of which 12 are waited for, 20 - 4 = 16.
  CHECK((found.forward_peaks == std::vector<Bytes>{120, 100 + 10 + 8 + 25, 100 + 13 + 20 + 1}));
  CHECK((found.forward_waits == std::vector<double>{0, 12.0 / 8, 0}));
  CHECK((found.backward_peaks == std::vector<Bytes>{100 + 8 + 30 + 7, 100 + 10 + 20 + 16 + 12 + 4,
                                                    100 + 13 + 16 + 40 + 2}));
  CHECK((found.backward_waits == std::vector<double>{16.0 / 4 - 3, 40.0 / 4 - 1, 0}));
  CHECK(found.optimizer_peak == 160);
  CHECK(found.peak == 171 && found.peak_phase == Phase::kBackward && found.peak_stage == 2);
  CHECK(found.wait_seconds == 11.5);
  CHECK(found.seconds == 9.5 + 11.5);
  CHECK(found.offloaded == 56);
}

TEST(every_plan_of_small_chains) {
  Random random(1);
  for (int n = 0; n < 1000; ++n) {
    const Chain chain(random_problem(random));
    for (const auto& plan : all_plans(chain.problem())) {
      const auto found = evaluate(chain, plan.choices);
      CHECK(found.peak == plan.peak);
      CHECK(found.seconds == plan.seconds);
      CHECK(found.offloaded == plan.offloaded);
    }
  }
}

// Ticks are below 2^-60 of all the time: sums are right within rounding, for any unit.
TEST(times_of_any_size) {
  Random random(2);
  for (int n = 0; n < 300; ++n) {
    auto problem = random_problem(random);
    const double factor = std::pow(10.0, static_cast<double>(random() % 13) - 9) * 0.7;
    for (auto& stage : problem.stages) {
      for (auto& choice : stage.choices) {
        choice.forward_seconds *= factor;
        choice.backward_seconds *= factor;
      }
    }
    problem.link.out /= factor;
    problem.link.back /= factor;
    const Chain chain(problem);
    for (const auto& plan : all_plans(problem)) {
      const auto found = evaluate(chain, plan.choices);
      CHECK(std::abs(found.seconds - plan.seconds) <= 1e-12 * plan.seconds);
      CHECK(found.peak == plan.peak);
    }
  }
}

TEST(no_time_at_all) {
  Problem problem;
  problem.stages = {Stage{{Choice{1, 1, 1, 0, 0}}, 0}};
  CHECK(evaluate(Chain(problem), {0}).seconds == 0);
}

TEST(what_cannot_be) {
  const Stage good{{Choice{1, 1, 1, 1, 1}}, 0};
  CHECK_RAISES("at least one stage", Chain(Problem{}));
  const auto refused = [&](const char* text, auto change) {
    Problem problem;
    problem.stages = {good};
    change(problem);
    CHECK_RAISES(text, Chain{problem});
  };
  refused("stage 0 needs at least one choice", [](Problem& p) { p.stages[0].choices.clear(); });
  refused("base must be at least 0, got -1", [](Problem& p) { p.base = -1; });
  refused("all bytes together", [](Problem& p) { p.base = kMostBytes + 1; });
  refused("all bytes together", [](Problem& p) {
    p.base = kMostBytes - 1;
    p.stages[0].choices[0].resident = 2;
  });
  refused("forward_seconds must be",
          [](Problem& p) { p.stages[0].choices[0].forward_seconds = std::nan(""); });
  refused("all seconds together", [](Problem& p) {
    p.stages[0].choices[0].forward_seconds = p.stages[0].choices[0].backward_seconds = 1e308;
  });
  refused("link.out must be", [](Problem& p) { p.link.out = 0; });
  refused("link.room must be at least 5", [](Problem& p) { p.stages[0].choices[0].offloaded = 5; });
  Problem problem;
  problem.stages = {good, good};
  const Chain chain(problem);
  CHECK_RAISES("one entry for each of the 2 stages, got 1", evaluate(chain, {0}));
  CHECK_RAISES("stage 1 has 1 choices, got choice 3", evaluate(chain, {0, 3}));
}
