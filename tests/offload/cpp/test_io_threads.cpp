// The queue of the I/O threads: order, what may not block, withdrawal, shutdown, fork.
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "../../../csrc/offload/device.h"
#include "../../../csrc/offload/io_threads.h"
#include "support.h"

using namespace memopt::offload;

namespace {

class Log {
 public:
  void add(std::string line) {
    const std::lock_guard<std::mutex> lock(mutex_);
    lines_.push_back(std::move(line));
  }
  std::vector<std::string> lines() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return lines_;
  }

 private:
  std::mutex mutex_;
  std::vector<std::string> lines_;
};

// Runs when `ready` is reached. Its parts say so, and wait for `gate`; `over` is reached when all
// have run or were skipped.
class TestJob : public IoJob {
 public:
  TestJob(Log& log, std::string name, size_t parts, EventPtr ready = HostEvent::now(),
          EventPtr gate = HostEvent::now())
      : log_(log),
        name_(std::move(name)),
        parts_(parts),
        ready_(ready),
        gate_(gate),
        left_(parts) {}

  size_t parts() const override { return parts_; }
  bool can_begin() override { return ready_->reached(); }
  void run(size_t part, void* buffer) noexcept override {
    static_cast<char*>(buffer)[kPage - 1] = 1;  // two threads with one buffer are a data race
    log_.add(name_ + std::to_string(part));
    begun->reach_once();
    gate_->wait();
    done(1);
  }
  void skip(size_t parts) noexcept override {
    skipped += parts;
    done(parts);
  }

  struct Once : HostEvent {
    std::once_flag flag;
    void reach_once() {
      std::call_once(flag, [this] { reach(); });
    }
  };
  std::shared_ptr<Once> begun = std::make_shared<Once>();
  std::shared_ptr<HostEvent> over = check::not_reached();
  std::atomic<size_t> skipped = 0;

 private:
  void done(size_t parts) {
    if (left_.fetch_sub(parts) == parts) over->reach();
  }

  Log& log_;
  std::string name_;
  size_t parts_;
  EventPtr ready_, gate_;
  std::atomic<size_t> left_;
};

Memory buffer(size_t bytes) {
  return check::CpuDevice().allocate(bytes);
}

std::shared_ptr<TestJob> submit(IoThreads& threads, std::shared_ptr<TestJob> job,
                                bool urgent = false) {
  threads.submit(job, urgent);
  return job;
}

using Lines = std::vector<std::string>;

}  // namespace

TEST(urgent_ones_first_else_in_order) {
  Log log;
  IoThreads threads(1, kPage, buffer);
  const auto gate = check::not_reached();
  const auto first =
      submit(threads, std::make_shared<TestJob>(log, "first", 2, HostEvent::now(), gate));
  first->begun->wait();
  const auto store = submit(threads, std::make_shared<TestJob>(log, "store", 2));
  submit(threads, std::make_shared<TestJob>(log, "load", 1), true);
  submit(threads, std::make_shared<TestJob>(log, "next", 1), true);
  gate->reach();
  store->over->wait();
  CHECK((log.lines() == Lines{"first0", "load0", "next0", "first1", "store0", "store1"}));
}

TEST(a_job_that_cannot_begin_blocks_no_other) {
  Log log;
  IoThreads threads(1, kPage, buffer);
  const auto ready = check::not_reached();
  const auto late = submit(threads, std::make_shared<TestJob>(log, "late", 1, ready), true);
  submit(threads, std::make_shared<TestJob>(log, "other", 1))->over->wait();
  // And it may wait for a job behind it.
  const auto needed = std::make_shared<TestJob>(log, "needed", 3);
  const auto waits =
      submit(threads, std::make_shared<TestJob>(log, "waits", 1, needed->over), true);
  submit(threads, needed);
  waits->over->wait();
  CHECK(!late->over->reached());
  ready->reach();
  late->over->wait();
  CHECK((log.lines() == Lines{"other0", "needed0", "needed1", "needed2", "waits0", "late0"}));
}

TEST(parts_run_side_by_side) {
  Log log;
  IoThreads threads(3, kPage, buffer);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // so that all sleep, and one wakes
  const auto gate = check::not_reached();
  const auto job =
      submit(threads, std::make_shared<TestJob>(log, "part", 3, HostEvent::now(), gate));
  while (log.lines().size() < 3) std::this_thread::yield();  // all are at the gate
  gate->reach();
  job->over->wait();
}

