// Streams are threads, each with a queue; a gate that a test can shut, and delays before tasks.
#include "streams.h"

#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "control.h"
#include "moment.h"

namespace sim {

namespace {

// A host that waits this long waits for a stream that a test has paused, or for ever.
std::atomic<double> patience_s{60};

// What the first task that failed said, until the host has heard it.
struct Failure {
  std::mutex mutex;
  std::string message;
};

Failure& failure() {
  static auto* it = new Failure;
  return *it;
}

void note_failure(const std::string& message) {
  const std::lock_guard<std::mutex> lock(failure().mutex);
  if (failure().message.empty()) failure().message = message;
}

void raise_failure() {
  std::string message;
  {
    const std::lock_guard<std::mutex> lock(failure().mutex);
    message = std::exchange(failure().message, {});
  }
  TORCH_CHECK(message.empty(), "sim: a task on the device failed: ", message);
}

// Seconds before a task.
struct Delays {
  std::array<double, kKinds> of_kind{};
  double most_random = 0;
  uint64_t seed = 0;
};

class Queue {
 public:
  Queue(const c10::Stream& stream, const Delays& delays) : stream_(stream), delays_(delays) {
    random_.seed(delays_.seed * 1000003 + static_cast<uint64_t>(stream_.id()));
    std::thread([this] { work(); }).detach();
  }

  void push(Task task) {
    const std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
    changed_.notify_all();
  }

  bool is_idle() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return tasks_.empty() && !busy_;
  }

  void pause(bool paused) {
    const std::lock_guard<std::mutex> lock(mutex_);
    paused_ = paused;
    changed_.notify_all();
  }

  void delay(Kind kind, double seconds) {
    const std::lock_guard<std::mutex> lock(mutex_);
    delays_.of_kind.at(static_cast<size_t>(kind)) = seconds;
  }

  void random_delays(uint64_t seed, double most) {
    const std::lock_guard<std::mutex> lock(mutex_);
    random_.seed(seed * 1000003 + static_cast<uint64_t>(stream_.id()));
    delays_.most_random = most;
  }

 private:
  [[noreturn]] void work() {
    while (true) {
      Task task;
      double seconds = 0;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return !paused_ && !tasks_.empty(); });
        task = std::move(tasks_.front());
        tasks_.pop_front();
        busy_ = true;
        seconds = delays_.of_kind.at(static_cast<size_t>(task.kind));
        if (delays_.most_random > 0) {
          seconds += std::uniform_real_distribution<double>(0, delays_.most_random)(random_);
        }
      }
      if (seconds > 0) std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
      trace(stream_, task);
      try {
        if (task.run) task.run();
      } catch (const std::exception& error) {
        note_failure(task.name + ": " + error.what());
      }
      const std::lock_guard<std::mutex> lock(mutex_);
      if (task.end != nullptr) task.end->reach();
      busy_ = false;  // who has waited for the end finds the stream idle
    }
  }

  const c10::Stream stream_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  bool paused_ = false;
  bool busy_ = false;
  Delays delays_;
  std::mt19937_64 random_;
};

// Streams live as long as the process, and so do their threads.
struct Streams {
  std::mutex mutex;
  Delays delays;                                                          // of streams to come
  std::array<std::deque<Queue*>, kDevices> queues;                        // by stream id
  std::array<std::array<std::vector<c10::StreamId>, 2>, kDevices> pools;  // by priority
  std::array<std::array<size_t, 2>, kDevices> next{};
};

Streams& streams() {
  static auto* it = new Streams;
  return *it;
}

constexpr size_t kPoolSize = 4;

Queue& queue(const c10::Stream& stream) {
  const std::lock_guard<std::mutex> lock(streams().mutex);
  auto& queues = streams().queues.at(static_cast<size_t>(stream.device_index()));
  const auto id = static_cast<size_t>(stream.id());
  if (id == 0 && queues.empty()) queues.push_back(new Queue(stream, streams().delays));
  TORCH_CHECK(id < queues.size(), "sim: there is no stream ", stream);
  return *queues[id];
}

thread_local c10::DeviceIndex device_now = 0;
thread_local std::array<c10::StreamId, kDevices> stream_now{};

c10::Stream make_stream(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), id);
}

