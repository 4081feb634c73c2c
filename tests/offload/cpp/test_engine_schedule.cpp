// The engine's schedule in virtual time: what waits how long, and how much memory that takes.
#include <random>

#include "../../../csrc/offload/prefetch_depth.h"
#include "chain.h"

using namespace check;

namespace {

constexpr size_t kBytes = 1000;  // take 1 ms at 1e6 bytes a second
constexpr double kCopy = 1e-3;

// What waits for the copies away, by hand: region i's copy is begun when `keep_last` more have been
// given, and waits for the link; the computation waits when `most` copies are under way.
double forward_stall(size_t regions, double compute, double copy, size_t most, size_t keep_last) {
  std::vector<double> done;
  double now = 0, stall = 0, link = 0;
  for (size_t i = 0; i < regions; ++i) {
    if (i >= keep_last) {
      if (done.size() >= most) {
        const double until = std::max(now, done[done.size() - most]);
        stall += until - now;
        now = until;
      }
      const double written = static_cast<double>(done.size()) * compute;
      link = std::max(link, written) + copy;
      done.push_back(link);
    }
    now += compute;
  }
  return stall;
}

struct Steps {
  Stats stats;  // of the steps after the first
  size_t most_live = 0;
  size_t reserved_then = 0, reserved_now = 0;
  size_t room_then = 0, room_now = 0;
};

Steps run(Machine& machine, const std::vector<Part>& parts, size_t keep_last, int steps) {
  machine.step(parts, keep_last);
  machine.check_empty();
  machine.engine->reset_stats();
  Steps result;
  machine.time->most_live = 0;
  result.reserved_then = machine.time->reserved;
  result.room_then = machine.time->room.allocated;
  for (int i = 0; i < steps; ++i) {
    machine.step(parts, keep_last);
    machine.check_empty();
  }
  result.stats = machine.engine->stats();
  result.most_live = machine.time->most_live;
  result.reserved_now = machine.time->reserved;
  result.room_now = machine.time->room.allocated;
  return result;
}

}  // namespace

TEST(copies_no_longer_than_the_computation_never_stall) {
  for (const bool in_step : {false, true}) {
    for (const size_t in_flight : {2, 3, 4}) {
      for (const double compute : {1.0, 1.5, 10.0}) {
        Machine machine;
        machine.time->in_step = in_step;
        machine.start(in_flight);
        const auto parts = equal_parts(24, kBytes, compute * kCopy, compute * kCopy);
        const auto [stats, most_live, reserved_then, reserved_now, room_then, room_now] =
            run(machine, parts, /*keep_last=*/1, 50);
        CHECK(is_close(stats.out.stall_seconds, 0));
        CHECK(is_close(stats.in.stall_seconds, 0));
        // The last one; of those whose copies are under way a host that is ahead does not know that
        // they are done.
        const size_t never_left = 1 + (in_step ? 0 : in_flight);
        CHECK(stats.never_left == 50 * never_left);
        CHECK(stats.prefetch_hits == 50 * (24 - never_left) && stats.prefetch_misses == 0);
        CHECK(stats.out.copies == 50 * 23 && stats.in.copies == 50 * (24 - never_left));
        CHECK(stats.out.most_in_flight <= in_flight && stats.in.most_in_flight <= in_flight);
        // The bound, the one that is kept, and the one that is being given.
        CHECK(machine.forward_most_live <= (in_flight + 2) * kBytes);
        // And what comes back early.
        CHECK(most_live <= (in_flight + 3) * kBytes);
        // No reservation after the first step.
        CHECK(reserved_now == reserved_then && room_now == room_then);
        CHECK(room_now == 23 * kBytes);
      }
    }
  }
}

TEST(longer_copies_away_stall_by_the_arithmetic) {
  for (const size_t in_flight : {1, 2, 4}) {
    for (const size_t keep_last : {0, 1, 3}) {
      for (const double compute : {0.0, 0.3, 0.9, 1.0, 1.1}) {
        Machine machine;
        machine.start(in_flight);
        const size_t regions = 40;
        const auto parts = equal_parts(regions, kBytes, compute * kCopy, 5 * kCopy);
        const auto result = run(machine, parts, keep_last, 10);
        const double expected =
            forward_stall(regions, compute * kCopy, kCopy, in_flight, keep_last);
        CHECK(is_close(result.stats.out.stall_seconds, 10 * expected));
        if (keep_last == 0) {
          // What is left at the end beyond `in_flight` buffers, at the link's rate.
          const double left = static_cast<double>(regions - in_flight) * kCopy -
                              static_cast<double>(regions - 1) * compute * kCopy;
          // With one buffer the copy of what was just given is waited for while nothing runs.
          if (compute < 1) CHECK(is_close(expected, left));
        }
        CHECK(machine.forward_most_live <= (in_flight + keep_last + 1) * kBytes);
        CHECK(is_close(result.stats.out.busy_seconds,
                       10 * static_cast<double>(regions - keep_last) * kCopy));
      }
    }
  }
}

