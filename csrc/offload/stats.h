// The counts of an engine since it was made, or since they were reset.
#pragma once

#include <algorithm>
#include <cstddef>

#include "backend.h"

namespace memopt::offload {

// One direction of the link.
struct LinkStats {
  size_t copies = 0;
  size_t bytes = 0;
  // What follows is known once the copies are done: of the copies that were timed so far.
  size_t bytes_timed = 0;
  double busy_seconds = 0;   // with at least one copy under way
  double stall_seconds = 0;  // the device waited for a copy
  size_t most_in_flight = 0;
  size_t most_bytes_in_flight = 0;

  void count_in_flight(size_t copies, size_t bytes) {
    most_in_flight = std::max(most_in_flight, copies);
    most_bytes_in_flight = std::max(most_bytes_in_flight, bytes);
  }
};

struct Stats {
  LinkStats out;  // away from the device
  LinkStats in;   // back
  // How a restored tensor was found.
  size_t prefetch_hits = 0;    // its copy was back, or on its way
  size_t prefetch_misses = 0;  // its copy had to be begun then
  size_t never_left = 0;       // wanted before it had left
  // Copied away in vain: something else held the memory when it was wanted.
  size_t found_elsewhere_bytes = 0;
  // What stayed on the device.
  size_t refused_bytes = 0;  // there was no space
  size_t failed_bytes = 0;   // the copy failed
  size_t bytes_away = 0;     // now, without a copy on the device
  size_t bytes_held = 0;     // now on the device, of what the engine was given
  RoomUse room;
};

}  // namespace memopt::offload
