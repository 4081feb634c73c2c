// A device in virtual time, so that schedules are tested exactly and at once: streams are clocks,
// copies take bytes / bandwidth, events are times.
//
// The host has a clock as well. A work or a copy begins no earlier than the host gives it, and
// reached() is judged by the host's clock, which a test moves: far ahead of the device (it stays at
// 0 unless it waits) or in step with it (after each computation it waits for that).
//
// Every access is checked against the order that the streams give: what would be a race on a device
// is a line in `races`, however lucky the times.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "../../../csrc/offload/backend.h"

namespace check {

namespace offload = memopt::offload;

// What a broken engine, or a broken backend, would do.
enum class Fault {
  none,
  reached_too_early,    // an event counts as reached as soon as it is recorded
  wait_ignored,         // the computation does not wait for copies
  store_ignores_ready,  // a copy away does not wait for what writes its source
  load_ignores_ready,   // a copy back does not wait for what its memory was used for before
  load_ignores_stored,  // a copy back does not wait for the copy away
};

class VirtualRoom;
class VirtualEvent;

struct VirtualTime {
  double bandwidth = 1e6;  // bytes a second, each way
  double latency = 0;      // of a copy
  bool in_step = false;    // the host with the device
  size_t most_room = SIZE_MAX;
  size_t most_device = SIZE_MAX;
  Fault fault = Fault::none;

  int64_t current_stream = 0;
  double host = 0;
  std::map<int64_t, double> streams;  // until when each is busy
  double out = 0, in = 0;

  std::vector<std::string> races;

  // Device memory, as a caching allocator counts it: it is free for the work that comes next.
  size_t live = 0, most_live = 0;
  size_t reserved = 0;
  std::multimap<size_t, int> free_blocks;  // by bytes

  // Room.
  offload::RoomUse room;
  std::map<size_t, size_t> free_rooms;  // bytes -> how many

  size_t copies_out = 0, copies_in = 0;
  VirtualRoom* last_loaded = nullptr;
  VirtualEvent* last_load_event = nullptr;

  // Called before each function of the backend's that may fail, with its name; may raise.
  std::function<void(const std::string&)> before = [](const std::string&) {};
  // Whether the copy away, or back, of so many bytes fails.
  std::function<bool(size_t)> store_fails = [](size_t) { return false; };
  std::function<bool(size_t)> load_fails = [](size_t) { return false; };

  // The moment at which the current stream's next work can begin.
  double stream_time() { return std::max(streams[current_stream], host); }

  // The computation of the current stream goes on for so long.
  void compute(double seconds) {
    streams[current_stream] = stream_time() + seconds;
    if (in_step) host = std::max(host, streams[current_stream]);
  }

  void host_waits_until(double at) { host = std::max(host, at); }
  void host_waits() {
    for (const auto& [_, at] : streams) host_waits_until(at);
    host_waits_until(std::max(out, in));
  }

  double copy_seconds(size_t bytes) const {
    return latency + static_cast<double>(bytes) / bandwidth;
  }
};

using VirtualTimePtr = std::shared_ptr<VirtualTime>;

class VirtualEvent : public offload::Event {
 public:
  VirtualEvent(VirtualTimePtr time, double at, bool fails = false)
      : time_(std::move(time)), at_(at), fails_(fails) {}

  bool reached() override {
    time_->before("reached");
    return time_->fault == Fault::reached_too_early || at_ <= time_->host;
  }
  void wait() override { time_->host_waits_until(at_); }
  bool failed() override { return fails_; }
  std::string error() override { return fails_ ? "the copy failed, as planned" : ""; }
  double seconds_after(offload::Event& earlier) override {
    return at_ - static_cast<VirtualEvent&>(earlier).at_;
  }

  double at() const { return at_; }
  void move_to(double at) { at_ = at; }

 private:
  VirtualTimePtr time_;
  double at_;
  bool fails_;
};

// Device memory: since when it may be written, when it has been written, until when copies use it.
struct VirtualBlock {
  VirtualBlock(VirtualTimePtr of, size_t size) : time(std::move(of)), bytes(size) {
    if (time->live + bytes > time->most_device) throw std::runtime_error("out of device memory");
    time->live += bytes;
    time->most_live = std::max(time->most_live, time->live);
    const auto found = time->free_blocks.find(bytes);
    if (found != time->free_blocks.end()) {
      time->free_blocks.erase(found);
    } else {
      time->reserved += bytes;
    }
    stream = time->current_stream;
    free_since = time->stream_time();
  }

  ~VirtualBlock() {
    time->live -= bytes;
    time->free_blocks.emplace(bytes, 0);
    // The allocator gives it to the next work of its stream.
    if (copied_until > std::max(time->streams[stream], time->host)) {
      time->races.push_back("device memory is freed while a copy " + copied_how + " it");
    }
  }
  VirtualBlock(const VirtualBlock&) = delete;
  VirtualBlock& operator=(const VirtualBlock&) = delete;