TEST(withdrawn_parts_are_skipped) {
  Log log;
  IoThreads threads(1, kPage, buffer);
  const auto gate = check::not_reached();
  const auto begun =
      submit(threads, std::make_shared<TestJob>(log, "begun", 5, HostEvent::now(), gate));
  begun->begun->wait();
  const auto queued = submit(threads, std::make_shared<TestJob>(log, "queued", 3));
  const auto waits =
      submit(threads, std::make_shared<TestJob>(log, "waits", 2, check::not_reached()), true);
  for (const auto& job : {queued, waits, begun}) threads.withdraw(*job);
  CHECK(queued->over->reached() && queued->skipped == 3);
  CHECK(waits->over->reached() && waits->skipped == 2);
  CHECK(!begun->over->reached() && begun->skipped == 4);
  gate->reach();
  begun->over->wait();
  threads.withdraw(*begun);
  CHECK(begun->skipped == 4);
  CHECK((log.lines() == Lines{"begun0"}));
}

TEST(shutdown_skips_what_has_not_begun) {
  Log log;
  std::vector<std::shared_ptr<TestJob>> jobs;
  {
    IoThreads threads(2, kPage, buffer);
    for (int k = 0; k < 50; ++k) {
      jobs.push_back(submit(threads, std::make_shared<TestJob>(log, "job", 4), k % 2));
    }
    jobs.push_back(
        submit(threads, std::make_shared<TestJob>(log, "never", 4, check::not_reached())));
  }
  size_t skipped = 0;
  for (const auto& job : jobs) {
    CHECK(job->over->reached());
    skipped += job->skipped;
  }
  CHECK(jobs.back()->skipped == 4);
  CHECK(skipped + log.lines().size() == 4 * jobs.size());
}

TEST(many_submitters) {
  Log log;
  IoThreads threads(4, kPage, buffer);
  const auto work = [&](int thread) {
    EventPtr before = HostEvent::now();
    for (int k = 0; k < 50; ++k) {
      const auto job = submit(threads, std::make_shared<TestJob>(log, "job", 1 + k % 3, before),
                              (k + thread) % 2);
      if (k % 7 == 3) threads.withdraw(*job);
      before = job->over;
    }
    before->wait();
  };
  std::vector<std::thread> submitters;
  for (int thread = 0; thread < 4; ++thread) submitters.emplace_back(work, thread);
  for (std::thread& submitter : submitters) submitter.join();
}

TEST(bad_options) {
  CHECK_RAISES("at least 1 I/O thread", IoThreads(0, kPage, buffer));
}

TEST(a_buffer_that_cannot_be_made_ends_the_threads_begun) {
  int made = 0;
  const auto fails = [&](size_t bytes) {
    if (++made == 3) throw std::runtime_error("no memory");
    return buffer(bytes);
  };
  CHECK_RAISES("no memory", IoThreads(4, kPage, fails));
}

// Forks while another thread is under the queue's lock: in the child it stays locked.
TEST(a_child_of_fork_does_not_hang) {
  Log log;
  auto threads = std::make_unique<IoThreads>(2, kPage, buffer);
  struct HoldsTheLock : Event {
    bool reached() override {
      held->reach();
      go_on->wait();
      return true;
    }
    void wait() override {}
    double seconds_after(Event&) override { return 0; }
    std::shared_ptr<HostEvent> held = check::not_reached(), go_on = check::not_reached();
  };
  const auto lock = std::make_shared<HoldsTheLock>();
  const auto before = submit(*threads, std::make_shared<TestJob>(log, "before", 1, lock));
  lock->held->wait();
  const pid_t child = ::fork();
  CHECK(child >= 0);
  if (child == 0) {
    ::alarm(60);
    const auto job = submit(*threads, std::make_shared<TestJob>(log, "child", 3));
    const bool skipped = job->skipped == 3 && job->over->reached();
    threads->withdraw(*job);
    threads.reset();
    before->over->wait();
    const auto& over = before->over;
    const bool failed = over->failed() && over->error().find("fork") != std::string::npos;
    std::_Exit(skipped && failed ? 0 : 1);
  }
  int status = 0;
  CHECK(::waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(!before->over->reached());
  lock->go_on->reach();
  submit(*threads, std::make_shared<TestJob>(log, "parent", 1))->over->wait();
  before->over->wait();
}
