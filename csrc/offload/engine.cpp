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
  // Tickets hold their engine, so that there are none any more.
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

std::shared_ptr<Ticket> Engine::offload(Memory source, const std::shared_ptr<Sequence>& sequence) {
  const auto stream = backend_->current_stream();
  auto ready = backend_->now();
  Dropped dropped;
  std::shared_ptr<Ticket> ticket;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    poll(dropped);
    ticket = std::make_shared<Ticket>(shared_from_this(), sequence);
    ticket->bytes_ = source.bytes;
    ticket->source_ = std::move(source);
    ticket->stream_ = stream;
    ticket->ready_ = std::move(ready);
    ticket->place_ = sequence->tickets.insert(sequence->tickets.end(), ticket.get());
    sequence->waiting.push_back(ticket.get());
    stats_.bytes_held += ticket->bytes_;
  }
  while (begin_next_store(*sequence)) make_way();
  {
    // Where copies run at once, this one is done.
    const std::lock_guard<std::mutex> lock(mutex_);
    poll(dropped);
  }
  say_warnings();
  return ticket;
}

bool Engine::begin_next_store(Sequence& sequence) {
  const std::lock_guard<std::mutex> lock(mutex_);
  while (sequence.waiting.size() > sequence.keep_last) {
    if (storing_.size() >= options_.copies_in_flight) return true;
    Ticket& first = *sequence.waiting.front();
    sequence.waiting.pop_front();
    begin_store(first);
  }
  return false;
}

void Engine::begin_store(Ticket& ticket) {
  ticket.state_ = Ticket::State::held;
  try {
    ticket.room_ = backend_->reserve(ticket.bytes_);
    if (ticket.room_ == nullptr) {
      stats_.refused_bytes += ticket.bytes_;
      warn_later("no room", backend_->no_room(ticket.bytes_));
      return;
    }
    ticket.stored_ = backend_->store(ticket.source_, *ticket.room_, ticket.ready_);
  } catch (const std::exception& error) {
    ticket.room_.reset();
    stats_.failed_bytes += ticket.bytes_;
    warn_later("failed", error.what());
    return;
  }
  ticket.state_ = Ticket::State::storing;
  storing_.push_back({&ticket, ticket.stored_, ticket.stream_, ticket.bytes_, {}, nullptr});
  ++stats_.out.copies;
  stats_.out.bytes += ticket.bytes_;
  timing_.copy_out(ticket.ready_, ticket.stored_, ticket.bytes_);
  size_t bytes = 0;
  for (const auto& leaving : storing_) bytes += leaving.bytes;
  stats_.out.count_in_flight(storing_.size(), bytes);
}

// The copy is done, or the device will wait for it before it does anything else.
void Engine::end_first_store(Dropped& dropped) {
  Leaving leaving = std::move(storing_.front());
  storing_.pop_front();
  if (leaving.ticket == nullptr) {
    dropped.push_back(std::move(leaving.source));
    if (!leaving.stored->reached()) {
      retired_.push_back({std::move(leaving.stored), {}, std::move(leaving.room)});
    }
    return;
  }
  Ticket& ticket = *leaving.ticket;
  if (ticket.stored_->reached() && ticket.stored_->failed()) {
    ticket.state_ = Ticket::State::held;
    ticket.room_.reset();
    stats_.failed_bytes += ticket.bytes_;
    warn_later("failed", ticket.stored_->error());
    return;
  }
  ticket.state_ = Ticket::State::stored;
  dropped.push_back(std::exchange(ticket.source_, {}));
  ticket.ready_.reset();
  stats_.bytes_held -= ticket.bytes_;
  stats_.bytes_away += ticket.bytes_;
}

void Engine::make_way() {
  while (true) {
    EventPtr oldest;
    StreamId stream = 0;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (storing_.size() < options_.copies_in_flight) return;
      oldest = storing_.front().stored;
      stream = storing_.front().stream;
    }
    const auto before = backend_->now();
    if (stream == backend_->current_stream()) {
      backend_->wait(oldest);
    } else {
      // An allocator gives memory to the next work of the stream that it was allocated for.
      oldest->wait();
    }
    Dropped dropped;
    const std::lock_guard<std::mutex> lock(mutex_);
    timing_.stall_out(before, oldest);
    if (!storing_.empty() && storing_.front().stored == oldest) end_first_store(dropped);
    poll(dropped);
  }
}

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

void Engine::discard(Ticket& ticket) {
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
