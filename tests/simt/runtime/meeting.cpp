#include "meeting.h"

#include <bit>
#include <cstring>
#include <sstream>

#include "block.h"

namespace simt {
namespace {

const char* name(Meeting meeting) {
  switch (meeting) {
    case Meeting::kBarrier:
      return "__syncthreads";
    case Meeting::kSyncWarp:
      return "__syncwarp";
    case Meeting::kShuffle:
      return "__shfl_sync";
    case Meeting::kShuffleXor:
      return "__shfl_xor_sync";
    case Meeting::kShuffleDown:
      return "__shfl_down_sync";
  }
  return "?";
}

std::string hex(unsigned mask) {
  std::ostringstream text;
  text << "0x" << std::hex << mask;
  return text.str();
}

std::string describe(const Arrival& a) {
  std::string text = std::string(name(a.meeting)) + " (" + place(a.file, a.line) + ")";
  if (a.meeting != Meeting::kBarrier) text += " with mask " + hex(a.mask);
  return text;
}

std::string whereabouts(const Thread& thread) {
  return thread.state == Thread::State::kExited ? "has exited"
                                                : "waits at " + describe(thread.arrival);
}

// The same call in the source. Threads that meet from two places have diverged, even where the
// hardware would let them pass.
bool same_place(const Arrival& a, const Arrival& b) {
  return a.meeting == b.meeting && a.mask == b.mask && a.width == b.width && a.line == b.line &&
         (a.file == b.file || std::strcmp(a.file, b.file) == 0);
}

bool names(unsigned mask, int lane) {
  return mask >> lane & 1;
}

// The lane that keeps the meeting of `self` from being complete, or -1.
int missing_lane(Warp warp, const Thread& self) {
  for (int lane = 0; lane < warpSize; ++lane) {
    if (!names(self.arrival.mask, lane)) continue;
    if (lane >= static_cast<int>(warp.size())) return lane;
    const Thread& other = warp[lane];
    if (other.state != Thread::State::kWaiting || !same_place(other.arrival, self.arrival))
      return lane;
  }
  return -1;
}

// The lane whose value `lane` receives, as PTX defines shfl.sync: within its group of `width`
// lanes, or its own.
int source_lane(const Arrival& a, int lane) {
  const int first = lane & ~(a.width - 1);
  const int last = first + a.width - 1;
  int source = lane;
  switch (a.meeting) {
    case Meeting::kShuffle:
      source = first + (a.operand & (a.width - 1));
      break;
    case Meeting::kShuffleXor:
      source = lane ^ a.operand;
      break;
    case Meeting::kShuffleDown:
      source = lane + a.operand;
      break;
    default:
      break;
  }
  return source <= last ? source : lane;
}

// All lanes of the mask are here: exchange the values and let the lanes go.
void complete(Warp warp, const Arrival& meeting) {
  uint64_t received[warpSize];
  for (int lane = 0; lane < warpSize; ++lane) {
    if (!names(meeting.mask, lane)) continue;
    const int source = source_lane(warp[lane].arrival, lane);
    if (!names(meeting.mask, source)) {
      report("absent lane: lane " + std::to_string(lane) + " reads lane " + std::to_string(source) +
             " in " + describe(meeting));
      return;
    }
    received[lane] = warp[source].arrival.value;
  }
  for (int lane = 0; lane < warpSize; ++lane) {
    if (!names(meeting.mask, lane)) continue;
    warp[lane].arrival.value = received[lane];
    warp[lane].state = Thread::State::kReady;
  }
}

}  // namespace

std::string place(const char* file, int line) {
  const char* slash = std::strrchr(file, '/');
  return std::string(slash ? slash + 1 : file) + ":" + std::to_string(line);
}

void check_arrival(const Thread& self) {
  const Arrival& a = self.arrival;
  if (a.meeting == Meeting::kBarrier) return;
  if (!names(a.mask, self.lane())) {
    report("mask without its caller: lane " + std::to_string(self.lane()) + " at " + describe(a));
  }
  if (a.width < 1 || a.width > warpSize || !std::has_single_bit(static_cast<unsigned>(a.width))) {
    report("shuffle width must be a power of two up to 32, got " + std::to_string(a.width) +
           " at " + describe(a));
  }
}

void complete_meetings(Warp warp) {
  bool any = false;
  const Thread* stuck = nullptr;
  for (const Thread& thread : warp) {
    if (thread.state != Thread::State::kWaiting || thread.arrival.meeting == Meeting::kBarrier)
      continue;
    if (missing_lane(warp, thread) < 0) {
      complete(warp, Arrival(thread.arrival));
      any = true;
    } else {
      stuck = &thread;
    }
  }
  if (!stuck || any) return;
  const int lane = missing_lane(warp, *stuck);
  const bool exists = lane < static_cast<int>(warp.size());
  report("absent lane: lane " + std::to_string(stuck->lane()) + " of warp " +
         std::to_string(stuck->number / warpSize) + " waits at " + describe(stuck->arrival) +
         ", but lane " + std::to_string(lane) + " " +
         (exists ? whereabouts(warp[lane]) : "is not in the block"));
}

bool complete_barrier(std::span<Thread> block) {
  const Thread* waiting = nullptr;
  for (const Thread& thread : block) {
    if (thread.state == Thread::State::kWaiting) waiting = &thread;
  }
  if (!waiting) return false;
  for (const Thread& thread : block) {
    if (thread.state == Thread::State::kWaiting && same_place(thread.arrival, waiting->arrival))
      continue;
    report("divergent barrier: thread " + std::to_string(waiting->number) + " waits at " +
           describe(waiting->arrival) + ", but thread " + std::to_string(thread.number) + " " +
           whereabouts(thread));
    return false;
  }
  for (Thread& thread : block) thread.state = Thread::State::kReady;
  return true;
}

}  // namespace simt
