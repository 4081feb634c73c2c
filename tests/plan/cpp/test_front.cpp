// The plans of all budgets against every plan that there is: on small chains at random, at the
// floor, where many cost the same, and where there are too many to tell all apart.
#include <limits>
#include <utility>

#include "../../../csrc/plan/front.h"
#include "../../support/check.h"
#include "brute_force.h"

using brute_force::all_plans;
using brute_force::Found;
using brute_force::Random;
using brute_force::random_problem;
using brute_force::up_to;
using memopt::plan::Bytes;
using memopt::plan::Chain;
using memopt::plan::Choice;
using memopt::plan::evaluate;
using memopt::plan::find_front;
using memopt::plan::Front;
using memopt::plan::kMostBytes;
using memopt::plan::Plan;
using memopt::plan::Problem;
using memopt::plan::Stage;

namespace {

constexpr Bytes kAll = std::numeric_limits<Bytes>::max();

// Of the plans within a budget the fastest, of those the one of least peak; null: there is none.
const Found* best(const std::vector<Found>& plans, Bytes budget) {
  const Found* found = nullptr;
  for (const auto& plan : plans) {
    if (plan.peak > budget) continue;
    const std::pair mine(plan.seconds, plan.peak);
    if (found == nullptr || mine < std::pair(found->seconds, found->peak)) found = &plan;
  }
  return found;
}

Bytes least_peak(const std::vector<Found>& plans) {
  Bytes least = kAll;
  for (const auto& plan : plans) least = std::min(least, plan.peak);
  return least;
}

// What is said of a plan is what it takes, and what the timeline says.
void check_plan(const Chain& chain, const Plan& plan) {
  const auto taken = brute_force::take(chain.problem(), plan.choices);
  CHECK(taken.peak == plan.peak);
  CHECK(taken.seconds == chain.seconds(plan.ticks));
  CHECK(taken.offloaded <= chain.problem().link.room);
  const auto timeline = evaluate(chain, plan.choices);
  CHECK(timeline.peak == plan.peak);
  CHECK(timeline.seconds == taken.seconds);
  CHECK(timeline.offloaded == taken.offloaded);
}

void check_monotone(const Front& front) {
  for (size_t i = 1; i < front.plans.size(); ++i) {
    CHECK(front.plans[i - 1].peak < front.plans[i].peak);
    CHECK(front.plans[i - 1].ticks > front.plans[i].ticks);
  }
}

}  // namespace

TEST(the_best_of_all_plans_at_every_budget) {
  Random random(1);
  size_t plans_in_all = 0;
  for (int n = 0; n < 1500; ++n) {
    const Chain chain(random_problem(random));
    const auto plans = all_plans(chain.problem());
    const auto front = find_front(chain);
    plans_in_all += plans.size();
    CHECK(front.grid == 0 && front.floor_grid == 0);
    check_monotone(front);
    for (const auto& plan : front.plans) check_plan(chain, plan);
    for (const auto& other : plans) {
      const auto* wanted = best(plans, other.peak);
      const auto* found = front.at(other.peak);
      CHECK(found != nullptr);
      CHECK(found->peak == wanted->peak);
      CHECK(chain.seconds(found->ticks) == wanted->seconds);
    }
  }
  CHECK(plans_in_all > 50000);
}

TEST(the_floor_and_nothing_below_it) {
  Random random(2);
  for (int n = 0; n < 1000; ++n) {
    const Chain chain(random_problem(random));
    const auto floor = least_peak(all_plans(chain.problem()));
    const auto front = find_front(chain);
    CHECK(front.plans.front().peak == floor);
    CHECK(front.at(floor) == &front.plans.front());
    CHECK(front.at(floor - 1) == nullptr);
    CHECK(front.at(kAll) == &front.plans.back());
  }
}

// Twelve blocks that may be kept or run again: of 2^12 plans those that run equally many again take
// the same time, in every order.
TEST(one_plan_of_those_that_cost_the_same) {
  const Choice keep{10, 12, 20, 1, 2};
  const Choice again{1, 12, 21, 1, 3};
  Problem problem;
  problem.stages.assign(12, Stage{{keep, again}, 0});
  problem.stages.push_back(Stage{{Choice{0, 5, 40, 1, 1}}, 0});
  const Chain chain(problem);
  const auto plans = all_plans(problem);
  CHECK(plans.size() == 4096);
  const auto front = find_front(chain);
  check_monotone(front);
  CHECK(front.plans.size() == 13);
  for (size_t kept = 0; kept < front.plans.size(); ++kept) {
    const auto& plan = front.plans[kept];
    check_plan(chain, plan);
    const auto is_kept = [](size_t choice) { return choice == 0; };
    CHECK(std::count_if(plan.choices.begin(), plan.choices.end() - 1, is_kept) ==
          static_cast<std::ptrdiff_t>(kept));
    CHECK(best(plans, plan.peak)->seconds == chain.seconds(plan.ticks));
  }
}

