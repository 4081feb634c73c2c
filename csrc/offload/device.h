// The device as a backend without streams of its own, the file's, sees it.
#pragma once

#include "backend.h"

namespace memopt::offload {

// All functions may be called by any thread, read() and write() by the I/O threads.
class Device {
 public:
  virtual ~Device() = default;

  // As in Backend.
  virtual StreamId current_stream() = 0;
  virtual EventPtr now() = 0;
  virtual Memory allocate(size_t bytes) = 0;
  virtual void wait(const EventPtr& event) = 0;

  // Copy `bytes` of the device's memory, from or to byte `offset` of it, and return when that is
  // done. What the memory waits for was reached before. Raise std::exception on failure.
  virtual void read(void* host, const Memory& from, size_t offset, size_t bytes) = 0;
  virtual void write(const Memory& to, size_t offset, const void* host, size_t bytes) = 0;

  // Memory of the host that read() and write() are quick with, from the beginning of a page.
  virtual Memory host_buffer(size_t bytes);
};

}  // namespace memopt::offload
