// Chooses how far ahead to prefetch, from the times of a backward that was measured.
#pragma once

#include <cstddef>
#include <vector>

namespace memopt::offload {

// One request of a backward.
struct Requested {
  double copy_seconds;     // its copy back takes this long; 0 if it was on the device
  double compute_seconds;  // from its return to the next request
};

// How long the device would wait in all for copies that run one after another, if at each request
// the copies of the next `depth` were begun. O(requests).
double stall_with_depth(const std::vector<Requested>& requests, size_t depth);

// The least depth from 1 to `most` that waits no longer than `most` does, within 2 %.
size_t least_depth(const std::vector<Requested>& requests, size_t most);

}  // namespace memopt::offload
