// The engine in virtual time, whatever becomes of a graph and whatever fails: nothing is lost, held
// or in flight beyond the bound.
#include <algorithm>
#include <random>

#include "chain.h"

using namespace check;

namespace {

constexpr size_t kBytes = 1000;  // take 1 ms at 1e6 bytes a second
constexpr double kCopy = 1e-3;

}  // namespace

TEST(a_graph_that_is_kept_is_restored_twice) {
  Machine machine;
  machine.start(2);
  const auto parts = equal_parts(8, kBytes, 2 * kCopy, 2 * kCopy);
  auto sequence = std::make_shared<Sequence>();
  sequence->keep_last = 1;
  auto tickets = machine.forward(parts, sequence);
  machine.time->host_waits();
  machine.backward(parts, tickets);
  machine.backward(parts, tickets);
  const auto stats = machine.engine->stats();
  CHECK(stats.out.copies == 7 && stats.in.copies == 14);
  CHECK(stats.never_left == 2 && stats.prefetch_hits == 14 && stats.prefetch_misses == 0);
  CHECK(is_close(stats.in.stall_seconds, 0));
  tickets.clear();
  machine.check_empty();
}

TEST(what_a_partial_backward_prefetched_goes_when_it_ends) {
  Machine machine;
  machine.start(4);
  const auto parts = equal_parts(8, kBytes, 2 * kCopy, 2 * kCopy);
  auto sequence = std::make_shared<Sequence>();
  auto tickets = machine.forward(parts, sequence);
  machine.time->host_waits();
  machine.engine->synchronize();
  CHECK(machine.time->live == 0);
  for (size_t i = 8; i-- > 4;) machine.restore(tickets[i], kCopy, 1);
  CHECK(machine.time->live == kBytes);  // tickets[3], which nobody will ask for
  machine.engine->backward_ended(1);
  machine.engine->synchronize();
  CHECK(machine.time->live == 0);
  // The rest, later.
  for (size_t i = 4; i-- > 0;) machine.restore(tickets[i], kCopy, 2);
  machine.engine->backward_ended(2);
  tickets.clear();
  machine.check_empty();
}

// A storage that something else has held is not asked for. It must not count as the backward's
// beginning: the caller asks to be told of its end at the first restore.
TEST(what_is_found_elsewhere_first_does_not_hide_that_a_backward_begins) {
  Machine machine;
  machine.start(2);
  const auto parts = equal_parts(4, kBytes, 2 * kCopy, 2 * kCopy);
  auto tickets = machine.forward(parts, std::make_shared<Sequence>());
  machine.time->host_waits();
  machine.engine->found_elsewhere(*tickets[3], 7);
  CHECK(machine.engine->restore(*tickets[2], 7).is_first);
  CHECK(!machine.engine->restore(*tickets[1], 7).is_first);
  machine.engine->backward_ended(7);
  CHECK(machine.engine->stats().found_elsewhere_bytes == kBytes);
  tickets.clear();
  machine.check_empty();
}

TEST(two_backwards_side_by_side_begin_once_each) {
  Machine machine;
  machine.start(2);
  const auto parts = equal_parts(6, kBytes, 2 * kCopy, 2 * kCopy);
  auto tickets = machine.forward(parts, std::make_shared<Sequence>());
  machine.time->host_waits();
  int first = 0;
  for (size_t i = 6; i-- > 0;) {
    for (const int64_t backward : {1, 2}) {
      first += machine.engine->restore(*tickets[i], backward).is_first;
    }
  }
  CHECK(first == 2);
  machine.engine->backward_ended(1);
  machine.engine->backward_ended(2);
  CHECK(!machine.engine->restore(*tickets[0], -1).is_first);  // no backward
  tickets.clear();
  machine.check_empty();
}

TEST(branches_in_another_order_are_right_and_bounded) {
  std::mt19937 random(3);
  for (int round = 0; round < 30; ++round) {
    Machine machine;
    machine.time->in_step = round % 2 == 0;
    const size_t in_flight = 1 + round % 4;
    machine.start(in_flight);
    const auto parts = equal_parts(20, kBytes, 2 * kCopy, kCopy / 4);
    auto tickets = machine.forward(parts, std::make_shared<Sequence>());
    machine.time->host_waits();
    machine.engine->synchronize();
    machine.time->most_live = 0;
    std::shuffle(tickets.begin(), tickets.end(), random);
    for (const auto& ticket : tickets) machine.restore(ticket, kCopy / 4, 1);
    // What came back early, and the one that was asked for.
    CHECK(machine.time->most_live <= (in_flight + 1) * kBytes);
    machine.engine->backward_ended(1);
    tickets.clear();
    machine.time->host_waits();
    machine.check_empty();
  }
}

