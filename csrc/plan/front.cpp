#include "front.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <utility>

#include "labels.h"

namespace memopt::plan {

namespace {

constexpr auto kNoLimit = std::numeric_limits<Bytes>::max();

struct Limits {
  Bytes peak = kNoLimit;
  bool any_time = false;  // only the least peak is wanted
  size_t labels = kMostLabels;
};

// By stage: what every way through the stages from it on adds.
struct Rest {
  Bytes peak = 0;       // to what is held before the stage
  Bytes forward = 0;    // in the stage's own forward
  Bytes offloaded = 0;  // at the least
};

std::vector<Rest> rests(const Problem& problem) {
  std::vector<Rest> made(problem.stages.size() + 1);
  for (size_t i = problem.stages.size(); i-- > 0;) {
    const auto& stage = problem.stages[i];
    Bytes peak = kNoLimit;
    Bytes forward = kNoLimit;
    Bytes offloaded = kNoLimit;
    for (const auto& choice : stage.choices) {
      peak = std::min(peak, std::max(choice.forward, choice.backward + stage.before_backward));
      forward = std::min(forward, choice.forward);
      offloaded = std::min(offloaded, choice.offloaded);
    }
    made[i] = {std::max(peak, made[i + 1].peak), forward, made[i + 1].offloaded + offloaded};
  }
  return made;
}

bool room_binds(const Problem& problem) {
  Bytes all = 0;
  for (const auto& stage : problem.stages) {
    Bytes most = 0;
    for (const auto& choice : stage.choices) most = std::max(most, choice.offloaded);
    all += most;
  }
  return all > problem.link.room;
}

class Search {
 public:
  Search(const Chain& chain, const Limits& limits)
      : chain_(chain),
        limits_(limits),
        rests_(rests(chain.problem())),
        room_binds_(room_binds(chain.problem())) {}

  Front run() {
    const auto& problem = chain_.problem();
    const auto count = problem.stages.size();
    std::vector<Label> labels(1);
    labels[0].peak = chain_.optimizer_peak();
    for (size_t i = 0; i < count; ++i) {
      labels = extend(labels, i);
      thin_out(labels);
      auto& steps = steps_.emplace_back();
      for (const auto& label : labels) steps.push_back({label.before, label.choice});
    }
    for (auto& label : labels) label.ticks += chain_.last_return(label.held);
    return front(labels);
  }

 private:
  struct Step {
    uint32_t before;
    uint32_t choice;
  };

  std::vector<Label> extend(const std::vector<Label>& labels, size_t stage) const {
    const auto& problem = chain_.problem();
    const auto& choices = problem.stages[stage].choices;
    const auto& rest = rests_[stage + 1];
    std::vector<Label> made;
    made.reserve(labels.size() * choices.size());
    for (size_t l = 0; l < labels.size(); ++l) {
      const auto& label = labels[l];
      for (size_t c = 0; c < choices.size(); ++c) {
        Label next;
        if (room_binds_) {
          next.offloaded = label.offloaded + choices[c].offloaded;
          if (next.offloaded > problem.link.room - rest.offloaded) continue;
        }
        const auto passed = chain_.pass(stage, c, label.held);
        next.held = passed.after;
        next.peak = std::max({label.peak, passed.forward_peak, passed.backward_peak});
        if (stage + 1 < problem.stages.size()) {
          const auto held = problem.base + passed.after.resident;
          next.peak =
              std::max({next.peak, held + rest.peak, held + passed.after.leaving + rest.forward});
        }
        if (next.peak > limits_.peak) continue;
        if (!limits_.any_time) next.ticks = label.ticks + passed.ticks();
        next.before = static_cast<uint32_t>(l);
        next.choice = static_cast<uint32_t>(c);
        made.push_back(next);
      }
    }
    return made;
  }

  void thin_out(std::vector<Label>& labels) {
    drop_dominated(labels, grid_);
    while (labels.size() > (grid_ > 0 ? limits_.labels : 2 * limits_.labels)) {
      // Finer than what a stage holds by far, and as many doublings as that takes.
      if (grid_ == 0) {
        for (grid_ = 1; grid_ < labels.front().peak >> 16;) grid_ *= 2;
      } else {
        grid_ *= 2;
      }
      drop_dominated(labels, grid_);
    }
    most_labels_ = std::max(most_labels_, labels.size());
  }

  std::vector<size_t> choices(const Label& last) const {
    std::vector<size_t> made(steps_.size());
    Step step = {last.before, last.choice};
    for (size_t i = steps_.size(); i-- > 0;) {
      made[i] = step.choice;
      if (i > 0) step = steps_[i - 1][step.before];
    }
    return made;
  }

  Front front(const std::vector<Label>& labels) const {
    Front made;
    made.grid = grid_;
    made.most_labels = most_labels_;
    for (const auto& label : labels) {
      made.plans.push_back({choices(label), label.peak, label.ticks});
    }
    return made;
  }

  const Chain& chain_;
  Limits limits_;
  std::vector<Rest> rests_;
  bool room_binds_;
  Bytes grid_ = 0;
  size_t most_labels_ = 0;
  std::vector<std::vector<Step>> steps_;  // by stage, of its labels
};

// Leaves of plans only those that no other one is at least as good as, from the least peak on.
void keep_best(std::vector<Plan>& plans) {
  std::stable_sort(plans.begin(), plans.end(), [](const Plan& a, const Plan& b) {
    return std::pair(a.peak, a.ticks) < std::pair(b.peak, b.ticks);
  });
  size_t count = 0;
  for (size_t i = 0; i < plans.size(); ++i) {
    if (count > 0 && plans[count - 1].ticks <= plans[i].ticks) continue;
    if (count != i) plans[count] = std::move(plans[i]);
    ++count;
  }
  plans.resize(count);
}

Ticks total_ticks(const Chain& chain, const std::vector<size_t>& choices) {
  Held held;
  Ticks total = 0;
  for (size_t i = 0; i < choices.size(); ++i) {
    const auto passed = chain.pass(i, choices[i], held);
    total += passed.ticks();
    held = passed.after;
  }
  return total + chain.last_return(held);
}

}  // namespace

const Plan* Front::at(Bytes budget) const {
  const auto above =
      std::upper_bound(plans.begin(), plans.end(), budget,
                       [](Bytes wanted, const Plan& plan) { return wanted < plan.peak; });
  return above == plans.begin() ? nullptr : &*std::prev(above);
}

Front find_front(const Chain& chain, size_t most_labels) {
  auto front = Search(chain, {kNoLimit, false, most_labels}).run();
  keep_best(front.plans);
  if (front.grid == 0) return front;
  // The floor is to be exact all the same: a plan of the least peak, then the fastest of these.
  const auto& problem = chain.problem();
  const auto whatever_comes = problem.base + rests(problem).front().peak;
  if (front.plans.front().peak == std::max(chain.optimizer_peak(), whatever_comes)) return front;
  const auto merge = [&](Front other) {
    front.most_labels = std::max(front.most_labels, other.most_labels);
    for (auto& plan : other.plans) front.plans.push_back(std::move(plan));
    keep_best(front.plans);
  };
  auto least = Search(chain, {front.plans.front().peak, true, most_labels}).run();
  for (auto& plan : least.plans) plan.ticks = total_ticks(chain, plan.choices);
  front.floor_grid = least.grid;
  merge(std::move(least));
  merge(Search(chain, {front.plans.front().peak, false, most_labels}).run());
  return front;
}

}  // namespace memopt::plan
