// Backward's half of the engine: memory comes back.
#include "engine.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace memopt::offload {

Engine::Restored Engine::restore(Ticket& ticket, int64_t backward) {
  const auto asked = backend_->now();
  const auto stream = backend_->current_stream();
  Dropped dropped;
  Memory memory;
  EventPtr loaded;
  bool is_first = false;
  bool is_here = true;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    poll(dropped);
    is_first = has_come_first(backward);
    ticket.restored_in_ = backward;
    if (ticket.is_on_device()) {
      ++stats_.never_left;
      memory = ticket.source_;
      loaded = ticket.stream_ == stream ? nullptr : ticket.ready_;
      if (ticket.state_ == Ticket::State::waiting) {
        std::erase(ticket.sequence_->waiting, &ticket);
        ticket.state_ = Ticket::State::held;
      }
      timing_.restored(asked, nullptr, ticket.bytes_, backward);
    } else if (ticket.state_ == Ticket::State::loading && ticket.target_stream_ == stream) {
      ++stats_.prefetch_hits;
      memory = std::exchange(ticket.target_, {});
      loaded = ticket.loaded_;
      ticket.state_ = Ticket::State::stored;
      std::erase(prefetched_, &ticket);
      timing_.restored(asked, loaded, ticket.bytes_, backward);
    } else {
      ++stats_.prefetch_misses;
      drop_target(ticket);
      is_here = false;
    }
  }
  dropped.clear();  // what is allocated next may take it
  if (!is_here) {
    memory = backend_->allocate(ticket.bytes_);
    const auto ready = backend_->now();
    const std::lock_guard<std::mutex> lock(mutex_);
    begin_load(ticket, memory, ready);
    loaded = ticket.loaded_;
    timing_.restored(asked, loaded, ticket.bytes_, backward);
  }
  if (loaded != nullptr) backend_->wait(loaded);
  if (loaded != nullptr && loaded->reached() && loaded->failed()) {
    throw std::runtime_error(loaded->error());
  }
  prefetch_before(ticket, backward);
  say_warnings();
  return {std::move(memory), is_first};
}

bool Engine::has_come_first(int64_t backward) {
  if (backward < 0 || std::count(backwards_.begin(), backwards_.end(), backward) > 0) return false;
  // One that raised ends without a word.
  if (backwards_.size() >= 64) backwards_.erase(backwards_.begin());
  backwards_.push_back(backward);
  return true;
}

bool Engine::is_away(const Ticket& ticket) {
  Dropped dropped;
  const std::lock_guard<std::mutex> lock(mutex_);
  poll(dropped);
  return !ticket.is_on_device();
}

void Engine::found_elsewhere(Ticket& ticket, int64_t backward) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ticket.restored_in_ = backward;
  drop_target(ticket);
  stats_.found_elsewhere_bytes += ticket.bytes_;
}

void Engine::begin_load(Ticket& ticket, const Memory& target, const EventPtr& ready) {
  ticket.loaded_ = backend_->load(*ticket.room_, target, ready, ticket.stored_);
  ++stats_.in.copies;
  stats_.in.bytes += ticket.bytes_;
  timing_.copy_in(ready, ticket.loaded_, ticket.bytes_);
  size_t bytes = ticket.bytes_;
  for (const auto* other : prefetched_) bytes += other->bytes_;
  for (const auto& retired : retired_) bytes += retired.target.bytes;
  stats_.in.count_in_flight(coming_back() + 1, bytes);
}

void Engine::prefetch_before(const Ticket& ticket, int64_t backward) {
  while (true) {
    size_t bytes = 0;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto* next = next_to_prefetch(ticket, backward);
      if (next == nullptr) return;
      bytes = next->bytes_;
    }
    Memory target;
    EventPtr ready;
    try {
      target = backend_->allocate(bytes);
      ready = backend_->now();
    } catch (...) {
      return;  // the device has no memory for it now; restore() will try again
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    auto* next = next_to_prefetch(ticket, backward);
    if (next == nullptr || next->bytes_ != bytes) return;  // another thread was here
    try {
      begin_load(*next, target, ready);
    } catch (...) {
      return;
    }
    next->target_ = std::move(target);
    next->target_stream_ = backend_->current_stream();
    next->loading_for_ = backward;
    next->state_ = Ticket::State::loading;
    prefetched_.push_back(next);
  }
}

// Null if all that is to be prefetched is under way, or as many copies as may be.
Ticket* Engine::next_to_prefetch(const Ticket& ticket, int64_t backward) {
  const size_t depth = timing_.prefetch_depth(options_.copies_in_flight);
  const auto& tickets = ticket.sequence_->tickets;
  Ticket* next = nullptr;
  std::vector<const Ticket*> ahead;
  for (auto place = ticket.place_; ahead.size() < depth && place != tickets.begin();) {
    Ticket& before = **--place;
    if (before.restored_in_ == backward) continue;
    ahead.push_back(&before);
    if (next == nullptr && before.state_ == Ticket::State::stored) next = &before;
  }
  if (next == nullptr || coming_back() < options_.copies_in_flight) return next;
  // Those that nobody came for: another backward, or another order, than was expected.
  const auto is_passed_by = [&](const Ticket* other) {
    if (other->loading_for_ != backward) return true;
    return other->sequence_ == ticket.sequence_ &&
           std::find(ahead.begin(), ahead.end(), other) == ahead.end();
  };
  const auto passed_by = std::find_if(prefetched_.begin(), prefetched_.end(), is_passed_by);
  if (passed_by != prefetched_.end()) drop_target(**passed_by);
  // Its memory is held until its copy is done.
  return nullptr;
}

size_t Engine::coming_back() const {
  const auto is_target = [](const Retired& retired) { return retired.target.owner != nullptr; };
  return prefetched_.size() +
         static_cast<size_t>(std::count_if(retired_.begin(), retired_.end(), is_target));
}

void Engine::drop_target(Ticket& ticket) {
  if (ticket.state_ != Ticket::State::loading) return;
  std::erase(prefetched_, &ticket);
  backend_->cancel(ticket.loaded_);
  retired_.push_back({ticket.loaded_, std::exchange(ticket.target_, {}), ticket.room_});
  ticket.state_ = Ticket::State::stored;
}

void Engine::backward_ended(int64_t backward) {
  Dropped dropped;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto prefetched = prefetched_;
  for (auto* ticket : prefetched) {
    if (ticket->loading_for_ == backward) drop_target(*ticket);
  }
  std::erase(backwards_, backward);
  poll(dropped);
}

}  // namespace memopt::offload