TEST(two_models_take_turns) {
  Machine machine;
  machine.start(4);
  const auto parts = equal_parts(10, kBytes, 2 * kCopy, 2 * kCopy);
  for (int step = 0; step < 3; ++step) {
    auto one = machine.forward(parts, std::make_shared<Sequence>());
    auto other = machine.forward(parts, std::make_shared<Sequence>());
    machine.backward(parts, std::move(one));
    machine.backward(parts, std::move(other));
  }
  // Region by region, as a loss of both does.
  auto one = machine.forward(parts, std::make_shared<Sequence>());
  auto other = machine.forward(parts, std::make_shared<Sequence>());
  machine.time->host_waits();
  machine.engine->reset_stats();
  for (size_t i = parts.size(); i-- > 0;) {
    machine.restore(one[i], 2 * kCopy, 99);
    machine.restore(other[i], 2 * kCopy, 99);
  }
  machine.engine->backward_ended(99);
  const auto stats = machine.engine->stats();
  CHECK(stats.prefetch_hits == 18 && stats.prefetch_misses == 2);  // the first of each
  one.clear();
  other.clear();
  machine.check_empty();
}

TEST(gradients_are_accumulated_over_forwards_of_one_sequence) {
  Machine machine;
  machine.start(3);
  const auto parts = equal_parts(6, kBytes, 2 * kCopy, 2 * kCopy);
  auto sequence = std::make_shared<Sequence>();  // as that of a thread's regions
  std::vector<std::vector<std::shared_ptr<Ticket>>> micro_batches;
  for (int i = 0; i < 3; ++i) micro_batches.push_back(machine.forward(parts, sequence));
  for (auto& tickets : micro_batches) machine.backward(parts, std::move(tickets));
  const auto stats = machine.engine->stats();
  CHECK(stats.out.copies == 18);
  CHECK(sequence->tickets.empty());
  machine.check_empty();
}

TEST(a_step_that_is_given_up_gives_everything_back) {
  for (const bool in_step : {false, true}) {
    for (size_t after = 0; after <= 12; ++after) {
      Machine machine;
      machine.time->in_step = in_step;
      machine.start(3);
      const auto parts = equal_parts(12, kBytes, kCopy / 3, kCopy / 3);
      auto sequence = std::make_shared<Sequence>();
      sequence->keep_last = 1;
      auto tickets = machine.forward(parts, sequence);
      for (size_t i = 12; i-- > after;) machine.restore(tickets[i], kCopy / 3, 1);
      // An exception: backward_ended() is not called.
      tickets.clear();
      machine.check_empty();
    }
  }
}

// Evaluations that forget no_grad, say: the host runs ahead, and each graph goes while its copies
// are under way. They hold memory until they are done, so they count.
TEST(copies_of_what_was_given_up_count_among_those_in_flight) {
  for (const size_t in_flight : {1, 2, 4}) {
    Machine machine;
    machine.start(in_flight);
    const auto parts = equal_parts(6, kBytes, kCopy / 10, 0);
    for (int i = 0; i < 20; ++i) machine.forward(parts, std::make_shared<Sequence>());
    CHECK(machine.time->most_live <= (in_flight + 1) * kBytes);
    machine.time->host_waits();
    machine.check_empty();
  }
}

TEST(without_room_tensors_stay_and_that_is_said_once) {
  Machine machine;
  machine.time->in_step = true;
  machine.time->most_room = 3 * kBytes;
  machine.start(2);
  const auto parts = equal_parts(8, kBytes, 2 * kCopy, 2 * kCopy);
  for (int i = 0; i < 2; ++i) {
    auto tickets = machine.forward(parts, std::make_shared<Sequence>());
    CHECK(machine.engine->stats().bytes_held >= 5 * kBytes);
    machine.backward(parts, std::move(tickets));
    machine.time->host_waits();
    machine.check_empty();
  }
  const auto stats = machine.engine->stats();
  CHECK(stats.refused_bytes == 2 * 5 * kBytes);
  CHECK(stats.never_left == 2 * 5);
  CHECK(machine.warnings.size() == 1);
}

TEST(a_copy_away_that_fails_leaves_its_tensor_on_the_device) {
  Machine machine;
  machine.start(2);
  int stores = 0;
  machine.time->store_fails = [&](size_t) { return ++stores % 2 == 0; };
  const auto parts = equal_parts(8, kBytes, 2 * kCopy, 2 * kCopy);
  // In step: that a copy has failed must be known before its source goes.
  machine.time->in_step = true;
  machine.step(parts, 0);
  machine.check_empty();
  const auto stats = machine.engine->stats();
  CHECK(stats.failed_bytes == 4 * kBytes && stats.in.copies == 4);
  CHECK(machine.warnings.size() == 1);
}

