// What the Python side calls (device.py). Everything is for one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>

namespace simt {

// One launch as the device got it.
struct Launch {
  const void* kernel;
  unsigned grid[3];
  unsigned block[3];
  int64_t dynamic_shared;
  const void* stream;
};

}  // namespace simt

extern "C" {

// Back to the default device, ascending order, no launches, no fault.
void simt_reset();

void simt_set_attribute(int attribute, int value);  // a cudaDeviceAttr
void simt_set_order(int order, unsigned seed);      // a simt::Order

int64_t simt_launch_count();
const simt::Launch* simt_launch(int64_t i);

// The first fault since the reset: "" and null while there is none.
const char* simt_fault_text();
const void* simt_fault_kernel();

// Guard zones around a test's buffers: a kernel that touches one has a fault.
void simt_guard(const void* begin, size_t size);
void simt_unguard(const void* begin, size_t size);
}
