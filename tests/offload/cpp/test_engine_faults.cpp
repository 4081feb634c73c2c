// Planted faults: each of these programs is right on the engine, and is seen to be wrong where a
// wait is left out. So the checks of the other programs see what they are there for.
//
// The races and bugs that offloading has had elsewhere, and where each is tested:
//
//    1  the source is freed before its copy ends           here: a_source_...
//    2  the compute stream is remembered                   test_races.py
//    3  a non-contiguous source is copied too late         test_races.py
//    4  a copy back races its own copy away                here: a_copy_back_waits_for_its_own_...
//    5  room is reused while a copy back reads it          here: room_...
//    6  views are told apart by address only               test_races.py
//    7  memory that comes back is used too early           here: memory_that_...
//    8  each step makes new streams                        test_races.py
//    9  a step that is given up leaks                      here: a_step_that_is_given_up_...
//   10  buffers of inference_mode                          test_races.py
//   11  leaves that require a gradient are held            test_races.py
//   12  host memory is not given back                      test_races.py
//   13  a write in place after the copy was queued         test_races.py
#include "chain.h"
#include "thread_backend.h"

using namespace check;

namespace {

constexpr size_t kBytes = 1000;

// --- in virtual time: a program's races, with a fault ---

std::vector<std::string> races(Fault fault, const std::function<void(Machine&)>& program) {
  Machine machine;
  machine.time->fault = fault;
  machine.start(2);
  program(machine);
  machine.time->host_waits();
  machine.engine->synchronize();
  return machine.time->races;
}

bool has(const std::vector<std::string>& races, const std::string& text) {
  return std::any_of(races.begin(), races.end(),
                     [&](const std::string& race) { return race.find(text) != std::string::npos; });
}

void steps(Machine& machine) {
  // Copies take longer than the computation, which is where orders matter.
  const auto parts = equal_parts(12, kBytes, 0.4e-3, 0.3e-3);
  for (int step = 0; step < 3; ++step) {
    auto sequence = std::make_shared<Sequence>();
    sequence->keep_last = 1;
    machine.backward(parts, machine.forward(parts, sequence));
  }
}

// Backward in a stream that the copies away were not waited for in.
void backward_in_another_stream(Machine& machine) {
  const auto parts = equal_parts(12, kBytes, 0.4e-3, 0.3e-3);
  auto tickets = machine.forward(parts, std::make_shared<Sequence>());
  machine.time->current_stream = 1;
  machine.backward(parts, std::move(tickets));
  machine.time->current_stream = 0;
}

// --- on threads: the bytes, with a fault ---

struct Threads {
  ThreadDevicePtr device = std::make_shared<ThreadDevice>();
  std::shared_ptr<Engine> engine;
  std::shared_ptr<Sequence> sequence = std::make_shared<Sequence>();

  Threads(Fault fault, size_t copies_in_flight) {
    device->fault = fault;
    EngineOptions options;
    options.copies_in_flight = copies_in_flight;
    engine = std::make_shared<Engine>(std::make_unique<ThreadBackend>(device), options);
  }
  ~Threads() {
    engine->synchronize();
    device->wait_until_idle();
  }

  std::shared_ptr<Ticket> give(unsigned seed) {
    Memory memory = device->allocate(kBytes);
    device->fill(memory, seed);
    return engine->offload(std::move(memory), sequence);
  }
  void take(Ticket& ticket, unsigned seed) {
    device->expect(engine->restore(ticket, 1).memory, seed);
  }
  // Other work, with memory of the same size.
  void work(unsigned seed) {
    const Memory memory = device->allocate(kBytes);
    device->fill(memory, seed);
    device->expect(memory, seed);
  }
  int wrong() {
    device->compute[0]->wait_until_idle();
    return device->wrong;
  }
};

// ThreadSanitizer would end the program at the fault's own race.
#if defined(__SANITIZE_THREAD__)
constexpr bool kFaultsMayRun = false;
#else
constexpr bool kFaultsMayRun = true;
#endif

void check_fault(Fault fault, size_t copies_in_flight,
                 const std::function<void(Threads&)>& program) {
  for (const Fault planted : {Fault::none, fault}) {
    if (planted != Fault::none && !kFaultsMayRun) continue;
    Threads threads(planted, copies_in_flight);
    program(threads);
    CHECK((threads.wrong() > 0) == (planted != Fault::none));
  }
}

}  // namespace

TEST(the_schedule_s_races_are_seen_in_virtual_time) {
  CHECK(races(Fault::none, steps).empty());
  CHECK(has(races(Fault::reached_too_early, steps), "is freed while a copy reads it"));
  CHECK(has(races(Fault::reached_too_early, steps), "a room is freed while it is read"));
  CHECK(has(races(Fault::wait_ignored, steps), "is freed while a copy reads it"));
  CHECK(has(races(Fault::wait_ignored, steps), "reads what has not come back"));
  CHECK(has(races(Fault::store_ignores_ready, steps), "reads what is not written yet"));
  CHECK(has(races(Fault::load_ignores_ready, steps), "that other work still uses"));
  CHECK(races(Fault::none, backward_in_another_stream).empty());
  CHECK(has(races(Fault::load_ignores_stored, backward_in_another_stream),
            "reads a room before it is full"));
}

// Race 1.
TEST(a_source_is_not_freed_before_its_copy_ends) {
  check_fault(Fault::reached_too_early, 4, [](Threads& threads) {
    threads.device->out.pause();
    auto ticket = threads.give(1);
    auto other = threads.give(2);  // finds out whether the first copy is done
    threads.work(3);
    threads.device->compute[0]->wait_until_idle();
    threads.device->out.resume();
    threads.take(*ticket, 1);
    threads.take(*other, 2);
  });
}

