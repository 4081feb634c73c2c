// The formulas: the bytes and seconds that a plan takes, with one choice for each stage.
//
// With R the bytes that stages hold from forward to backward, and Q those that are still leaving,
// of what stage i offloads (W) at `out` bytes a second:
//
//   forward of i    base + R[i-1] + Q[i-1] + forward[i]
//                   Q[i] = max(0, Q[i-1] + W[i] - out * forward_seconds[i])
//                   beyond in_flight the computation waits: (Q[i] - in_flight) / out
//   backward of i   base + R[i-1] + Q[i] + W[i-1] + backward[i] + before_backward[i]
//                   (what the stage before has offloaded returns meanwhile)
//                   waits for its own before: W[i] / back - backward_seconds[i+1], if above 0
//   optimizer       base + optimizer
//
// Every term grows with R, Q, and W of the stage before: who has less of all of them at a stage,
// and has taken less time, is at least as good whatever comes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "problem.h"

namespace memopt::plan {

// Time in units of `Chain`, a power of two of a second: sums are exact, whatever their order.
using Ticks = int64_t;

// What the stages up to one hold.
struct Held {
  Bytes resident = 0;
  Bytes leaving = 0;
  Bytes returning = 0;  // what this stage has offloaded: it returns in the next one's backward
};

// What one stage adds to a plan.
struct Passed {
  Held after;
  Bytes forward_peak = 0;
  Bytes backward_peak = 0;
  Ticks busy = 0;         // its forward and its backward
  Ticks wait_out = 0;     // in its forward, for the link
  Ticks wait_return = 0;  // after its backward, for what the stage before has offloaded

  Ticks ticks() const { return busy + wait_out + wait_return; }
};

// A problem, checked, with its times in ticks.
class Chain {
 public:
  // Throws std::invalid_argument, see check().
  explicit Chain(Problem problem);

  Passed pass(size_t stage, size_t choice, const Held& before) const;

  // What backward waits for at its beginning: what the last stage has offloaded.
  Ticks last_return(const Held& after_last) const { return to_return(after_last.returning); }

  Bytes optimizer_peak() const { return problem_.base + problem_.optimizer; }
  double seconds(Ticks ticks) const;
  const Problem& problem() const { return problem_; }

 private:
  // A choice's times, and what the link takes away in its forward.
  struct Pace {
    Ticks busy;
    Ticks backward;
    Bytes drained;
  };

  Ticks ticks(double seconds) const;
  Ticks to_return(Bytes bytes) const {
    return ticks(static_cast<double>(bytes) / problem_.link.back);
  }

  Problem problem_;
  int exponent_ = 0;  // a tick is 2^exponent seconds
  std::vector<std::vector<Pace>> paces_;
};

enum class Phase { kForward, kBackward, kOptimizer };

struct Timeline {
  std::vector<Bytes> forward_peaks;  // of each stage
  std::vector<Bytes> backward_peaks;
  Bytes optimizer_peak = 0;
  std::vector<double> forward_waits;   // of each stage, for the link to take what is leaving
  std::vector<double> backward_waits;  // of each stage, for its own to return
  double seconds = 0;                  // waits included
  double wait_seconds = 0;
  Bytes offloaded = 0;
  Bytes peak = 0;
  Phase peak_phase = Phase::kOptimizer;  // the first, in the order of time, of equal peaks
  size_t peak_stage = 0;                 // 0 for the optimizer
};

// Throws std::invalid_argument unless there is a choice for each stage and room for what they
// offload.
Timeline evaluate(const Chain& chain, const std::vector<size_t>& choices);

}  // namespace memopt::plan