TEST(longer_copies_back_stall_by_what_the_computation_does_not_hide) {
  for (const double compute : {0.0, 0.25, 0.8}) {
    Machine machine;
    machine.time->in_step = true;
    machine.start(4);
    const size_t regions = 32;
    // Forward is long, so that everything has left.
    const auto parts = equal_parts(regions, kBytes, 2 * kCopy, compute * kCopy);
    const auto result = run(machine, parts, /*keep_last=*/1, 10);
    // The last region's input is there; each of the others waits for its copy, which ran beside the
    // backward of one region.
    const double expected = static_cast<double>(regions - 1) * (1 - compute) * kCopy;
    CHECK(is_close(result.stats.in.stall_seconds, 10 * expected));
    CHECK(is_close(result.stats.in.busy_seconds, 10 * static_cast<double>(regions - 1) * kCopy));
    CHECK(result.stats.in.bytes_timed == result.stats.in.bytes);
    CHECK(is_close(static_cast<double>(result.stats.in.bytes_timed) / result.stats.in.busy_seconds,
                   machine.time->bandwidth));
    CHECK(result.stats.prefetch_misses == 0);
  }
}

TEST(latency_counts_as_busy) {
  Machine machine;
  machine.time->latency = kCopy / 2;
  machine.start(2);
  const auto parts = equal_parts(10, kBytes, 2 * kCopy, 2 * kCopy);
  const auto result = run(machine, parts, 0, 4);
  CHECK(is_close(result.stats.out.busy_seconds, 4 * 10 * 1.5 * kCopy));
  CHECK(is_close(result.stats.out.stall_seconds, 0));
}

TEST(prefetching_goes_as_far_ahead_as_sizes_call_for_and_no_further) {
  // A large one after three small ones: its copy has to begin three requests before.
  std::vector<Part> parts;
  for (int i = 0; i < 8; ++i) {
    parts.push_back({4 * kBytes, 8 * kCopy, 1.5 * kCopy});
    for (int j = 0; j < 3; ++j) parts.push_back({100, 8 * kCopy, 1.5 * kCopy});
  }
  Machine machine;
  machine.start(8);
  for (int i = 0; i < 3; ++i) machine.step(parts, 1);
  machine.engine->reset_stats();
  for (int i = 0; i < 5; ++i) machine.step(parts, 1);
  const auto stats = machine.engine->stats();

  std::vector<offload::Requested> requests;
  for (size_t i = parts.size(); i-- > 0;) {
    const double copy = static_cast<double>(parts[i].bytes) / machine.time->bandwidth;
    requests.push_back({i + 1 == parts.size() ? 0 : copy, parts[i].backward});
  }
  requests.back().compute_seconds = 0;
  const size_t depth = least_depth(requests, 8);
  CHECK(depth == 3);
  CHECK(stall_with_depth(requests, 1) > 8 * kCopy);
  CHECK(is_close(stats.in.stall_seconds, 5 * stall_with_depth(requests, depth)));
  CHECK(stats.in.most_in_flight == depth);
  CHECK(stats.prefetch_misses == 0);
}

namespace {

// What stall_with_depth computes, by moving a clock in small steps of time.
double stall_by_simulation(const std::vector<offload::Requested>& requests, size_t depth) {
  const size_t count = requests.size();
  std::vector<double> left(count);  // of each copy, seconds
  for (size_t i = 0; i < count; ++i) left[i] = requests[i].copy_seconds;
  size_t may_begin = 1;  // copies of requests below this may run
  size_t asked = 0;
  double stall = 0, compute = -1;  // negative: waits for request `asked`
  constexpr double kTick = 1;
  while (asked < count) {
    if (compute < 0 && left[asked] <= 0) {
      may_begin = std::max(may_begin, asked + 1 + depth);
      compute = requests[asked].compute_seconds;
    }
    if (compute == 0) {
      ++asked;
      may_begin = std::max(may_begin, asked + 1);
      compute = -1;
      continue;
    }
    for (size_t i = 0; i < std::min(may_begin, count); ++i) {
      if (left[i] <= 0) continue;
      left[i] -= kTick;
      break;
    }
    if (compute < 0) {
      stall += kTick;
    } else {
      compute -= kTick;
    }
  }
  return stall;
}

}  // namespace

TEST(the_stall_with_a_depth_is_that_of_a_simulation) {
  std::mt19937 random(1);
  const auto up_to = [&](unsigned most) { return random() % (most + 1); };
  for (int i = 0; i < 500; ++i) {
    std::vector<offload::Requested> requests(1 + up_to(20));
    for (auto& request : requests) {
      request = {up_to(3) == 0 ? 0.0 : static_cast<double>(up_to(9)),
                 static_cast<double>(up_to(6))};
    }
    double least = 0;
    std::vector<double> stalls;
    double compute = 0;
    for (const auto& request : requests) compute += request.compute_seconds;
    for (size_t depth = 1; depth <= 6; ++depth) {
      stalls.push_back(stall_by_simulation(requests, depth));
      CHECK(stall_with_depth(requests, depth) == stalls.back());
    }
    least = stalls.back();
    size_t expected = 1;
    while (stalls[expected - 1] > least + 0.02 * (least + compute)) ++expected;
    CHECK(offload::least_depth(requests, 6) == expected);
  }
  CHECK(offload::least_depth({}, 4) == 1);
  CHECK(offload::least_depth({{1, 1}}, 0) == 1);
}

TEST(the_host_s_lead_does_not_change_results_of_a_chain) {
  for (const bool in_step : {false, true}) {
    Machine machine;
    machine.time->in_step = in_step;
    machine.start(3);
    const auto parts = equal_parts(12, kBytes, kCopy / 2, kCopy / 2);
    const auto result = run(machine, parts, 1, 3);
    CHECK(result.stats.prefetch_hits + result.stats.prefetch_misses + result.stats.never_left ==
          3 * 12);
    CHECK(result.stats.bytes_away == 0);
  }
}
