// The engine over streams that are threads: random programs in several threads, with every restored
// byte compared. `make sanitize` runs them with the sanitizers.
#include <random>

#include "../../../csrc/offload/engine.h"
#include "../../support/check.h"
#include "thread_backend.h"

using namespace check;
using offload::Engine;
using offload::Memory;
using offload::Sequence;
using offload::Ticket;

namespace {

struct Given {
  std::shared_ptr<Ticket> ticket;
  unsigned seed;
  int64_t stream;
};

// What the threads hand to each other.
struct Shared {
  ThreadDevicePtr device;
  std::shared_ptr<Engine> engine;
  std::atomic<int64_t> backwards = 0;
  std::atomic<unsigned> seeds = 0;
  std::atomic<int> raised = 0;
  std::mutex mutex;
  std::vector<Given> handed_over;
};

void restore(Shared& shared, const Given& given, int64_t backward) {
  try {
    const auto restored = shared.engine->restore(*given.ticket, backward);
    shared.device->expect(restored.memory, given.seed);
    // Memory of another stream is only free when this one has read it: the caller's duty.
    if (given.stream != ThreadDevice::current()) shared.device->current_stream().wait_until_idle();
  } catch (const std::runtime_error&) {
    ++shared.raised;
  }
}

void random_program(Shared& shared, int64_t stream, unsigned seed, int steps) {
  std::mt19937 random(seed);
  const auto one_of = [&](unsigned count) { return random() % count; };
  ThreadDevice::current() = stream;
  auto of_thread = std::make_shared<Sequence>();
  std::vector<Given> left;  // of the step before
  for (int step = 0; step < steps; ++step) {
    auto sequence = one_of(2) == 0 ? of_thread : std::make_shared<Sequence>();
    if (sequence != of_thread) sequence->keep_last = one_of(3);
    std::vector<Given> given;
    const unsigned count = 1 + one_of(12);
    for (unsigned i = 0; i < count; ++i) {
      const size_t bytes = size_t{64} << one_of(4);
      const unsigned pattern = ++shared.seeds;
      Memory memory = shared.device->allocate(bytes);
      shared.device->fill(memory, pattern);
      given.push_back({shared.engine->offload(std::move(memory), sequence), pattern, stream});
      if (one_of(16) == 0) given.erase(given.begin() + one_of(static_cast<unsigned>(given.size())));
    }
    if (one_of(8) == 0) shared.engine->synchronize();
    if (one_of(8) == 0) continue;  // given up
    if (one_of(4) == 0) std::shuffle(given.begin(), given.end(), random);
    const unsigned backwards = 1 + (one_of(4) == 0);
    for (unsigned repeat = 0; repeat < backwards; ++repeat) {
      const int64_t backward = ++shared.backwards;
      const bool is_last = repeat + 1 == backwards;
      const size_t until = one_of(4) == 0 ? one_of(static_cast<unsigned>(given.size() + 1)) : 0;
      for (size_t i = given.size(); i-- > until;) {
        if (one_of(24) == 0) {
          shared.engine->found_elsewhere(*given[i].ticket, backward);
        } else {
          restore(shared, given[i], one_of(16) == 0 ? -1 : backward);
        }
        if (is_last && one_of(3) != 0) given.erase(given.begin() + static_cast<ptrdiff_t>(i));
      }
      if (one_of(8) != 0) shared.engine->backward_ended(backward);
    }
    if (one_of(4) == 0) static_cast<void>(shared.engine->stats());
    // Some go to another thread, some to the next step, the rest go here.
    std::vector<Given> taken;
    {
      const std::lock_guard<std::mutex> lock(shared.mutex);
      taken.swap(shared.handed_over);
      if (one_of(3) == 0) shared.handed_over = std::move(left);
    }
    for (const auto& other : taken) restore(shared, other, ++shared.backwards);
    left = std::move(given);
  }
}

// How many restores raised.
int run(unsigned seed, size_t threads, size_t copies_in_flight, int steps,
        const std::function<void(ThreadDevice&)>& prepare) {
  Shared shared;
  shared.device = std::make_shared<ThreadDevice>(threads);
  prepare(*shared.device);
  offload::EngineOptions options;
  options.copies_in_flight = copies_in_flight;
  shared.engine = std::make_shared<Engine>(std::make_unique<ThreadBackend>(shared.device), options);
  std::vector<std::thread> running;
  for (size_t i = 0; i < threads; ++i) {
    running.emplace_back([&shared, i, seed, steps] {
      random_program(shared, static_cast<int64_t>(i), seed * 16 + static_cast<unsigned>(i), steps);
    });
  }
  for (auto& thread : running) thread.join();
  shared.handed_over.clear();
  shared.engine->synchronize();
  shared.device->wait_until_idle();
  CHECK(shared.device->wrong == 0);
  CHECK(shared.device->in_rooms == 0);
  CHECK(shared.device->live == 0);
  const auto stats = shared.engine->stats();
  CHECK(stats.bytes_away == 0 && stats.bytes_held == 0);
  CHECK(stats.out.most_in_flight <= copies_in_flight);
  return shared.raised;
}

}  // namespace

