// The rules of barriers, warp barriers and shuffles: who has to come, what each gets, and what is a
// fault.
#pragma once

#include <cuda_runtime.h>

#include <span>
#include <string>

#include "fiber.h"

namespace simt {

struct Thread {
  enum class State { kReady, kWaiting, kExited };

  explicit Thread(int number) : number(number), fiber(number) {}

  // A new block begins.
  void begin(const dim3& block) {
    const unsigned n = static_cast<unsigned>(number);
    index = {n % block.x, n / block.x % block.y, n / (block.x * block.y)};
    state = State::kReady;
  }

  int lane() const { return number % warpSize; }

  int number;  // in its block
  Fiber fiber;
  State state = State::kReady;
  uint3 index{};

  // While kWaiting: where and with what. A shuffle's result comes back in its value.
  Arrival arrival{};
};

using Warp = std::span<Thread>;

// Called in the arriving thread: what is wrong whoever else comes.
void check_arrival(const Thread& self);

// Called when no lane of the warp can run: lets the lanes go whose meeting is complete. Reports a
// fault when lanes wait for others of their warp and none of them can go on.
void complete_meetings(Warp warp);

// Called when no thread of the block can run: true if all wait at one barrier and go on, false if
// all have exited. Anything else is a divergent barrier, which it reports (and returns false).
bool complete_barrier(std::span<Thread> block);

// "file.cuh:12", the file without its folder.
std::string place(const char* file, int line);

}  // namespace simt
