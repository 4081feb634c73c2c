// A device that is threads of the host: each stream, those that compute and the two that copy, is a
// thread with a queue, so that the host runs ahead and streams run side by side in earnest.
//
// Memory shows who is too early or too late. A freed block of the device serves the next allocation
// of its size on its stream at once, and is poisoned by a task of that stream; a freed room is
// poisoned and reused at once. Streams can be paused, and begin tasks after random delays.
//
// With `waits_on_host` the device is the calling thread, as with a file and the CPU: waiting for a
// copy blocks it. Copies can then fail.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "../../../csrc/offload/backend.h"
#include "../../../csrc/offload/host_event.h"
#include "virtual_time.h"

namespace check {

inline constexpr std::byte kPoison{0xdd};

class ThreadStream {
 public:
  ThreadStream() : thread_([this] { work(); }) {}
  ~ThreadStream() {
    resume();
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  ThreadStream(const ThreadStream&) = delete;
  ThreadStream& operator=(const ThreadStream&) = delete;

  void give(std::function<void()> task) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      queue_.push_back(std::move(task));
    }
    changed_.notify_all();
  }

  void pause() { set_paused(true); }
  void resume() { set_paused(false); }

  // Before a task, up to so many microseconds.
  void random_delays(unsigned most, unsigned seed) {
    const std::lock_guard<std::mutex> lock(mutex_);
    most_delay_ = most;
    random_.seed(seed);
  }

  void wait_until_idle() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return queue_.empty() && !running_; });
  }
  // Or a while, if its task waits for another stream.
  void wait_until_idle_or_stuck() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_until(lock, std::chrono::system_clock::now() + std::chrono::milliseconds(30),
                        [this] { return queue_.empty() && !running_; });
  }

 private:
  void set_paused(bool paused) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      paused_ = paused;
    }
    changed_.notify_all();
  }

  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return (stopping_ || !queue_.empty()) && !paused_; });
      if (queue_.empty()) return;
      auto task = std::move(queue_.front());
      queue_.pop_front();
      running_ = true;
      const unsigned delay = most_delay_ == 0 ? 0 : random_() % (2 * most_delay_);
      lock.unlock();
      if (delay > 0 && delay <= most_delay_) {
        std::this_thread::sleep_for(std::chrono::microseconds(delay));
      }
      task();
      task = nullptr;
      lock.lock();
      running_ = false;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool paused_ = false, running_ = false, stopping_ = false;
  unsigned most_delay_ = 0;
  std::mt19937 random_;
  std::thread thread_;
};

// Buffers by size; the last one that was freed is the next that is given.
class Buffers {
 public:
  std::byte* take(int64_t key, size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& free = free_[{key, bytes}];
    if (!free.empty()) {
      auto* data = free.back();
      free.pop_back();
      return data;
    }
    owned_.push_back(std::make_unique<std::byte[]>(bytes));
    std::memset(owned_.back().get(), static_cast<int>(kPoison), bytes);
    allocated_ += bytes;
    return owned_.back().get();
  }
  void give_back(int64_t key, std::byte* data, size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_[{key, bytes}].push_back(data);
  }
  size_t allocated() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return allocated_;
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<int64_t, size_t>, std::vector<std::byte*>> free_;
  std::vector<std::unique_ptr<std::byte[]>> owned_;
  size_t allocated_ = 0;
};

struct ThreadDevice {
  explicit ThreadDevice(size_t streams = 1) {
    for (size_t i = 0; i < streams; ++i) compute.push_back(std::make_unique<ThreadStream>());
  }

  bool waits_on_host = false;
  Fault fault = Fault::none;
  std::function<bool()> store_fails = [] { return false; };
  std::function<bool()> load_fails = [] { return false; };
  std::function<bool()> allocate_fails = [] { return false; };
  std::function<void()> in_allocate = [] {};

  Buffers memory, rooms;
  std::atomic<size_t> live = 0;      // bytes of memory
  std::atomic<size_t> in_rooms = 0;  // bytes
  std::atomic<int> wrong = 0;        // tensors that had other bytes than they should

  std::vector<std::unique_ptr<ThreadStream>> compute;
  ThreadStream out, in;  // last: their tasks use what is above

  static int64_t& current() {
    static thread_local int64_t stream = 0;
    return stream;
  }
  ThreadStream& current_stream() { return *compute[static_cast<size_t>(current())]; }

  void wait_until_idle() {
    for (auto& stream : compute) stream->wait_until_idle();
    out.wait_until_idle();
    in.wait_until_idle();
  }

  static std::byte pattern(unsigned seed, size_t i) {
    return static_cast<std::byte>((seed * 131 + i * 7 + (i >> 8)) & 0x7f);
  }

  // The current stream writes it, or reads it.
  void fill(const offload::Memory& memory, unsigned seed) {
    auto* data = static_cast<std::byte*>(memory.data);
    current_stream().give([data, bytes = memory.bytes, seed] {
      for (size_t i = 0; i < bytes; ++i) data[i] = pattern(seed, i);
    });
    if (waits_on_host) current_stream().wait_until_idle();
  }
  void expect(const offload::Memory& memory, unsigned seed) {
    auto* data = static_cast<std::byte*>(memory.data);
    current_stream().give([this, data, bytes = memory.bytes, seed] {
      for (size_t i = 0; i < bytes; ++i) {
        if (data[i] == pattern(seed, i)) continue;
        ++wrong;
        return;
      }
    });
    if (waits_on_host) current_stream().wait_until_idle();
  }

