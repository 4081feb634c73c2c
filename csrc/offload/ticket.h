// Tickets: the engine's records of pieces of device memory that were given to it, and their order.
#pragma once

#include <deque>
#include <list>
#include <memory>

#include "backend.h"

namespace memopt::offload {

class Engine;
class Ticket;

// The tickets of one forward, in the order in which their memory was saved. Backward asks for them
// in about the reverse order, which is what prefetching goes by. All are one
// engine's, whose lock guards it.
struct Sequence {
  // How many of the tickets that came last stay on the device: backward asks for those first.
  size_t keep_last = 0;

  std::list<Ticket*> tickets;
  std::deque<Ticket*> waiting;  // the last of them, whose copies have not begun
};

// Stands for memory that was given to the engine. When it goes, so do the memory and the room.
class Ticket {
 public:
  Ticket(std::shared_ptr<Engine> engine, std::shared_ptr<Sequence> sequence)
      : engine_(std::move(engine)), sequence_(std::move(sequence)) {}
  ~Ticket();
  Ticket(const Ticket&) = delete;
  Ticket& operator=(const Ticket&) = delete;

  size_t bytes() const { return bytes_; }

 private:
  friend class Engine;

  enum class State {
    held,     // on the device, for good: no room, a failed copy, or wanted before it left
    waiting,  // on the device, among the sequence's last
    storing,  // on the device, while a copy leaves
    stored,   // away
    loading,  // away, while a copy comes back to `target`
  };
  bool is_on_device() const { return state_ <= State::storing; }

  std::shared_ptr<Engine> engine_;
  std::shared_ptr<Sequence> sequence_;
  std::list<Ticket*>::iterator place_;  // in the sequence
  State state_ = State::waiting;
  size_t bytes_ = 0;

  Memory source_;               // while it is on the device
  StreamId stream_ = 0;         // that it was saved on
  EventPtr ready_;              // the work that wrote it
  std::shared_ptr<Room> room_;  // held also for copies that the ticket has given up
  EventPtr stored_;
  Memory target_;  // while loading
  StreamId target_stream_ = 0;
  int64_t loading_for_ = -1;  // the backward that it was prefetched for
  EventPtr loaded_;           // the last copy out of the room
  int64_t restored_in_ = -1;  // the backward that asked for it last
};

}  // namespace memopt::offload
