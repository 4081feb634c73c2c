// The scheduler of offloading: when memory leaves the device, when it comes back, and what waits
// for what. It knows no tensors and no accelerator; a Backend (backend.h) copies.
//
// Forward gives memory with offload(). The copy out begins once `keep_last` more have been given,
// overlaps the computation, and the device's copy is let go when it is done: found out at a later
// call, or, if `copies_in_flight` of them are under way, by making the computation wait for the
// oldest. So memory that waits to leave is never more than that many copies.
//
// Backward asks with restore(). That begins the copies back of what was saved just before, as many
// as the measured time of a copy calls for, so that the next restore() finds its memory there or on
// its way. The new memory is allocated for the stream that computes, and the copy waits for what
// that stream did with this memory before.
//
// What a copy reads or writes is held here until the copy is done, whatever becomes of the ticket:
// an allocator never has to be told of a stream (record_stream), and memory is free at moments that
// do not depend on luck. No memory is allocated or freed, and nothing waited for, under the lock:
// an allocator may call Python (a recorder of its history), and whoever has Python's lock may be
// waiting for this one.
//
// An Engine serves one device. All functions may be called by any thread.
#pragma once

#include <functional>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "process.h"
#include "stats.h"
#include "ticket.h"
#include "timing.h"

namespace memopt::offload {

struct EngineOptions {
  // At least 1. In each direction; of those that come back, without the one that is asked for, but
  // until they are.
  size_t copies_in_flight = 4;
  // Told once of each kind of trouble that costs memory but no result.
  std::function<void(const std::string&)> warn = [](const std::string&) {};
};

class Engine : public std::enable_shared_from_this<Engine> {
 public:
  Engine(std::unique_ptr<Backend> backend, EngineOptions options);
  // Waits for the copies under way.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Takes memory that the current stream has written. The caller lets go of it and keeps the
  // ticket.
  std::shared_ptr<Ticket> offload(Memory source, const std::shared_ptr<Sequence>& sequence);

  struct Restored {
    Memory memory;
    bool is_first;  // of this backward's, so that backward_ended() is to be called for it
  };
  // The same bytes for the current stream: the memory that was given, if it has not left, or other
  // memory, of the caller's alone. `backward` names the backward that runs; negative: none. Raises
  // if the copy back failed, or if the device has no memory.
  Restored restore(Ticket& ticket, int64_t backward);

  // Whether the memory that was given has been let go of.
  bool is_away(const Ticket& ticket);
  // In place of restore(): the caller has the bytes from elsewhere.
  void found_elsewhere(Ticket& ticket, int64_t backward);

  // Lets go of what was prefetched for a backward and not asked for.
  void backward_ended(int64_t backward);

  // Waits for the copies that are under way, and lets go of everything that is done with.
  void synchronize();

  Stats stats();
  size_t bytes_away();
  void reset_stats();
  Backend& backend() { return *backend_; }
  size_t copies_in_flight() const { return options_.copies_in_flight; }

 private:
  friend class Ticket;

  // A copy away that is under way.
  struct Leaving {
    Ticket* ticket;  // null if it has gone; what the copy uses is then held here
    EventPtr stored;
    StreamId stream;
    size_t bytes;
    Memory source;
    std::shared_ptr<Room> room;
  };
  // What is held for a copy although its ticket needs it no more.
  struct Retired {
    EventPtr until;
    Memory target;  // empty but of a copy back that nobody came for
    std::shared_ptr<Room> room;
  };
  using Dropped = std::vector<Memory>;  // to be let go of after the lock

  void discard(Ticket& ticket);

  // Under the lock.
  void begin_store(Ticket& ticket);
  void end_first_store(Dropped& dropped);
  void begin_load(Ticket& ticket, const Memory& target, const EventPtr& ready);
  Ticket* next_to_prefetch(const Ticket& ticket, int64_t backward);
  bool has_come_first(int64_t backward);
  void drop_target(Ticket& ticket);
  void poll(Dropped& dropped);
  size_t coming_back() const;
  void warn_later(const std::string& kind, std::string text);

  // Begins the copies of what waits beyond the sequence's last; whether more are to be begun than
  // the bound allows now.
  bool begin_next_store(Sequence& sequence);
  // Lets go of copies away until fewer than the bound are under way.
  void make_way();
  // Begins the copies back of what the backward will ask for next.
  void prefetch_before(const Ticket& ticket, int64_t backward);
  void say_warnings();

  const Process process_;
  const std::unique_ptr<Backend> backend_;
  const EngineOptions options_;

  std::mutex mutex_;
  std::deque<Leaving> storing_;     // in the order in which they began
  std::deque<Ticket*> prefetched_;  // those loading, in the order in which their copies began
  std::vector<Retired> retired_;
  Timing timing_;
  Stats stats_;
  std::vector<int64_t> backwards_;  // those that run and have asked
  std::unordered_map<std::string, bool> warned_;
  std::vector<std::string> warnings_;
};

}  // namespace memopt::offload
