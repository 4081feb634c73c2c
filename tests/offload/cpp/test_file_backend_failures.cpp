// The file backend: every failure is told by the event, and nothing is left behind.
#include <signal.h>
#include <sys/wait.h>

#include <thread>

#include "faulty_calls.h"
#include "stored.h"

using namespace check;

TEST(a_full_disk_while_writing) {
  const Folder folder;
  FileBackendOptions options = in(folder);
  const auto good = std::make_shared<std::atomic<int64_t>>(int64_t{1} << 40);
  options.file.calls.write = check::fails_after(options.file.calls.write, good, ENOSPC);
  FileBackend backend(cpu(), options);
  *good = 10 * kChunk;
  Stored kept = store(backend, 4 * kChunk, 1);
  kept.event->wait();
  Stored lost = store(backend, 20 * kChunk, 2);
  lost.event->wait();
  CHECK(!kept.event->failed() && kept.event->error().empty());
  CHECK(lost.event->failed());
  CHECK(lost.event->error().find("No space left on device") != std::string::npos);
  check_comes_back(backend, kept);
  Memory to = poisoned(20 * kChunk);
  const EventPtr loaded = load(backend, lost, to);
  loaded->wait();
  CHECK(loaded->failed() && loaded->error() == lost.event->error());
  *good = int64_t{1} << 40;  // there is space again
  Stored next = store(backend, 20 * kChunk, 3);
  check_comes_back(backend, next);
}

TEST(a_disk_that_cannot_be_read) {
  const Folder folder;
  FileBackendOptions options = in(folder);
  const auto good = std::make_shared<std::atomic<int64_t>>(int64_t{1} << 40);
  options.file.calls.read = check::fails_after(options.file.calls.read, good, EIO);
  FileBackend backend(cpu(), options);
  Stored one = store(backend, 6 * kChunk);
  one.event->wait();
  *good = 2 * kChunk;
  Memory to = poisoned(6 * kChunk);
  const EventPtr loaded = load(backend, one, to);
  loaded->wait();
  CHECK(loaded->failed());
  CHECK(loaded->error().find("Input/output error") != std::string::npos);
}

TEST(other_bytes_than_were_written) {
  const Folder folder;
  for (const bool checksums : {true, false}) {
    FileBackendOptions options = in(folder, checksums);
    options.file.calls.read = [](int file, void* data, size_t bytes, off_t offset) {
      const ssize_t got = ::pread(file, data, bytes, offset);
      // One bit of the tensor's second chunk.
      if (offset == off_t{kChunk}) static_cast<unsigned char*>(data)[777] ^= 0x10;
      return got;
    };
    FileBackend backend(cpu(), options);
    Stored one = store(backend, 4 * kChunk);
    Memory to = poisoned(4 * kChunk);
    const EventPtr loaded = load(backend, one, to);
    loaded->wait();
    CHECK(loaded->failed() == checksums && !equal(to, one.bytes));
    if (checksums)
      CHECK(loaded->error().find("other bytes than were written") != std::string::npos);
  }
}

TEST(a_device_that_fails) {
  struct Broken : CpuDevice {
    void read(void*, const Memory&, size_t, size_t) override {
      throw std::runtime_error("the device is lost");
    }
  };
  const Folder folder;
  FileBackend backend(std::make_shared<Broken>(), in(folder));
  Stored one = store(backend, 3 * kChunk);
  one.event->wait();
  CHECK(one.event->failed() && one.event->error() == "the device is lost");
}

TEST(a_cancelled_store_has_failed) {
  const Folder folder;
  FileBackend backend(cpu(), in(folder));
  const auto ready = check::not_reached();
  Stored one = store(backend, 8 * kChunk, 1, ready);
  backend.cancel(one.event);
  CHECK(one.event->reached() && one.event->failed());
  CHECK(one.event->error().find("cancelled") != std::string::npos);
  CHECK(one.memory.owner.use_count() == 1);
  Stored done = store(backend, 8 * kChunk, 2);
  done.event->wait();
  backend.cancel(done.event);
  backend.cancel(backend.now());
  CHECK(!done.event->failed());
  check_comes_back(backend, done);
  // At any moment: it is either whole or has failed.
  for (unsigned k = 0; k < 100; ++k) {
    Stored some = store(backend, 8 * kChunk, k);
    for (unsigned wait = 0; wait < k; ++wait) std::this_thread::yield();
    backend.cancel(some.event);
    some.event->wait();
    if (!some.event->failed()) check_comes_back(backend, some);
  }
}

