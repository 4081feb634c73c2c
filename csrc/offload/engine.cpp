#include "engine.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace memopt::offload {

Engine::Engine(std::unique_ptr<Backend> backend, EngineOptions options)
    : backend_(std::move(backend)), options_(std::move(options)) {
  if (options_.copies_in_flight < 1) {
    throw std::invalid_argument("offload: copies_in_flight must be at least 1, got 0");
  }
}

Engine::~Engine() {
  // Tickets hold their engine, so that there are none any more. In a child of fork() nothing is
  // under way, and nobody unlocks what another thread had locked.
  if (!process_.is_current()) return;
  try {
    for (const auto& leaving : storing_) leaving.stored->wait();
    for (const auto& retired : retired_) retired.until->wait();
  } catch (...) {
    // The device is lost, and its copies with it.
  }
}

Ticket::~Ticket() {
  engine_->discard(*this);
}

void Engine::discard(Ticket& ticket) {
  if (!process_.is_current()) {
    static_cast<void>(
        new std::shared_ptr<Room>(std::move(ticket.room_)));  // the parent's, for good
    return;
  }
  Dropped dropped;
  const std::lock_guard<std::mutex> lock(mutex_);
  drop_target(ticket);
  (ticket.is_on_device() ? stats_.bytes_held : stats_.bytes_away) -= ticket.bytes_;
  std::erase(ticket.sequence_->waiting, &ticket);
  ticket.sequence_->tickets.erase(ticket.place_);
  if (ticket.state_ == Ticket::State::storing) {
    const auto leaving = std::find_if(storing_.begin(), storing_.end(), [&](const Leaving& entry) {
      return entry.ticket == &ticket;
    });
    leaving->ticket = nullptr;
    leaving->source = std::move(ticket.source_);
    leaving->room = std::move(ticket.room_);
    backend_->cancel(leaving->stored);
  } else if (ticket.room_ != nullptr) {
    if (ticket.loaded_ != nullptr) retired_.push_back({ticket.loaded_, {}, ticket.room_});
    retired_.push_back({ticket.stored_, {}, std::move(ticket.room_)});
  }
  dropped.push_back(std::move(ticket.source_));
  try {
    poll(dropped);
  } catch (...) {
    // The device is lost. Whatever asks it next says so; this runs in a destructor.
  }
}

void Engine::poll(Dropped& dropped) {
  while (!storing_.empty() && storing_.front().stored->reached()) end_first_store(dropped);
  const auto is_done = [&](Retired& retired) {
    if (!retired.until->reached()) return false;
    if (retired.target.owner != nullptr) dropped.push_back(std::move(retired.target));
    return true;
  };
  retired_.erase(std::remove_if(retired_.begin(), retired_.end(), is_done), retired_.end());
  timing_.settle(stats_.out, stats_.in);
}

void Engine::synchronize() {
  while (true) {
    EventPtr last;
    Dropped dropped;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      poll(dropped);
      if (!storing_.empty()) {
        last = storing_.back().stored;
      } else if (!retired_.empty()) {
        last = retired_.back().until;
      } else {
        break;
      }
    }
    last->wait();
  }
  say_warnings();
}

Stats Engine::stats() {
  Dropped dropped;
  Stats stats;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    poll(dropped);
    stats = stats_;
  }
  stats.room = backend_->room_use();
  say_warnings();
  return stats;
}

size_t Engine::bytes_away() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return stats_.bytes_away;
}

void Engine::reset_stats() {
  Dropped dropped;
  const std::lock_guard<std::mutex> lock(mutex_);
  poll(dropped);
  const Stats before = std::exchange(stats_, {});
  stats_.bytes_away = before.bytes_away;
  stats_.bytes_held = before.bytes_held;
}

void Engine::warn_later(const std::string& kind, std::string text) {
  if (std::exchange(warned_[kind], true)) return;
  warnings_.push_back(std::move(text));
}

void Engine::say_warnings() {
  std::vector<std::string> warnings;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    warnings = std::exchange(warnings_, {});
  }
  for (const auto& warning : warnings) options_.warn(warning);
}

}  // namespace memopt::offload
