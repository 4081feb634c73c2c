// An event that a thread of the host reaches, rather than a stream of the device.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>

#include "event.h"
#include "process.h"

namespace memopt::offload {

// In a child of fork() those that were not reached before have failed: nobody is left to reach
// them.
class HostEvent : public Event {
 public:
  using Clock = std::chrono::steady_clock;

  // One that was reached right now.
  static EventPtr now();

  bool reached() override { return state() != State::pending; }
  void wait() override;
  bool failed() override { return state() == State::failed; }
  std::string error() override;

  // Where `earlier` is an event of the device, which has no time on the host's clock: seconds since
  // begin(), when the device was waited for.
  double seconds_after(Event& earlier) override;

  // Called at most once, before one of the next two is: the work that it ends begins.
  void begin() { begun_ = Clock::now(); }

  // One of these two is called, once.
  void reach();
  void fail(std::string error);

 private:
  enum class State { pending, done, failed };

  State state() const;
  void set(State state);

  Process process_;
  std::atomic<State> state_ = State::pending;
  Clock::time_point begun_;  // this and the next two do not change any more once state_ is set
  Clock::time_point reached_;
  std::string error_;
  std::mutex mutex_;
  std::condition_variable changed_;
};

}  // namespace memopt::offload