template <class Function>
void for_each_queue(Function function) {
  const std::lock_guard<std::mutex> lock(streams().mutex);
  for (auto& queues : streams().queues) {
    for (Queue* queue : queues) function(*queue);
  }
}

}  // namespace

void enqueue_quietly(const c10::Stream& stream, Task task) {
  queue(stream).push(std::move(task));
}

void enqueue(const c10::Stream& stream, Task task) {
  raise_failure();
  enqueue_quietly(stream, std::move(task));
}

MomentPtr record(const c10::Stream& stream) {
  auto moment = std::make_shared<Moment>();
  enqueue_quietly(stream, {Kind::kEvent, "record", nullptr, moment});
  return moment;
}

void wait(const c10::Stream& stream, const MomentPtr& moment) {
  enqueue_quietly(stream, {Kind::kEvent, "wait", [moment] { moment->wait(std::nullopt); }});
}

void wait_on_host(const MomentPtr& moment) {
  const double seconds = patience_s;
  TORCH_CHECK(moment->wait(seconds), "sim: the host has waited ", seconds,
              " s for a stream: a test has paused it, or its event never comes");
  raise_failure();
}

bool is_idle(const c10::Stream& stream) {
  return queue(stream).is_idle();
}

c10::Stream current_stream(c10::DeviceIndex device) {
  if (device < 0) device = device_now;
  return make_stream(device, stream_now.at(static_cast<size_t>(device)));
}

c10::Stream exchange_stream(const c10::Stream& stream) {
  auto& now = stream_now.at(static_cast<size_t>(stream.device_index()));
  return make_stream(stream.device_index(), std::exchange(now, stream.id()));
}

c10::Stream new_stream(c10::DeviceIndex device) {
  if (device < 0) device = device_now;
  queue(make_stream(device, 0));
  const std::lock_guard<std::mutex> lock(streams().mutex);
  auto& queues = streams().queues.at(static_cast<size_t>(device));
  const auto stream = make_stream(device, static_cast<c10::StreamId>(queues.size()));
  queues.push_back(new Queue(stream, streams().delays));
  return stream;
}

c10::Stream pool_stream(c10::DeviceIndex device, bool high_priority) {
  if (device < 0) device = device_now;
  auto& pool = streams().pools.at(static_cast<size_t>(device)).at(high_priority ? 1 : 0);
  auto& next = streams().next.at(static_cast<size_t>(device)).at(high_priority ? 1 : 0);
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  while (pool.size() < kPoolSize) pool.push_back(new_stream(device).id());
  return make_stream(device, pool[next++ % kPoolSize]);
}

void* native_handle(const c10::Stream& stream) {
  return &queue(stream);
}

void synchronize_device(c10::DeviceIndex device) {
  if (device < 0) device = device_now;
  size_t count = 0;
  {
    const std::lock_guard<std::mutex> lock(streams().mutex);
    count = streams().queues.at(static_cast<size_t>(device)).size();
  }
  std::vector<MomentPtr> moments;
  for (size_t id = 0; id < count; ++id) {
    moments.push_back(record(make_stream(device, static_cast<c10::StreamId>(id))));
  }
  for (const auto& moment : moments) wait_on_host(moment);
}

c10::DeviceIndex current_device() {
  return device_now;
}

c10::DeviceIndex exchange_device(c10::DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < kDevices, "sim: there is no device ", int(device));
  return std::exchange(device_now, device);
}

// What tests control (control.h).
void pause_stream(const c10::Stream& stream, bool paused) {
  queue(stream).pause(paused);
}
void resume_streams() {
  for_each_queue([](Queue& queue) { queue.pause(false); });
}
void delay_stream(const c10::Stream& stream, Kind kind, double seconds) {
  queue(stream).delay(kind, seconds);
}
void delay_all(Kind kind, double seconds) {
  streams().delays.of_kind.at(static_cast<size_t>(kind)) = seconds;
  for_each_queue([&](Queue& queue) { queue.delay(kind, seconds); });
}
void random_delays(uint64_t seed, double most_seconds) {
  streams().delays.seed = seed;
  streams().delays.most_random = most_seconds;
  for_each_queue([&](Queue& queue) { queue.random_delays(seed, most_seconds); });
}
void set_patience(double seconds) {
  patience_s = seconds;
}

}  // namespace sim