  offload::Memory allocate(size_t bytes) {
    const int64_t stream = current();
    auto* data = memory.take(stream, bytes);
    live += bytes;
    std::shared_ptr<void> owner(data, [this, bytes, stream, data](void*) {
      compute[static_cast<size_t>(stream)]->give(
          [data, bytes] { std::memset(data, static_cast<int>(kPoison), bytes); });
      memory.give_back(stream, data, bytes);
      live -= bytes;
    });
    return {data, bytes, std::move(owner)};
  }
};

using ThreadDevicePtr = std::shared_ptr<ThreadDevice>;

class ThreadEvent : public offload::Event {
 public:
  explicit ThreadEvent(bool lies) : lies_(lies) {}

  bool reached() override { return lies_ || true_event.reached(); }
  void wait() override {
    if (!lies_) true_event.wait();
  }
  bool failed() override { return true_event.failed(); }
  std::string error() override { return true_event.error(); }
  double seconds_after(offload::Event& earlier) override {
    auto& other = static_cast<ThreadEvent&>(earlier);
    return lies_ ? 0 : true_event.seconds_after(other.true_event);
  }

  offload::HostEvent true_event;

 private:
  const bool lies_;
};

class ThreadRoom : public offload::Room {
 public:
  ThreadRoom(ThreadDevicePtr device, size_t size)
      : data(device->rooms.take(0, size)), bytes(size), device_(std::move(device)) {
    device_->in_rooms += bytes;
  }
  ~ThreadRoom() override {
    std::memset(data, static_cast<int>(kPoison), bytes);
    device_->rooms.give_back(0, data, bytes);
    device_->in_rooms -= bytes;
  }
  ThreadRoom(const ThreadRoom&) = delete;
  ThreadRoom& operator=(const ThreadRoom&) = delete;

  std::byte* const data;
  const size_t bytes;

 private:
  ThreadDevicePtr device_;
};

class ThreadBackend : public offload::Backend {
 public:
  explicit ThreadBackend(ThreadDevicePtr device) : device_(std::move(device)) {}

  offload::StreamId current_stream() override { return ThreadDevice::current(); }

  offload::EventPtr now() override {
    auto event = std::make_shared<ThreadEvent>(false);
    device_->current_stream().give([event] { event->true_event.reach(); });
    if (device_->waits_on_host) event->wait();
    return event;
  }

  std::unique_ptr<offload::Room> reserve(size_t bytes) override {
    return std::make_unique<ThreadRoom>(device_, bytes);
  }
  std::string no_room(size_t) override { return "no room"; }

  offload::Memory allocate(size_t bytes) override {
    device_->in_allocate();
    if (device_->allocate_fails()) throw std::runtime_error("out of device memory");
    return device_->allocate(bytes);
  }

  offload::EventPtr store(const offload::Memory& from, offload::Room& to,
                          const offload::EventPtr& ready) override {
    std::vector<offload::EventPtr> after;
    if (device_->fault != Fault::store_ignores_ready) after.push_back(ready);
    auto* room = static_cast<ThreadRoom&>(to).data;
    return copy(device_->out, room, from.data, from.bytes, after, device_->store_fails());
  }

  offload::EventPtr load(offload::Room& from, const offload::Memory& to,
                         const offload::EventPtr& ready, const offload::EventPtr& stored) override {
    std::vector<offload::EventPtr> after;
    if (device_->fault != Fault::load_ignores_ready) after.push_back(ready);
    if (device_->fault != Fault::load_ignores_stored) after.push_back(stored);
    auto* room = static_cast<ThreadRoom&>(from).data;
    return copy(device_->in, to.data, room, to.bytes, after, device_->load_fails());
  }

  void wait(const offload::EventPtr& event) override {
    if (device_->fault == Fault::wait_ignored) return;
    if (device_->waits_on_host) return event->wait();
    device_->current_stream().give(
        [event] { static_cast<ThreadEvent&>(*event).true_event.wait(); });
  }

  offload::RoomUse room_use() override {
    return {device_->in_rooms, 0, device_->rooms.allocated(), 0};
  }

 private:
  offload::EventPtr copy(ThreadStream& stream, void* to, const void* from, size_t bytes,
                         const std::vector<offload::EventPtr>& after, bool fails) {
    auto done = std::make_shared<ThreadEvent>(device_->fault == Fault::reached_too_early);
    stream.give([=] {
      for (const auto& event : after) static_cast<ThreadEvent&>(*event).true_event.wait();
      done->true_event.begin();
      if (fails) {
        done->true_event.fail("the copy failed, as planned");
        return;
      }
      // In two parts, with a chance for others to come in between.
      std::memcpy(to, from, bytes / 2);
      std::this_thread::yield();
      std::memcpy(static_cast<std::byte*>(to) + bytes / 2,
                  static_cast<const std::byte*>(from) + bytes / 2, bytes - bytes / 2);
      done->true_event.reach();
    });
    return done;
  }

  ThreadDevicePtr device_;
};

}  // namespace check