TEST(a_source_is_written_before_its_copy_begins) {
  check_fault(Fault::store_ignores_ready, 4, [](Threads& threads) {
    threads.device->compute[0]->pause();
    auto ticket = threads.give(1);
    threads.device->out.wait_until_idle_or_stuck();
    threads.device->compute[0]->resume();
    threads.engine->synchronize();
    threads.take(*ticket, 1);
  });
}

// Race 4.
TEST(a_copy_back_waits_for_its_own_copy_away) {
  check_fault(Fault::load_ignores_stored, 1, [](Threads& threads) {
    threads.device->out.pause();
    auto ticket = threads.give(1);
    auto other = threads.give(2);  // the computation waits for the first copy; so its source goes
    // Backward in another stream, which does not wait for that.
    threads.device->compute.push_back(std::make_unique<ThreadStream>());
    ThreadDevice::current() = 1;
    threads.take(*ticket, 1);
    threads.device->in.wait_until_idle_or_stuck();
    threads.device->out.resume();
    threads.device->compute[1]->wait_until_idle();
    ThreadDevice::current() = 0;
  });
}

// Race 5.
TEST(room_is_not_reused_while_a_copy_of_the_step_before_reads_it) {
  check_fault(Fault::reached_too_early, 4, [](Threads& threads) {
    auto ticket = threads.give(1);
    threads.device->wait_until_idle();
    threads.engine->synchronize();
    threads.device->in.pause();
    threads.take(*ticket, 1);
    ticket.reset();
    auto next = threads.give(2);
    threads.device->out.wait_until_idle_or_stuck();
    threads.device->in.resume();
    threads.take(*next, 2);
  });
}

// Race 7, both ways: the memory's last user, and its next one.
TEST(memory_that_comes_back_is_not_written_while_other_work_uses_it) {
  check_fault(Fault::load_ignores_ready, 4, [](Threads& threads) {
    auto ticket = threads.give(1);
    threads.device->wait_until_idle();
    threads.engine->synchronize();
    threads.device->compute[0]->pause();
    threads.work(2);  // its memory is given to what comes back
    threads.take(*ticket, 1);
    threads.device->in.wait_until_idle_or_stuck();
    threads.device->compute[0]->resume();
  });
}

TEST(memory_that_comes_back_is_not_read_before_it_is_there) {
  check_fault(Fault::wait_ignored, 4, [](Threads& threads) {
    auto ticket = threads.give(1);
    threads.device->wait_until_idle();
    threads.engine->synchronize();
    threads.device->in.pause();
    threads.take(*ticket, 1);
    threads.device->compute[0]->wait_until_idle_or_stuck();
    threads.device->in.resume();
  });
}

// Nobody came for it; its copy is under way when its ticket goes.
TEST(memory_that_was_prefetched_in_vain_is_held_until_its_copy_ends) {
  check_fault(Fault::reached_too_early, 4, [](Threads& threads) {
    auto first = threads.give(1);
    auto second = threads.give(2);
    threads.device->wait_until_idle();
    threads.engine->synchronize();
    threads.take(*second, 2);  // prefetches the first
    threads.device->compute[0]->wait_until_idle();
    threads.device->in.pause();
    threads.take(*second, 2);
    first.reset();
    threads.engine->backward_ended(1);
    threads.device->compute[0]->wait_until_idle_or_stuck();
    const Memory memory = threads.device->allocate(kBytes);
    threads.device->fill(memory, 3);
    threads.device->compute[0]->wait_until_idle_or_stuck();
    threads.device->in.resume();
    threads.device->in.wait_until_idle();
    threads.device->expect(memory, 3);
  });
}

// Race 9.
TEST(a_step_that_is_given_up_leaks_nothing) {
  for (const bool forgets : {false, true}) {
    Machine machine;
    machine.start(2);
    const auto parts = equal_parts(8, kBytes, 0.2e-3, 0);
    std::vector<std::shared_ptr<Ticket>> forgotten;
    for (int step = 0; step < 5; ++step) {
      auto tickets = machine.forward(parts, std::make_shared<Sequence>());
      machine.restore(tickets[6], 0, step);
      // The fault: something holds the tickets of a step that raised.
      if (forgets) forgotten.insert(forgotten.end(), tickets.begin(), tickets.end());
      tickets.clear();
      machine.time->host_waits();
      machine.engine->synchronize();
    }
    const bool leaks = machine.time->live > 0 || machine.time->room.in_use > 0;
    CHECK(leaks == forgets);
    CHECK(machine.time->races.empty());
  }
}

// A copy back that was given up may read the room when a later one has ended: I/O threads run them
// side by side.
TEST(a_room_is_held_for_each_copy_that_reads_it) {
  Machine machine;
  machine.start(2);
  auto sequence = std::make_shared<Sequence>();
  auto first = machine.engine->offload(machine.written(kBytes), sequence);
  auto second = machine.engine->offload(machine.written(kBytes), sequence);
  machine.time->host_waits();
  machine.restore(second, 0, 1);  // prefetches the first
  const double until = machine.time->in + 1;
  machine.time->last_loaded->read_until = until;
  machine.time->last_load_event->move_to(until);  // a slow one
  machine.engine->backward_ended(1);
  machine.restore(first, 0, 2);
  first.reset();
  machine.time->host_waits_until(machine.time->in);
  static_cast<void>(machine.engine->stats());
  CHECK(machine.time->races.empty());
  second.reset();
  machine.time->host_waits_until(until);
  machine.check_empty();
}