TEST(a_copy_away_that_raises_leaves_its_tensor_on_the_device) {
  for (const std::string where : {"reserve", "store"}) {
    Machine machine;
    machine.time->in_step = true;
    machine.start(2);
    int calls = 0;
    machine.time->before = [&](const std::string& name) {
      if (name == where && ++calls % 3 == 0) throw std::runtime_error("planned: " + name);
    };
    const auto parts = equal_parts(9, kBytes, 2 * kCopy, 2 * kCopy);
    machine.step(parts, 0);
    machine.check_empty();
    const auto stats = machine.engine->stats();
    CHECK(stats.failed_bytes == 3 * kBytes && stats.never_left == 3);
    CHECK(machine.warnings.size() == 1);
  }
}

TEST(a_copy_back_that_fails_raises_and_the_next_one_may_succeed) {
  Machine machine;
  machine.start(2);
  machine.time->in_step = true;
  auto tickets =
      machine.forward(equal_parts(4, kBytes, 2 * kCopy, 0), std::make_shared<Sequence>());
  machine.time->host_waits();
  machine.time->load_fails = [](size_t) { return true; };
  CHECK_RAISES("as planned", machine.engine->restore(*tickets[3], 1));
  machine.time->load_fails = [](size_t) { return false; };
  machine.restore(tickets[3], kCopy, 2);
  machine.engine->backward_ended(2);
  tickets.clear();
  machine.check_empty();
}

TEST(without_device_memory_restore_raises_and_prefetching_does_not) {
  for (const std::string where : {"allocate", "load"}) {
    Machine machine;
    machine.start(2);
    const auto parts = equal_parts(4, kBytes, 2 * kCopy, 2 * kCopy);
    auto tickets = machine.forward(parts, std::make_shared<Sequence>());
    machine.time->host_waits();
    machine.engine->synchronize();
    CHECK(machine.time->live == 0);
    bool fails = true;
    machine.time->before = [&](const std::string& name) {
      if (fails && name == where) throw std::runtime_error("planned: " + name);
    };
    CHECK_RAISES("planned", machine.engine->restore(*tickets[3], 1));
    CHECK(machine.time->live == 0);
    fails = false;
    int calls = 0;
    machine.time->before = [&](const std::string& name) {
      // The prefetches, not what was asked for.
      if (name == where && ++calls % 2 == 0) throw std::runtime_error("planned: " + name);
    };
    machine.restore(tickets[3], kCopy, 2);
    CHECK(machine.time->live == 0);
    machine.time->before = [](const std::string&) {};
    for (size_t i = 3; i-- > 0;) machine.restore(tickets[i], kCopy, 2);
    machine.engine->backward_ended(2);
    tickets.clear();
    machine.check_empty();
  }
}

// A device that is lost raises from every call, also where a graph that goes asks for its copies.
TEST(a_ticket_of_a_lost_device_goes_without_raising) {
  Machine machine;
  machine.start(2);
  auto tickets = machine.forward(equal_parts(4, kBytes, 0, 0), std::make_shared<Sequence>());
  machine.time->before = [](const std::string& name) {
    if (name == "reached") throw std::runtime_error("the device is lost");
  };
  tickets.clear();
  CHECK_RAISES("lost", machine.engine->stats());
  machine.time->before = [](const std::string&) {};
  machine.time->host_waits();
  machine.check_empty();
}

TEST(of_two_streams_each_has_its_own_memory) {
  Machine machine;
  machine.start(2);
  const auto parts = equal_parts(4, kBytes, 2 * kCopy, 2 * kCopy);
  auto tickets = machine.forward(parts, std::make_shared<Sequence>());
  machine.time->host_waits();
  machine.restore(tickets[3], kCopy, 1);  // prefetches tickets[2] for stream 0
  machine.time->current_stream = 5;
  machine.restore(tickets[2], kCopy, 1);
  CHECK(machine.engine->stats().prefetch_misses == 2);
  machine.time->current_stream = 0;
  machine.restore(tickets[1], kCopy, 1);
  machine.engine->backward_ended(1);
  tickets.clear();
  machine.time->host_waits();
  machine.check_empty();
}

TEST(memory_of_another_stream_is_let_go_of_when_the_copy_is_done) {
  Machine machine;
  machine.start(1);
  auto sequence = std::make_shared<Sequence>();
  std::vector<std::shared_ptr<Ticket>> tickets;
  for (int i = 0; i < 6; ++i) {
    machine.time->current_stream = i % 2;
    tickets.push_back(machine.engine->offload(machine.written(kBytes), sequence));
    machine.time->compute(kCopy / 4);
  }
  CHECK(machine.time->most_live <= 3 * kBytes);
  machine.time->host_waits();
  tickets.clear();
  machine.check_empty();
}
