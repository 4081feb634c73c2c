// A moment in the work of a device's stream or of an I/O thread (a "recorded event" in CUDA's
// words).
#pragma once

#include <memory>
#include <string>

namespace memopt::offload {

// May be asked by any thread.
class Event {
 public:
  virtual ~Event() = default;

  // Whether everything before it is done. Never blocks.
  virtual bool reached() = 0;

  // Blocks the calling thread until it is reached.
  virtual void wait() = 0;

  // After it is reached: whether the copy that it ends has failed (disk full, I/O error). Events
  // that end no copy never fail.
  virtual bool failed() { return false; }
  // And why.
  virtual std::string error() { return {}; }

  // Seconds from `earlier`, an event of the same backend, to this one. Both have been reached.
  virtual double seconds_after(Event& earlier) = 0;
};

using EventPtr = std::shared_ptr<Event>;

}  // namespace memopt::offload