TEST(random_programs_of_several_threads_get_their_bytes) {
  for (unsigned seed = 0; seed < 9; ++seed) {
    const int raised = run(seed, 1 + seed % 4, 1 + seed % 3, 40, [&](ThreadDevice& device) {
      if (seed % 3 == 0) return;
      const unsigned slow = seed % 3 == 1 ? 10 : 60;
      device.out.random_delays(seed % 2 ? slow : 0, seed);
      device.in.random_delays(seed % 2 ? 0 : slow, seed + 1);
      for (auto& stream : device.compute) stream->random_delays(10, seed + 2);
    });
    CHECK(raised == 0);
  }
}

TEST(random_programs_of_devices_that_are_waited_for) {
  for (unsigned seed = 100; seed < 108; ++seed) {
    const int raised = run(seed, 1 + seed % 3, 1 + seed % 4, 40, [&](ThreadDevice& device) {
      device.waits_on_host = true;
      device.out.random_delays(10, seed);
      device.in.random_delays(10, seed + 1);
    });
    CHECK(raised == 0);
  }
}

TEST(random_programs_with_copies_and_allocations_that_fail) {
  int raised = 0;
  for (unsigned seed = 200; seed < 208; ++seed) {
    raised += run(seed, 1 + seed % 3, 1 + seed % 4, 40, [&](ThreadDevice& device) {
      device.waits_on_host = true;
      const auto one_in = [seed](unsigned count) {
        return [count, calls = std::make_shared<std::atomic<unsigned>>(seed)] {
          return ++*calls % count == 0;
        };
      };
      device.store_fails = one_in(5);
      device.load_fails = one_in(7);
      device.allocate_fails = one_in(11);
    });
  }
  CHECK(raised > 0);
}

// An allocator may call Python (a recorder of its history), which waits for whoever holds Python's
// lock; and that thread may be about to ask the engine.
TEST(memory_is_allocated_outside_the_lock) {
  auto device = std::make_shared<ThreadDevice>(2);
  auto engine =
      std::make_shared<Engine>(std::make_unique<ThreadBackend>(device), offload::EngineOptions{});
  auto sequence = std::make_shared<Sequence>();
  std::vector<std::shared_ptr<Ticket>> tickets;
  for (unsigned i = 0; i < 4; ++i) {
    Memory memory = device->allocate(64);
    device->fill(memory, i);
    tickets.push_back(engine->offload(std::move(memory), sequence));
  }
  engine->synchronize();
  int allocations = 0;
  device->in_allocate = [&] {
    ++allocations;
    std::thread([&] { static_cast<void>(engine->stats()); }).join();
  };
  for (unsigned i = 4; i-- > 0;) {
    device->expect(engine->restore(*tickets[i], 1).memory, i);
    tickets.pop_back();
  }
  CHECK(allocations == 4);
  engine->synchronize();
  device->wait_until_idle();
  CHECK(device->wrong == 0 && device->live == 0);
}
