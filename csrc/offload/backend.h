// The machine as the engine sees it: space outside of the device, and copies there and back.
//
// Three kinds implement it: a device's streams with pinned host memory (saved/stream_backend.h),
// a file written by I/O threads (file_backend.h), and the test backends (tests/offload), whose
// copies take as long as a test says and whose memory is poisoned.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "event.h"

namespace memopt::offload {

// Memory of the device (of the process, where the device is the CPU). `owner` keeps it allocated.
struct Memory {
  void* data = nullptr;
  size_t bytes = 0;
  std::shared_ptr<void> owner;
};

// Room for one copy away from the device. Its destructor gives it back to the next one, so it is
// only destroyed when no copy reads or writes it any more.
class Room {
 public:
  virtual ~Room() = default;
};

// How the room of a backend stands, in bytes.
struct RoomUse {
  size_t in_use = 0;
  size_t high_water = 0;  // the most that was in use at one time
  size_t allocated = 0;   // what the pool or the file holds, in use or not
  size_t pageable = 0;    // of it: host memory that could not be pinned
};

// A stream of the device, in the backend's own numbering. The CPU has one, 0.
using StreamId = int64_t;

// All functions may be called by any thread. None of them waits for a copy, except wait() of a
// backend whose "device" is the calling thread.
class Backend {
 public:
  virtual ~Backend() = default;

  // The stream that the calling thread's next work goes to.
  virtual StreamId current_stream() = 0;

  // The moment at which everything that was given to the current stream so far is done.
  virtual EventPtr now() = 0;

  // Room for `bytes` > 0; null where there is none (the pool's cap, a full disk).
  virtual std::unique_ptr<Room> reserve(size_t bytes) = 0;

  // Why not, and what the user can do.
  virtual std::string no_room(size_t bytes) = 0;

  // Device memory for the current stream. May raise, when the device has no memory left.
  virtual Memory allocate(size_t bytes) = 0;

  // Begins to copy all of `from` into `to`, once `ready` is reached; returns the moment at which
  // that is done. `from` and `to` stay allocated until then. `from` belongs to the current stream.
  virtual EventPtr store(const Memory& from, Room& to, const EventPtr& ready) = 0;

  // The way back, once `ready` and `stored`, which store() gave, are reached. `to` belongs to the
  // current stream.
  virtual EventPtr load(Room& from, const Memory& to, const EventPtr& ready,
                        const EventPtr& stored) = 0;

  // The copy that ends in `done` is wanted no more. Where that is possible it ends early, and the
  // event counts as failed.
  virtual void cancel(const EventPtr& done) { static_cast<void>(done); }

  // What the current stream is given from now on runs after `event`. On the CPU: blocks.
  virtual void wait(const EventPtr& event) = 0;

  virtual RoomUse room_use() = 0;

  // Gives back the memory or the disk blocks that nothing is in; returns their bytes.
  virtual size_t trim() { return 0; }
};

}  // namespace memopt::offload
