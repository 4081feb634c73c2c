#include "timeline.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>

namespace memopt::plan {

namespace {

// No plan takes longer: each stage's slowest choices, and a wait for every byte in both directions.
double most_seconds(const Problem& problem) {
  double total = 0;
  Bytes offloaded = 0;
  for (const auto& stage : problem.stages) {
    double forward = 0;
    double backward = 0;
    Bytes most = 0;
    for (const auto& choice : stage.choices) {
      forward = std::max(forward, choice.forward_seconds);
      backward = std::max(backward, choice.backward_seconds);
      most = std::max(most, choice.offloaded);
    }
    total += forward + backward;
    offloaded += most;
  }
  const auto bytes = static_cast<double>(std::min(offloaded, problem.link.room));
  total += bytes / problem.link.out + bytes / problem.link.back;
  if (!std::isfinite(total)) {
    throw std::invalid_argument("plan: all seconds together must be finite");
  }
  return total;
}

}  // namespace

Chain::Chain(Problem problem) : problem_(std::move(problem)) {
  check(problem_);
  // Less than 2^61 ticks in all, so that four roundings a stage fit beside them.
  std::frexp(most_seconds(problem_), &exponent_);
  exponent_ -= 61;
  const auto most = static_cast<double>(kMostBytes);
  for (const auto& stage : problem_.stages) {
    auto& paces = paces_.emplace_back();
    for (const auto& choice : stage.choices) {
      const auto backward = ticks(choice.backward_seconds);
      const double drained = std::min(most, std::floor(problem_.link.out * choice.forward_seconds));
      paces.push_back(
          {ticks(choice.forward_seconds) + backward, backward, static_cast<Bytes>(drained)});
    }
  }
}

Ticks Chain::ticks(double seconds) const {
  return std::llrint(std::ldexp(seconds, -exponent_));
}

double Chain::seconds(Ticks ticks) const {
  return std::ldexp(static_cast<double>(ticks), exponent_);
}

Passed Chain::pass(size_t index, size_t choice_index, const Held& before) const {
  const auto& stage = problem_.stages[index];
  const auto& choice = stage.choices[choice_index];
  const auto& link = problem_.link;
  Passed passed;
  const auto& pace = paces_[index][choice_index];
  passed.busy = pace.busy;
  passed.after.resident = before.resident + choice.resident;
  passed.after.returning = choice.offloaded;
  passed.after.leaving = std::max<Bytes>(0, before.leaving + choice.offloaded - pace.drained);
  if (passed.after.leaving > link.in_flight) {
    const auto too_many = passed.after.leaving - link.in_flight;
    passed.wait_out = ticks(static_cast<double>(too_many) / link.out);
    passed.after.leaving = link.in_flight;
  }
  if (before.returning > 0) {
    passed.wait_return = std::max<Ticks>(0, to_return(before.returning) - pace.backward);
  }
  passed.forward_peak = problem_.base + before.resident + before.leaving + choice.forward;
  passed.backward_peak = problem_.base + before.resident + passed.after.leaving + before.returning +
                         choice.backward + stage.before_backward;
  return passed;
}

Timeline evaluate(const Chain& chain, const std::vector<size_t>& choices) {
  const auto& stages = chain.problem().stages;
  const auto count = stages.size();
  if (choices.size() != count) {
    throw std::invalid_argument("plan: choices must have one entry for each of the " +
                                std::to_string(count) + " stages, got " +
                                std::to_string(choices.size()));
  }
  Timeline made;
  for (size_t i = 0; i < count; ++i) {
    if (choices[i] >= stages[i].choices.size()) {
      throw std::invalid_argument("plan: stage " + std::to_string(i) + " has " +
                                  std::to_string(stages[i].choices.size()) +
                                  " choices, got choice " + std::to_string(choices[i]));
    }
    made.offloaded += stages[i].choices[choices[i]].offloaded;
  }
  if (made.offloaded > chain.problem().link.room) {
    throw std::invalid_argument("plan: choices must offload at most link.room = " +
                                std::to_string(chain.problem().link.room) + " bytes, got " +
                                std::to_string(made.offloaded));
  }
  made.backward_waits.resize(count);
  Held held;
  Ticks total = 0;
  Ticks waits = 0;
  for (size_t i = 0; i < count; ++i) {
    const auto passed = chain.pass(i, choices[i], held);
    made.forward_peaks.push_back(passed.forward_peak);
    made.backward_peaks.push_back(passed.backward_peak);
    made.forward_waits.push_back(chain.seconds(passed.wait_out));
    if (i > 0) made.backward_waits[i - 1] = chain.seconds(passed.wait_return);
    total += passed.ticks();
    waits += passed.wait_out + passed.wait_return;
    held = passed.after;
  }
  const auto last = chain.last_return(held);
  made.backward_waits[count - 1] = chain.seconds(last);
  made.seconds = chain.seconds(total + last);
  made.wait_seconds = chain.seconds(waits + last);

  made.optimizer_peak = chain.optimizer_peak();
  const auto is_peak = [&](Bytes bytes, Phase phase, size_t stage) {
    if (bytes <= made.peak) return;
    made.peak = bytes;
    made.peak_phase = phase;
    made.peak_stage = stage;
  };
  for (size_t i = 0; i < count; ++i) is_peak(made.forward_peaks[i], Phase::kForward, i);
  for (size_t i = count; i-- > 0;) is_peak(made.backward_peaks[i], Phase::kBackward, i);
  is_peak(made.optimizer_peak, Phase::kOptimizer, 0);
  return made;
}

}  // namespace memopt::plan
