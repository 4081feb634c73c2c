// A few threads that read and write files, so that several requests are on their way to the disk at
// a time.
//
// A job has parts that may run side by side, and begins when what it needs has happened (a stream
// of the device has come so far, another job is done). That is asked for again and again rather
// than waited for: a thread that blocked for one job would keep it from the job that it waits for.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#include "backend.h"
#include "process.h"

namespace memopt::offload {

class IoJob {
 public:
  virtual ~IoJob() = default;

  virtual size_t parts() const = 0;

  // Asked by one thread at a time, under the queue's lock, until it says yes. Never blocks.
  virtual bool can_begin() = 0;

  // `buffer` is the running thread's own, of the bytes that IoThreads was given.
  virtual void run(size_t part, void* buffer) noexcept = 0;

  // Called instead of run() for parts that will not run.
  virtual void skip(size_t parts) noexcept = 0;
};

// Thread-safe. In a child of fork(), which has no such threads, every job is skipped.
class IoThreads {
 public:
  using MakeBuffer = std::function<Memory(size_t bytes)>;

  // Raises std::invalid_argument where `threads` is less than 1, std::system_error where the system
  // gives no thread.
  IoThreads(int threads, size_t buffer_bytes, const MakeBuffer& make_buffer);

  // Skips what has not begun.
  ~IoThreads();

  // Jobs run in the order of their submission as far as they can begin, urgent ones before others.
  void submit(std::shared_ptr<IoJob> job, bool urgent);

  // Skips the parts of the job that have not begun.
  void withdraw(const IoJob& job);

 private:
  struct State;
  std::unique_ptr<State> state_;
  Process process_;
};

}  // namespace memopt::offload
