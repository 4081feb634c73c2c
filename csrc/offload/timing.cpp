#include "timing.h"

#include <algorithm>
#include <utility>

namespace memopt::offload {

namespace {

// Of a backward, from its beginning: what comes after is like what came before.
constexpr size_t kMostRequests = 4096;

}  // namespace

void Timing::copy_out(EventPtr ready, EventPtr done, size_t bytes) {
  out_.copies.push_back({std::move(ready), std::move(done), bytes});
}

void Timing::copy_in(EventPtr ready, EventPtr done, size_t bytes) {
  in_.copies.push_back({std::move(ready), std::move(done), bytes});
}

void Timing::stall_out(EventPtr before, EventPtr done) {
  out_.stalls.push_back({std::move(before), std::move(done)});
}

void Timing::restored(EventPtr asked, EventPtr loaded, size_t bytes, int64_t backward) {
  if (loaded != nullptr) in_.stalls.push_back({asked, loaded});
  requests_.push_back({std::move(asked), std::move(loaded), bytes, backward});
}

void Timing::Direction::settle(LinkStats& stats) {
  while (!copies.empty() && copies.front().ready->reached() && copies.front().done->reached()) {
    const Copy copy = std::move(copies.front());
    copies.pop_front();
    if (copy.done->failed()) continue;
    double busy = copy.done->seconds_after(*copy.ready);
    if (last_done != nullptr) busy = std::min(busy, copy.done->seconds_after(*last_done));
    // Negative if it was done before one that was begun earlier.
    if (busy >= 0) last_done = copy.done;
    stats.busy_seconds += std::max(busy, 0.0);
    stats.bytes_timed += copy.bytes;
  }
  while (!stalls.empty() && stalls.front().before->reached() && stalls.front().done->reached()) {
    const Stall stall = std::move(stalls.front());
    stalls.pop_front();
    stats.stall_seconds += std::max(0.0, stall.done->seconds_after(*stall.before));
  }
}

void Timing::settle(LinkStats& out, LinkStats& in) {
  LinkStats more;
  out_.settle(out);
  in_.settle(more);
  in.busy_seconds += more.busy_seconds;
  in.stall_seconds += more.stall_seconds;
  in.bytes_timed += more.bytes_timed;
  if (more.bytes_timed > 0) {
    const double latest = more.busy_seconds / static_cast<double>(more.bytes_timed);
    seconds_per_byte_ = seconds_per_byte_ == 0 ? latest : (7 * seconds_per_byte_ + latest) / 8;
  }
  settle_requests();
}

void Timing::settle_requests() {
  const auto is_known = [](const Request& request) {
    return request.asked->reached() && (request.loaded == nullptr || request.loaded->reached());
  };
  while (requests_.size() > 1 && is_known(requests_[0]) && is_known(requests_[1])) {
    const auto& [asked, loaded, bytes, backward] = requests_[0];
    const auto& next = requests_[1];
    double stall = 0;
    if (loaded != nullptr) stall = std::max(0.0, loaded->seconds_after(*asked));
    if (measured_.size() < kMostRequests) {
      measured_.push_back({loaded == nullptr ? 0 : static_cast<double>(bytes) * seconds_per_byte_,
                           std::max(0.0, next.asked->seconds_after(*asked) - stall)});
    }
    if (next.backward != backward) {
      measured_.back().compute_seconds = 0;
      last_ = std::exchange(measured_, {});
      depth_most_ = 0;
    }
    requests_.pop_front();
  }
}

size_t Timing::prefetch_depth(size_t most) {
  if (last_.empty() || seconds_per_byte_ == 0) return 1;
  if (depth_most_ != most) {
    depth_ = least_depth(last_, most);
    depth_most_ = most;
  }
  return depth_;
}

}  // namespace memopt::offload