TEST(a_backend_that_ends_leaves_no_event_behind) {
  const Folder folder;
  std::vector<Stored> all;
  Memory to = poisoned(8 * kChunk);
  EventPtr loaded;
  {
    FileBackend backend(cpu(), in(folder));
    for (unsigned k = 0; k < 20; ++k) all.push_back(store(backend, 8 * kChunk, k));
    all.push_back(store(backend, 8 * kChunk, 20, check::not_reached()));
    loaded = load(backend, all.back(), to);
  }
  for (const Stored& one : all) CHECK(one.event->reached());
  CHECK(all.back().event->failed() && loaded->failed());
}  // rooms hold the file

TEST(mistakes_are_found) {
  const Folder folder;
  FileBackendOptions options = in(folder);
  options.chunk_bytes = kPage + 1;
  CHECK_RAISES("chunk_bytes must be a multiple of 4096, got 4097", FileBackend(cpu(), options));
  options = in(folder);
  options.threads = 0;
  CHECK_RAISES("at least 1 I/O thread", FileBackend(cpu(), options));
  options = in(folder);
  options.file.directory += "/nowhere";
  CHECK_RAISES("No such file or directory", FileBackend(cpu(), options));
  FileBackend backend(cpu(), in(folder));
  const auto room = backend.reserve(100);
  CHECK_RAISES("a space of 100 bytes was to be copied from or to 101",
               backend.store(poisoned(101), *room, HostEvent::now()));
}

TEST(nothing_is_left_behind_when_it_is_killed) {
  for (const bool named : {false, true}) {
    const Folder folder;
    int pipe[2];
    CHECK(::pipe(pipe) == 0);
    const pid_t child = ::fork();
    CHECK(child >= 0);
    if (child == 0) {
      FileBackendOptions options = in(folder);
      if (named) check::without_tmpfile(options.file.calls);
      FileBackend backend(cpu(), options);
      std::vector<Stored> all;
      for (unsigned k = 0;; ++k) {
        all.push_back(store(backend, 4 * kChunk, k));
        if (k == 20) CHECK(::write(pipe[1], "x", 1) == 1);
        if (all.size() == 10) all.front().event->wait(), all.erase(all.begin());
      }
    }
    char byte = 0;
    CHECK(::read(pipe[0], &byte, 1) == 1);  // it is in the middle of its work
    CHECK(::kill(child, SIGKILL) == 0);
    int status = 0;
    CHECK(::waitpid(child, &status, 0) == child && WIFSIGNALED(status));
    CHECK(folder.is_empty());
    ::close(pipe[0]);
    ::close(pipe[1]);
  }
}

TEST(a_child_of_fork_does_not_touch_the_file) {
  const Folder folder;
  auto backend = std::make_unique<FileBackend>(cpu(), in(folder));
  Stored before = store(*backend, 4 * kChunk, 1);
  before.event->wait();
  Stored pending = store(*backend, 4 * kChunk, 2, check::not_reached());
  const pid_t child = ::fork();
  CHECK(child >= 0);
  if (child == 0) {
    CHECK(backend->reserve(1) == nullptr);
    Memory to = poisoned(4 * kChunk);
    const EventPtr loaded = load(*backend, before, to);
    loaded->wait();
    CHECK(loaded->failed() && loaded->error().find("child of fork()") != std::string::npos);
    pending.event->wait();
    CHECK(pending.event->failed());
    backend->cancel(pending.event);
    before.room.reset();
    pending.room.reset();
    backend.reset();
    std::_Exit(0);
  }
  int status = 0;
  CHECK(::waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  check_comes_back(*backend, before);
  backend->cancel(pending.event);
}
