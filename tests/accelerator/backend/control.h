// What tests set and read. control.cpp gives it to Python as plain C functions.
#pragma once

#include <cstddef>
#include <cstdint>

#include "streams.h"

namespace sim {

void pause_stream(const c10::Stream& stream, bool paused);  // before its next task
void resume_streams();
void delay_stream(const c10::Stream& stream, Kind kind, double seconds);
void delay_all(Kind kind, double seconds);               // of all streams, later ones too
void random_delays(uint64_t seed, double most_seconds);  // before every task, of any kind
void set_patience(double seconds);                       // how long the host waits for a stream

void trace(const c10::Stream& stream, const Task& task);  // called before each task

struct MemoryCounts {
  int64_t allocated = 0;     // bytes now
  int64_t peak = 0;          // bytes at most
  int64_t reservations = 0;  // allocations that no freed block could serve ("cudaMalloc")
  int64_t recorded = 0;      // record_stream calls
};
MemoryCounts memory_counts(c10::DeviceIndex device);
void reset_peak(c10::DeviceIndex device);
void set_capacity(c10::DeviceIndex device, int64_t bytes);  // more raise OutOfMemoryError

struct PinnedCounts {
  int64_t allocated = 0;     // bytes now
  int64_t reservations = 0;  // allocations that no freed block could serve ("cudaHostAlloc")
};
PinnedCounts pinned_counts();
void set_pinning_works(bool works);
void set_pinned_strict(bool strict);

// What broken code would do, planted below PyTorch's stream interface, so that only code that uses
// that is hit: the tests' own kernels and copies run as they should.
enum class Fault : int {
  none,
  waits_are_ignored,     // no stream waits for an event
  moments_are_reached,   // every event counts as reached at once
  stream_is_remembered,  // the default stream is taken for the current one
};
void set_fault(Fault fault);
Fault fault();

void cover_operators();  // once memopt is imported

}  // namespace sim