TEST(equal_choices_are_one) {
  const Choice only{3, 4, 5, 1, 1};
  Problem problem;
  problem.stages.assign(6, Stage{{only, only, only}, 2});
  const auto front = find_front(Chain(problem));
  CHECK(front.plans.size() == 1);
  CHECK(front.most_labels == 1);
}

// The less a choice holds the longer it takes; bytes are a few sizes and a little each, so that a
// fine grid takes many plans for one.
static Problem nearly_equal(Random& random) {
  Problem problem;
  problem.link = {1 << 20, 1 << 20, kAll, 3000000};
  for (int stage = 0; stage < 5; ++stage) {
    Stage made;
    for (const Bytes kept : {0, 1, 1, 2, 2, 3}) {
      const auto work = 2000000 + up_to(random, 60);
      const auto offloaded = random() % 3 == 0 ? kept / 2 * 1000000 : 0;
      const double seconds =
          1 + static_cast<double>(3 - kept) / 4 + static_cast<double>(random() % 4) / 64;
      made.choices.push_back(
          {kept * 1000000 - offloaded + up_to(random, 60), work, work, 1, seconds, offloaded});
    }
    problem.stages.push_back(std::move(made));
  }
  return problem;
}

TEST(on_a_grid_plans_are_real_and_within_its_bound) {
  Random random(3);
  int merged = 0;
  int bounded = 0;
  for (int n = 0; n < 12; ++n) {
    for (const size_t most_labels : {size_t{1}, size_t{8}, size_t{70}}) {
      const Chain chain(nearly_equal(random));
      const auto& link = chain.problem().link;
      const auto front = find_front(chain, most_labels);
      check_monotone(front);
      for (const auto& plan : front.plans) check_plan(chain, plan);
      if (front.grid == 0) continue;
      ++merged;
      CHECK((front.grid & (front.grid - 1)) == 0);
      const auto plans = all_plans(chain.problem());
      if (front.floor_grid == 0) CHECK(front.plans.front().peak == least_peak(plans));
      // front.h: a label stands for others with less of what they hold, two grids at each stage.
      const auto error = 2 * static_cast<Bytes>(chain.problem().stages.size()) * front.grid;
      const auto late =
          static_cast<double>(error) / link.out + static_cast<double>(error) / link.back;
      for (size_t i = 0; i < plans.size(); i += 97) {
        const auto budget = plans[i].peak;
        const auto* found = front.at(budget);
        const auto* wanted = best(plans, budget - 3 * error);
        if (wanted == nullptr || found == nullptr) continue;
        ++bounded;
        CHECK(found->peak <= budget);
        CHECK(chain.seconds(found->ticks) <= wanted->seconds + late);
      }
    }
  }
  CHECK(merged > 20);
  CHECK(bounded > 300);
}

TEST(as_many_bytes_as_there_may_be) {
  Random random(4);
  for (int n = 0; n < 200; ++n) {
    auto problem = random_problem(random);
    const auto most = 200 * 1000;  // of all of such a problem's bytes together
    const auto scale = kMostBytes / most;
    problem.base *= scale;
    problem.optimizer *= scale;
    problem.link.room = kAll;
    problem.link.in_flight = kAll;
    for (auto& stage : problem.stages) {
      stage.before_backward *= scale;
      for (auto& choice : stage.choices) {
        for (auto* bytes :
             {&choice.resident, &choice.forward, &choice.backward, &choice.offloaded}) {
          *bytes *= scale;
        }
      }
    }
    problem.link.out *= static_cast<double>(scale);
    problem.link.back *= static_cast<double>(scale);
    const Chain chain(problem);
    const auto front = find_front(chain);
    check_monotone(front);
    CHECK(front.plans.front().peak == least_peak(all_plans(problem)));
  }
}

TEST(a_hundred_blocks) {
  const Choice keep{1 << 28, 1 << 28, 1 << 29, 0.25, 0.5};
  const Choice recipes{5 << 25, 1 << 28, 1 << 29, 0.25, 0.53125};
  const Choice again{1 << 24, 1 << 28, 3 << 28, 0.25, 0.75};
  Problem problem;
  for (Bytes left = 100; left > 0; --left) {
    problem.stages.push_back({{keep, recipes, again}, left << 25});
  }
  const Chain chain(problem);
  const auto front = find_front(chain);
  CHECK(front.grid == 0);
  check_monotone(front);
  for (const auto& plan : front.plans) check_plan(chain, plan);
  CHECK(front.plans.back().choices == std::vector<size_t>(100, 0));
}
