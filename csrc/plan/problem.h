// The problem that the planner's solver is given: a training step as a chain of stages, each of
// which can be run in several ways.
//
// Bytes are those of the device. Times are in seconds.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

namespace memopt::plan {

using Bytes = int64_t;

// All bytes of a problem together: sums of any of them fit in Bytes.
constexpr Bytes kMostBytes = std::numeric_limits<Bytes>::max() / 4;

// One way to run a stage.
struct Choice {
  Bytes resident = 0;  // held from its forward until its backward
  Bytes forward = 0;   // the most in its forward, above what was held when that began
  Bytes backward = 0;  // the most in its backward, above what the stages before it hold
  double forward_seconds = 0;
  double backward_seconds = 0;  // running forward again included
  // Leave in its forward and return in its backward. Not in `resident`; `forward` and `backward`
  // count them.
  Bytes offloaded = 0;
};

struct Stage {
  std::vector<Choice> choices;
  // In its backward whatever is chosen, above `Problem::base`: gradients of later stages'
  // parameters.
  Bytes before_backward = 0;
};

struct Link {
  double out = 1;  // bytes a second
  double back = 1;
  Bytes room = 0;       // the most that may be offloaded in all
  Bytes in_flight = 0;  // the most on its way out at one time: beyond it the computation waits
};

struct Problem {
  std::vector<Stage> stages;
  Bytes base = 0;       // there all the time
  Bytes optimizer = 0;  // the most in the optimizer's step, above base
  Link link;
};

// Throws std::invalid_argument that names what is missing, negative, not a number or too large, or
// a room too small for any plan.
void check(const Problem& problem);

}  // namespace memopt::plan
