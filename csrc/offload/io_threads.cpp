#include "io_threads.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <list>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace memopt::offload {

namespace {

// A thousandth of what a copy of some MiB takes, and thousands of times what asking takes.
constexpr auto kAskAgainAfter = std::chrono::microseconds(100);

// Signals are for the threads of the program: Python's handlers, a debugger's.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

}  // namespace

struct IoThreads::State {
  struct Queued {
    std::shared_ptr<IoJob> job;
    bool may_begin = false;
    size_t begun = 0;  // parts
  };

  std::mutex mutex;
  std::condition_variable changed;
  std::list<Queued> urgent, others;
  bool asking = false;  // one idle thread asks whether jobs can begin, the rest sleep
  bool stopping = false;
  std::vector<Memory> buffers;
  std::vector<std::thread> threads;

  bool empty() const { return urgent.empty() && others.empty(); }

  // The next part of the first job that can run; null where there is none.
  std::shared_ptr<IoJob> claim(size_t& part) {
    for (auto* queue : {&urgent, &others}) {
      for (auto entry = queue->begin(); entry != queue->end(); ++entry) {
        if (!entry->may_begin) entry->may_begin = entry->job->can_begin();
        if (!entry->may_begin) continue;
        part = entry->begun++;
        std::shared_ptr<IoJob> job = entry->job;
        if (entry->begun == job->parts()) queue->erase(entry);
        return job;
      }
    }
    return nullptr;
  }

  void work(void* buffer) {
    std::unique_lock<std::mutex> lock(mutex);
    while (!stopping) {
      size_t part = 0;
      if (std::shared_ptr<IoJob> job = claim(part)) {
        if (!empty()) changed.notify_one();  // the next thread looks for the next part
        lock.unlock();
        job->run(part, buffer);
        job.reset();
        lock.lock();
      } else if (empty() || asking) {
        changed.wait(lock);
      } else {
        asking = true;
        changed.wait_for(lock, kAskAgainAfter);
        asking = false;
      }
    }
  }

  void stop() {
    std::list<Queued> left;
    {
      const std::lock_guard<std::mutex> lock(mutex);
      stopping = true;
      left.splice(left.end(), urgent);
      left.splice(left.end(), others);
    }
    changed.notify_all();
    for (const Queued& entry : left) entry.job->skip(entry.job->parts() - entry.begun);
    for (std::thread& thread : threads) thread.join();
  }
};

IoThreads::IoThreads(int threads, size_t buffer_bytes, const MakeBuffer& make_buffer)
    : state_(std::make_unique<State>()) {
  if (threads < 1) {
    throw std::invalid_argument("memopt: at least 1 I/O thread is needed, got " +
                                std::to_string(threads));
  }
  const SignalsBlocked blocked;  // threads inherit it
  try {
    for (int i = 0; i < threads; ++i) {
      state_->buffers.push_back(make_buffer(buffer_bytes));
      void* buffer = state_->buffers.back().data;
      state_->threads.emplace_back([state = state_.get(), buffer] { state->work(buffer); });
      pthread_setname_np(state_->threads.back().native_handle(), "memopt-io");
    }
  } catch (...) {
    state_->stop();
    throw;
  }
}

IoThreads::~IoThreads() {
  if (process_.is_current()) {
    state_->stop();
  } else {
    state_
        .release();  // of the parent's threads, which cannot be joined here, nor their locks taken
  }
}

void IoThreads::submit(std::shared_ptr<IoJob> job, bool urgent) {
  if (job->parts() == 0 || !process_.is_current()) {
    job->skip(job->parts());
    return;
  }
  const std::lock_guard<std::mutex> lock(state_->mutex);
  (urgent ? state_->urgent : state_->others).push_back({std::move(job)});
  state_->changed.notify_one();
}

void IoThreads::withdraw(const IoJob& job) {
  if (!process_.is_current()) return;
  std::list<State::Queued> withdrawn;
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    for (auto* queue : {&state_->urgent, &state_->others}) {
      const auto found =
          std::find_if(queue->begin(), queue->end(),
                       [&](const State::Queued& entry) { return entry.job.get() == &job; });
      if (found != queue->end()) withdrawn.splice(withdrawn.end(), *queue, found);
    }
  }
  for (const State::Queued& entry : withdrawn) entry.job->skip(entry.job->parts() - entry.begun);
}

}  // namespace memopt::offload
