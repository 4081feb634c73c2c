// A training step in virtual time: a chain of regions whose inputs are offloaded.
#pragma once

#include <utility>

#include "../../../csrc/offload/engine.h"
#include "../../support/check.h"
#include "virtual_time.h"

namespace check {

using offload::Engine;
using offload::EngineOptions;
using offload::Memory;
using offload::Sequence;
using offload::Stats;
using offload::Ticket;

inline bool is_close(double a, double b) {
  const double difference = a > b ? a - b : b - a;
  return difference <= 1e-9 * std::max(1.0, a > b ? a : b);
}

// One region and its input.
struct Part {
  size_t bytes;
  double forward, backward;  // seconds of computation
};

struct Machine {
  VirtualTimePtr time = std::make_shared<VirtualTime>();
  std::vector<std::string> warnings;
  std::shared_ptr<Engine> engine;
  int64_t backwards = 0;
  size_t forward_most_live = 0;  // until the end of the last step's forward

  // `time` is set before.
  void start(size_t copies_in_flight) {
    EngineOptions options;
    options.copies_in_flight = copies_in_flight;
    options.warn = [this](const std::string& text) { warnings.push_back(text); };
    engine = std::make_shared<Engine>(std::make_unique<VirtualBackend>(time), options);
  }
  ~Machine() {
    time->host_waits();
    engine.reset();
  }

  // What the computation has just written.
  Memory written(size_t bytes) {
    auto block = std::make_shared<VirtualBlock>(time, bytes);
    block->written_at = time->stream_time();
    return {block.get(), bytes, block};
  }

  // The computation reads it.
  void use(const Memory& memory) {
    if (time->stream_time() < block_of(memory).written_at) {
      time->races.push_back("the computation reads what has not come back");
    }
  }

  // The input of each region is offloaded where the region begins.
  std::vector<std::shared_ptr<Ticket>> forward(const std::vector<Part>& parts,
                                               const std::shared_ptr<Sequence>& sequence) {
    std::vector<std::shared_ptr<Ticket>> tickets;
    for (const auto& part : parts) {
      tickets.push_back(engine->offload(written(part.bytes), sequence));
      time->compute(part.forward);
    }
    return tickets;
  }

  // One region's backward.
  void restore(const std::shared_ptr<Ticket>& ticket, double seconds, int64_t backward) {
    const auto restored = engine->restore(*ticket, backward);
    CHECK(restored.memory.bytes == ticket->bytes());
    use(restored.memory);
    time->compute(seconds);
  }

  void backward(const std::vector<Part>& parts, std::vector<std::shared_ptr<Ticket>> tickets) {
    const int64_t backward = ++backwards;
    while (!tickets.empty()) {
      restore(tickets.back(), parts[tickets.size() - 1].backward, backward);
      tickets.pop_back();
    }
    engine->backward_ended(backward);
  }

  void step(const std::vector<Part>& parts, size_t keep_last) {
    auto sequence = std::make_shared<Sequence>();
    sequence->keep_last = keep_last;
    const size_t most_before = std::exchange(time->most_live, time->live);
    auto tickets = forward(parts, sequence);
    forward_most_live = time->most_live;
    time->most_live = std::max(time->most_live, most_before);
    backward(parts, std::move(tickets));
    time->host_waits();  // as optimizers do, or a loss that is printed
  }

  // Everything that was given is back: nothing on the device, nothing in the rooms.
  void check_empty() {
    engine->synchronize();
    CHECK(time->live == 0);
    CHECK(time->room.in_use == 0);
    const auto stats = engine->stats();
    CHECK(stats.bytes_away == 0 && stats.bytes_held == 0);
    CHECK(time->races.empty());
  }
};

inline std::vector<Part> equal_parts(size_t count, size_t bytes, double forward, double backward) {
  return std::vector<Part>(count, Part{bytes, forward, backward});
}

}  // namespace check
