// Forward's half of the engine: memory leaves.
#include "engine.h"

#include <algorithm>
#include <utility>

namespace memopt::offload {

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

}  // namespace memopt::offload