  VirtualTimePtr time;
  size_t bytes;
  int64_t stream = 0;
  double free_since = 0;
  double written_at = 0;
  double copied_until = 0;
  std::string copied_how;
};

inline VirtualBlock& block_of(const offload::Memory& memory) {
  return *static_cast<VirtualBlock*>(memory.owner.get());
}

class VirtualRoom : public offload::Room {
 public:
  VirtualRoom(VirtualTimePtr time, size_t size) : bytes(size), time_(std::move(time)) {
    auto& free = time_->free_rooms[bytes];
    if (free > 0) {
      --free;
    } else {
      time_->room.allocated += bytes;
    }
    time_->room.in_use += bytes;
    time_->room.high_water = std::max(time_->room.high_water, time_->room.in_use);
  }
  ~VirtualRoom() override {
    time_->room.in_use -= bytes;
    ++time_->free_rooms[bytes];
    if (written_until > time_->host) time_->races.push_back("a room is freed while it is written");
    if (read_until > time_->host) time_->races.push_back("a room is freed while it is read");
  }
  VirtualRoom(const VirtualRoom&) = delete;
  VirtualRoom& operator=(const VirtualRoom&) = delete;

  const size_t bytes;
  double written_until = 0;
  double read_until = 0;

 private:
  VirtualTimePtr time_;
};

class VirtualBackend : public offload::Backend {
 public:
  explicit VirtualBackend(VirtualTimePtr time) : time_(std::move(time)) {}

  offload::StreamId current_stream() override { return time_->current_stream; }

  offload::EventPtr now() override {
    return std::make_shared<VirtualEvent>(time_, time_->stream_time());
  }

  std::unique_ptr<offload::Room> reserve(size_t bytes) override {
    time_->before("reserve");
    if (time_->room.in_use + bytes > time_->most_room) return nullptr;
    return std::make_unique<VirtualRoom>(time_, bytes);
  }
  std::string no_room(size_t bytes) override {
    return "no room for " + std::to_string(bytes) + " bytes";
  }

  offload::Memory allocate(size_t bytes) override {
    time_->before("allocate");
    auto block = std::make_shared<VirtualBlock>(time_, bytes);
    return {block.get(), bytes, block};
  }

  offload::EventPtr store(const offload::Memory& from, offload::Room& to,
                          const offload::EventPtr& ready) override {
    time_->before("store");
    auto& block = block_of(from);
    auto& room = static_cast<VirtualRoom&>(to);
    double begin = std::max(time_->out, time_->host);
    if (time_->fault != Fault::store_ignores_ready) begin = std::max(begin, at(ready));
    if (begin < block.written_at) time_->races.push_back("a copy reads what is not written yet");
    if (begin < room.read_until || begin < room.written_until) {
      time_->races.push_back("a copy writes a room that is in use");
    }
    time_->out = begin + time_->copy_seconds(from.bytes);
    ++time_->copies_out;
    block.copied_until = std::max(block.copied_until, time_->out);
    block.copied_how = "reads";
    room.written_until = time_->out;
    return event(time_->out, time_->store_fails(from.bytes));
  }

  offload::EventPtr load(offload::Room& from, const offload::Memory& to,
                         const offload::EventPtr& ready, const offload::EventPtr& stored) override {
    time_->before("load");
    auto& block = block_of(to);
    auto& room = static_cast<VirtualRoom&>(from);
    double begin = std::max(time_->in, time_->host);
    if (time_->fault != Fault::load_ignores_ready) begin = std::max(begin, at(ready));
    if (time_->fault != Fault::load_ignores_stored) begin = std::max(begin, at(stored));
    if (begin < room.written_until) time_->races.push_back("a copy reads a room before it is full");
    if (begin < block.free_since) {
      time_->races.push_back("a copy writes memory that other work still uses");
    }
    time_->in = begin + time_->copy_seconds(to.bytes);
    ++time_->copies_in;
    block.copied_until = std::max(block.copied_until, time_->in);
    block.copied_how = "writes";
    block.written_at = time_->in;
    room.read_until = std::max(room.read_until, time_->in);
    auto done = std::make_shared<VirtualEvent>(time_, time_->in, time_->load_fails(to.bytes));
    time_->last_loaded = &room;
    time_->last_load_event = done.get();
    return done;
  }

  void wait(const offload::EventPtr& event) override {
    if (time_->fault == Fault::wait_ignored) return;
    time_->streams[time_->current_stream] = std::max(time_->stream_time(), at(event));
    if (time_->in_step) time_->host_waits_until(at(event));
  }

  offload::RoomUse room_use() override { return time_->room; }

 private:
  static double at(const offload::EventPtr& event) {
    return static_cast<VirtualEvent&>(*event).at();
  }
  offload::EventPtr event(double at, bool fails) {
    return std::make_shared<VirtualEvent>(time_, at, fails);
  }

  VirtualTimePtr time_;
};

}  // namespace check
