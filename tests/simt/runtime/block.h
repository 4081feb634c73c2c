// Runs one block: its threads in a chosen order, each until it meets others, and the meetings'
// rules.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <random>
#include <string>

namespace simt {

// The order in which threads that could all run do run. A correct kernel gives the same bits in
// every order.
enum class Order : int32_t { kAscending, kDescending, kShuffled };

struct Schedule {
  Order order = Order::kAscending;
  std::mt19937 random;
};

// The first fault since the last reset, empty while there is none. It ends the launch that it is
// found in.
struct Fault {
  std::string text;
  const void* kernel = nullptr;
};
extern Fault fault;

// Records a fault of the running kernel, or of the host where none runs. Inside a thread it does
// not return.
void report(const std::string& text);

// Runs the block `blockIdx` of a launch; false if it faulted.
bool run_block(const void* kernel, void (*thread)(), size_t dynamic_shared, Schedule& schedule);

}  // namespace simt
