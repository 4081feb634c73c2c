#include "host_event.h"

namespace memopt::offload {

EventPtr HostEvent::now() {
  auto event = std::make_shared<HostEvent>();
  event->reach();
  return event;
}

HostEvent::State HostEvent::state() const {
  const State state = state_.load(std::memory_order_acquire);
  return state == State::pending && !process_.is_current() ? State::failed : state;
}

void HostEvent::wait() {
  if (reached()) return;
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return reached(); });
}

std::string HostEvent::error() {
  if (!failed()) return {};
  if (state_.load(std::memory_order_acquire) == State::failed) return error_;
  return "the copy was under way in the parent process when fork() was called";
}

double HostEvent::seconds_after(Event& earlier) {
  const auto* other = dynamic_cast<HostEvent*>(&earlier);
  const auto from = other ? other->reached_ : begun_;
  return std::chrono::duration<double>(reached_ - from).count();
}

void HostEvent::reach() {
  set(State::done);
}

void HostEvent::fail(std::string error) {
  error_ = std::move(error);
  set(State::failed);
}

void HostEvent::set(State state) {
  reached_ = Clock::now();
  const std::lock_guard<std::mutex> lock(mutex_);
  state_.store(state, std::memory_order_release);
  changed_.notify_all();
}

}  // namespace memopt::offload
