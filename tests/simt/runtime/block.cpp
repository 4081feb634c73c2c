#include "block.h"

#include <algorithm>
#include <numeric>
#include <sstream>
#include <vector>

#include "fiber.h"
#include "meeting.h"
#include "shared_memory.h"

uint3 threadIdx;
uint3 blockIdx;
dim3 blockDim;
dim3 gridDim;

namespace simt {

Fault fault;

namespace {

// The fibers of all threads that a block can have. Made once: a fiber serves block after block.
std::vector<Thread>& all_threads() {
  static std::vector<Thread> threads = [] {
    std::vector<Thread> made;
    for (int i = 0; i < Fiber::kMaxFibers; ++i) made.emplace_back(i);
    return made;
  }();
  return threads;
}

const void* running_kernel = nullptr;
Thread* running_thread = nullptr;

void run_thread(Thread& thread, void (*body)()) {
  running_thread = &thread;
  threadIdx = thread.index;
  if (thread.fiber.resume(body)) thread.state = Thread::State::kExited;
  running_thread = nullptr;
}

// Puts 0 .. n-1 in the schedule's order; called anew for every sweep, so that kShuffled interleaves
// differently each time.
void arrange(std::vector<int>& turns, int n, Schedule& schedule) {
  turns.resize(n);
  std::iota(turns.begin(), turns.end(), 0);
  if (schedule.order == Order::kDescending) std::reverse(turns.begin(), turns.end());
  if (schedule.order == Order::kShuffled) std::shuffle(turns.begin(), turns.end(), schedule.random);
}

// One turn for each lane that can run, then the meetings that are complete. True if any lane ran.
bool sweep(Warp warp, void (*body)(), Schedule& schedule) {
  static std::vector<int> turns;
  arrange(turns, static_cast<int>(warp.size()), schedule);
  bool ran = false;
  for (const int lane : turns) {
    Thread& thread = warp[lane];
    if (thread.state != Thread::State::kReady) continue;
    run_thread(thread, body);
    if (!fault.text.empty()) return false;
    ran = true;
  }
  complete_meetings(warp);
  return ran && fault.text.empty();
}

// In ascending and descending order a warp runs as far as it can alone, so that one warp is a whole
// barrier ahead of the next; in shuffled order warps interleave at every meeting.
bool sweep_all(std::vector<Warp>& warps, void (*body)(), Schedule& schedule) {
  static std::vector<int> turns;
  arrange(turns, static_cast<int>(warps.size()), schedule);
  bool any = false;
  for (const int w : turns) {
    while (sweep(warps[w], body, schedule)) {
      any = true;
      if (schedule.order == Order::kShuffled) break;
    }
    if (!fault.text.empty()) return false;
  }
  return any;
}

std::string coordinates(const char* what, unsigned x, unsigned y) {
  return std::string(what) + " (" + std::to_string(x) + ", " + std::to_string(y) + ")";
}

}  // namespace

void report(const std::string& text) {
  if (fault.text.empty()) {
    fault.text = text;
    fault.kernel = running_kernel;
    if (running_kernel) fault.text += "; " + coordinates("block", blockIdx.x, blockIdx.y);
    if (running_thread) fault.text += ", " + coordinates("thread", threadIdx.x, threadIdx.y);
  }
  if (running_thread) Fiber::pause();
}

uint64_t meet(const Arrival& arrival) {
  Thread& self = *running_thread;
  self.arrival = arrival;
  check_arrival(self);
  self.state = Thread::State::kWaiting;
  Fiber::pause();
  return self.arrival.value;
}

void require_aligned(const void* address, size_t alignment, const char* file, int line) {
  if (reinterpret_cast<uintptr_t>(address) % alignment == 0) return;
  std::ostringstream text;
  text << "misaligned access: " << alignment << " bytes at address " << address << " in "
       << place(file, line);
  report(text.str());
}

bool run_block(const void* kernel, void (*body)(), size_t dynamic_shared, Schedule& schedule) {
  running_kernel = kernel;
  const int size = static_cast<int>(blockDim.x * blockDim.y * blockDim.z);
  const std::span<Thread> threads(all_threads().data(), size);
  for (Thread& thread : threads) thread.begin(blockDim);
  std::vector<Warp> warps;
  for (int i = 0; i < size; i += warpSize)
    warps.push_back(threads.subspan(i, std::min(warpSize, size - i)));

  prepare_shared_memory(dynamic_shared);
  do {
    while (sweep_all(warps, body, schedule)) {
    }
  } while (fault.text.empty() && complete_barrier(threads));

  for (Thread& thread : threads) {
    if (thread.state != Thread::State::kExited) thread.fiber.abandon();
  }
  running_kernel = nullptr;
  return fault.text.empty();
}

}  // namespace simt
