#include "problem.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace memopt::plan {

namespace {

[[noreturn]] void refuse(const std::string& message) {
  throw std::invalid_argument("plan: " + message);
}

class Total {
 public:
  void add(const std::string& name, Bytes bytes) {
    if (bytes < 0) refuse(name + " must be at least 0, got " + std::to_string(bytes));
    if (bytes > kMostBytes - total_) {
      refuse("all bytes together must be at most " + std::to_string(kMostBytes) + ", with " + name +
             " = " + std::to_string(bytes) + " they are more");
    }
    total_ += bytes;
  }

 private:
  Bytes total_ = 0;
};

void check_seconds(const std::string& name, double seconds) {
  if (!(seconds >= 0) || !std::isfinite(seconds)) {
    refuse(name + " must be a finite number of at least 0, got " + std::to_string(seconds));
  }
}

void check_rate(const std::string& name, double rate) {
  if (!(rate > 0) || !std::isfinite(rate)) {
    refuse(name + " must be a finite number above 0, got " + std::to_string(rate));
  }
}

}  // namespace

void check(const Problem& problem) {
  Total total;
  total.add("base", problem.base);
  total.add("optimizer", problem.optimizer);
  check_rate("link.out", problem.link.out);
  check_rate("link.back", problem.link.back);
  // These are limits: as large as they like.
  Total().add("link.room", std::min(problem.link.room, kMostBytes));
  Total().add("link.in_flight", std::min(problem.link.in_flight, kMostBytes));
  if (problem.stages.empty()) refuse("a problem needs at least one stage, got none");
  Bytes least_offloaded = 0;
  for (size_t i = 0; i < problem.stages.size(); ++i) {
    const auto& stage = problem.stages[i];
    const auto name = "stage " + std::to_string(i);
    if (stage.choices.empty()) refuse(name + " needs at least one choice, got none");
    total.add(name + ": before_backward", stage.before_backward);
    Bytes least = kMostBytes;
    for (size_t c = 0; c < stage.choices.size(); ++c) {
      const auto& choice = stage.choices[c];
      const auto of = name + ", choice " + std::to_string(c) + ": ";
      total.add(of + "resident", choice.resident);
      total.add(of + "forward", choice.forward);
      total.add(of + "backward", choice.backward);
      total.add(of + "offloaded", choice.offloaded);
      check_seconds(of + "forward_seconds", choice.forward_seconds);
      check_seconds(of + "backward_seconds", choice.backward_seconds);
      least = std::min(least, choice.offloaded);
    }
    least_offloaded += least;
  }
  if (least_offloaded > problem.link.room) {
    refuse("link.room must be at least " + std::to_string(least_offloaded) +
           ", which every plan offloads, got " + std::to_string(problem.link.room));
  }
}

}  // namespace memopt::plan
