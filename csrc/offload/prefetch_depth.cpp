#include "prefetch_depth.h"

#include <algorithm>

namespace memopt::offload {

double stall_with_depth(const std::vector<Requested>& requests, size_t depth) {
  double now = 0;
  double stall = 0;
  double link_is_free = 0;
  std::vector<double> done(requests.size());
  size_t begun = 0;  // copies, of the requests in their order
  for (size_t i = 0; i < requests.size(); ++i) {
    const auto begin_up_to = [&](size_t end) {
      for (; begun < std::min(end, requests.size()); ++begun) {
        const double copy = requests[begun].copy_seconds;
        if (copy > 0) link_is_free = std::max(link_is_free, now) + copy;
        done[begun] = copy > 0 ? link_is_free : 0;
      }
    };
    begin_up_to(i + 1);
    stall += std::max(0.0, done[i] - now);
    now = std::max(now, done[i]);
    begin_up_to(i + 1 + depth);
    now += requests[i].compute_seconds;
  }
  return stall;
}

size_t least_depth(const std::vector<Requested>& requests, size_t most) {
  if (most <= 1) return 1;
  double compute = 0;
  for (const auto& request : requests) compute += request.compute_seconds;
  const double least = stall_with_depth(requests, most);
  const double allowed = least + 0.02 * (least + compute);
  for (size_t depth = 1; depth < most; ++depth) {
    if (stall_with_depth(requests, depth) <= allowed) return depth;
  }
  return most;
}

}  // namespace memopt::offload
