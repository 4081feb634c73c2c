// A point in a stream's work, and when it was reached.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>

#include "streams.h"

namespace sim {

class Moment {
 public:
  void reach() {
    const std::lock_guard<std::mutex> lock(mutex_);
    reached_ = true;
    time_ = std::chrono::steady_clock::now();
    changed_.notify_all();
  }

  bool reached() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return reached_;
  }

  bool wait(std::optional<double> seconds) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto is_reached = [this] { return reached_; };
    if (seconds.has_value()) {
      return changed_.wait_for(lock, std::chrono::duration<double>(*seconds), is_reached);
    }
    changed_.wait(lock, is_reached);
    return true;
  }

  std::chrono::steady_clock::time_point time() const { return time_; }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
  std::chrono::steady_clock::time_point time_;
};

inline bool is_reached(const MomentPtr& moment) {
  return moment->reached();
}

inline double milliseconds_between(const MomentPtr& first, const MomentPtr& last) {
  return std::chrono::duration<double, std::milli>(last->time() - first->time()).count();
}

}  // namespace sim
