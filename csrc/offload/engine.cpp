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
  for (const auto& retired : retired_) {
    retired.until->wait();
    if (retired.and_until != nullptr) retired.and_until->wait();
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
  ticket.room_ = backend_->reserve(ticket.bytes_);
  if (ticket.room_ == nullptr) {
    ticket.state_ = Ticket::State::held;
    stats_.refused_bytes += ticket.bytes_;
    warn_later("no room", backend_->no_room(ticket.bytes_));
    return;
  }
  ticket.stored_ = backend_->store(ticket.source_, *ticket.room_, ticket.ready_);
  ticket.state_ = Ticket::State::storing;
  storing_.push_back(&ticket);
  ++stats_.out.copies;
  stats_.out.bytes += ticket.bytes_;
  timing_.copy_out(ticket.ready_, ticket.stored_, ticket.bytes_);
  count_in_flight();
}

// The copy is done, or the device will wait for it before it does anything else.
void Engine::end_store(Ticket& ticket, Dropped& dropped) {
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
      oldest = storing_.front()->stored_;
      stream = storing_.front()->stream_;
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
    if (!storing_.empty() && storing_.front()->stored_ == oldest) {
      end_store(*storing_.front(), dropped);
      storing_.pop_front();
    }
    poll(dropped);
  }
}

Engine::Restored Engine::restore(Ticket& ticket, int64_t backward) {
  const auto asked = backend_->now();
  Dropped dropped;
  Memory memory;
  EventPtr loaded;
  bool is_first = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    poll(dropped);
    is_first = std::exchange(last_backward_, backward) != backward;
    ticket.restored_in_ = backward;
    if (ticket.is_on_device()) {
      ++stats_.never_left;
      memory = ticket.source_;
      loaded = ticket.stream_ == backend_->current_stream() ? nullptr : ticket.ready_;
      if (ticket.state_ == Ticket::State::waiting) {
        std::erase(ticket.sequence_->waiting, &ticket);
        ticket.state_ = Ticket::State::held;
      }
      timing_.restored(asked, nullptr, ticket.bytes_, backward);
    } else {
      const bool is_here = ticket.state_ == Ticket::State::loading &&
                           ticket.target_stream_ == backend_->current_stream();
      ++(is_here ? stats_.prefetch_hits : stats_.prefetch_misses);
      if (!is_here) {
        drop_target(ticket);
        begin_load(ticket);
      }
      memory = std::exchange(ticket.target_, {});
      loaded = ticket.loaded_;
      ticket.state_ = Ticket::State::stored;
      std::erase(prefetched_, &ticket);
      timing_.restored(asked, loaded, ticket.bytes_, backward);
    }
  }
  if (loaded != nullptr) backend_->wait(loaded);
  if (loaded != nullptr && loaded->reached() && loaded->failed()) {
    throw std::runtime_error(loaded->error());
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    prefetch_before(ticket, backward);
  }
  say_warnings();
  return {std::move(memory), is_first};
}

bool Engine::is_away(const Ticket& ticket) {
  Dropped dropped;
  const std::lock_guard<std::mutex> lock(mutex_);
  poll(dropped);
  return !ticket.is_on_device();
}

void Engine::found_elsewhere(Ticket& ticket, int64_t backward) {
  const std::lock_guard<std::mutex> lock(mutex_);
  last_backward_ = backward;
  ticket.restored_in_ = backward;
  drop_target(ticket);
  stats_.found_elsewhere_bytes += ticket.bytes_;
}

void Engine::begin_load(Ticket& ticket) {
  // Those that nobody came for: another backward, or another order, than was expected.
  while (prefetched_.size() >= options_.copies_in_flight) drop_target(*prefetched_.front());
  ticket.target_ = backend_->allocate(ticket.bytes_);
  ticket.target_stream_ = backend_->current_stream();
  const auto ready = backend_->now();
  ticket.loaded_ = backend_->load(*ticket.room_, ticket.target_, ready, ticket.stored_);
  ticket.state_ = Ticket::State::loading;
  prefetched_.push_back(&ticket);
  ++stats_.in.copies;
  stats_.in.bytes += ticket.bytes_;
  timing_.copy_in(ready, ticket.loaded_, ticket.bytes_);
  count_in_flight();
}

void Engine::prefetch_before(const Ticket& ticket, int64_t backward) {
  const size_t depth = timing_.prefetch_depth(options_.copies_in_flight);
  const auto& tickets = ticket.sequence_->tickets;
  auto place = ticket.place_;
  for (size_t ahead = 0; ahead < depth && place != tickets.begin();) {
    Ticket& before = **--place;
    if (before.restored_in_ == backward) continue;
    ++ahead;
    if (before.state_ != Ticket::State::stored) continue;
    try {
      begin_load(before);
      before.loading_for_ = backward;
    } catch (...) {
      return;  // the device has no memory for it now; restore() will try again
    }
  }
}

void Engine::drop_target(Ticket& ticket) {
  if (ticket.state_ != Ticket::State::loading) return;
  std::erase(prefetched_, &ticket);
  backend_->cancel(ticket.loaded_);
  retire(ticket.loaded_, nullptr, std::exchange(ticket.target_, {}), ticket.room_);
  ticket.state_ = Ticket::State::stored;
}

void Engine::backward_ended(int64_t backward) {
  Dropped dropped;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto prefetched = prefetched_;
  for (auto* ticket : prefetched) {
    if (ticket->loading_for_ == backward) drop_target(*ticket);
  }
  poll(dropped);
}

void Engine::discard(Ticket& ticket) {
  Dropped dropped;
  const std::lock_guard<std::mutex> lock(mutex_);
  drop_target(ticket);
  (ticket.is_on_device() ? stats_.bytes_held : stats_.bytes_away) -= ticket.bytes_;
  std::erase(ticket.sequence_->waiting, &ticket);
  if (ticket.state_ == Ticket::State::storing) {
    backend_->cancel(ticket.stored_);
    std::erase(storing_, &ticket);
  }
  if (ticket.room_ != nullptr) {
    retire(ticket.stored_, ticket.loaded_, std::move(ticket.source_), std::move(ticket.room_));
  }
  dropped.push_back(std::move(ticket.source_));
  ticket.sequence_->tickets.erase(ticket.place_);
  poll(dropped);
}

void Engine::retire(EventPtr until, EventPtr and_until, Memory memory,
                    std::shared_ptr<Room> room) {
  retired_.push_back(
      {std::move(until), std::move(and_until), std::move(memory), std::move(room)});
}

void Engine::poll(Dropped& dropped) {
  while (!storing_.empty() && storing_.front()->stored_->reached()) {
    end_store(*storing_.front(), dropped);
    storing_.pop_front();
  }
  const auto is_done = [&](Retired& retired) {
    if (!retired.until->reached()) return false;
    if (retired.and_until != nullptr && !retired.and_until->reached()) return false;
    dropped.push_back(std::move(retired.memory));
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
        last = storing_.back()->stored_;
      } else if (!retired_.empty()) {
        const auto& retired = retired_.back();
        last = retired.until->reached() ? retired.and_until : retired.until;
      } else {
        break;
      }
    }
    last->wait();
  }
  say_warnings();
}

void Engine::count_in_flight() {
  const auto count = [](const auto& tickets, LinkStats& stats) {
    size_t bytes = 0;
    for (const auto* ticket : tickets) bytes += ticket->bytes();
    stats.most_in_flight = std::max(stats.most_in_flight, tickets.size());
    stats.most_bytes_in_flight = std::max(stats.most_bytes_in_flight, bytes);
  };
  count(storing_, stats_.out);
  count(prefetched_, stats_.in);
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
