// The file backend: copies come back as they went, in the right order, and every failure is told by
// the event.
#include <signal.h>
#include <sys/wait.h>

#include <cstring>
#include <thread>

#include "../../../csrc/offload/file_backend.h"
#include "faulty_calls.h"
#include "support.h"

using namespace memopt::offload;
using check::Folder;

namespace {

constexpr size_t kChunk = 16 * kPage;

FileBackendOptions in(const Folder& folder, bool checksums = true) {
  FileBackendOptions options;
  options.file.directory = folder.path();
  options.file.step = 64 * kPage;
  options.chunk_bytes = kChunk;
  options.checksums = checksums;
  return options;
}

Memory memory_of(const std::vector<std::byte>& bytes) {
  Memory memory = CpuDevice().allocate(bytes.size());
  std::memcpy(memory.data, bytes.data(), bytes.size());
  return memory;
}

Memory poisoned(size_t bytes) {
  Memory memory = CpuDevice().allocate(bytes);
  std::memset(memory.data, 0xee, bytes);
  return memory;
}

bool equal(const Memory& memory, const std::vector<std::byte>& bytes) {
  return std::memcmp(memory.data, bytes.data(), bytes.size()) == 0;
}

std::shared_ptr<CpuDevice> cpu() {
  return std::make_shared<CpuDevice>();
}

struct Stored {
  std::vector<std::byte> bytes;
  Memory memory;
  std::unique_ptr<Room> room;
  EventPtr event;
};

Stored store(FileBackend& backend, size_t bytes, unsigned seed = 1,
             EventPtr ready = HostEvent::now()) {
  Stored made{check::random_bytes(bytes, seed), {}, backend.reserve(bytes), nullptr};
  CHECK(made.room != nullptr);
  made.memory = memory_of(made.bytes);
  made.event = backend.store(made.memory, *made.room, ready);
  return made;
}

EventPtr load(FileBackend& backend, const Stored& stored, const Memory& to) {
  return backend.load(*stored.room, to, HostEvent::now(), stored.event);
}

void check_comes_back(FileBackend& backend, Stored& stored) {
  Memory to = poisoned(stored.bytes.size());
  const EventPtr loaded = load(backend, stored, to);
  loaded->wait();
  CHECK(!loaded->failed());
  CHECK(equal(to, stored.bytes));
}

void check_sizes(FileBackendOptions options) {
  FileBackend backend(cpu(), std::move(options));
  std::vector<Stored> all;
  unsigned seed = 0;
  for (size_t bytes : {size_t{1}, kPage - 1, kPage, kPage + 1, kChunk - 1, kChunk, kChunk + 1,
                       5 * kChunk + 12345, 20 * kChunk}) {
    all.push_back(store(backend, bytes, ++seed));
  }
  for (Stored& one : all) check_comes_back(backend, one);
  for (Stored& one : all) check_comes_back(backend, one);  // retain_graph
  all.clear();
  CHECK(backend.room_use().in_use == 0);
}

}  // namespace

TEST(comes_back_as_it_went) {
  for (const bool checksums : {true, false}) {
    const Folder folder;
    check_sizes(in(folder, checksums));
  }
}

TEST(with_calls_that_do_their_work_in_parts) {
  for (const bool direct : {true, false}) {
    const Folder folder;
    FileBackendOptions options = in(folder);
    if (!direct) check::without_direct(options.file.calls);
    check::interrupted(options.file.calls);
    check_sizes(std::move(options));
  }
}

TEST(rooms_in_several_pieces) {
  const Folder folder;
  FileBackendOptions options = in(folder);
  check::small_disk(options.file.calls, 64 * kPage);
  FileBackend backend(cpu(), options);
  std::vector<std::unique_ptr<Room>> rooms;
  while (auto room = backend.reserve(7 * kPage)) rooms.push_back(std::move(room));
  CHECK(rooms.size() == 9);
  for (size_t k = 0; k < rooms.size(); k += 2) rooms[k].reset();
  Stored scattered = store(backend, 36 * kPage - 5);  // 5 pieces of 7 and the last page
  check_comes_back(backend, scattered);
  CHECK(backend.reserve(1) == nullptr);
  CHECK(backend.no_room(1).find("No space left on device") != std::string::npos);
}

TEST(begins_when_it_is_ready) {
  const Folder folder;
  FileBackend backend(cpu(), in(folder));
  const auto ready = check::not_reached();
  Stored late = store(backend, 3 * kChunk, 1, ready);
  Stored other = store(backend, kChunk, 2);
  Memory to = poisoned(3 * kChunk);
  const EventPtr loaded = load(backend, late, to);  // waits for the store
  other.event->wait();
  CHECK(!late.event->reached() && !loaded->reached());
  // What is written until then counts.
  late.bytes = check::random_bytes(3 * kChunk, 3);
  std::memcpy(late.memory.data, late.bytes.data(), late.bytes.size());
  ready->reach();
  loaded->wait();
  CHECK(equal(to, late.bytes));
  // And a load must not write before its memory is ready.
  const auto target_ready = check::not_reached();
  Memory target = poisoned(3 * kChunk);
  const EventPtr again = backend.load(*late.room, target, target_ready, late.event);
  check_comes_back(backend, other);
  CHECK(!again->reached());
  target_ready->reach();
  again->wait();
  CHECK(equal(target, late.bytes));
}

TEST(memory_is_let_go_of_before_the_event_is_reached) {
  const Folder folder;
  FileBackend backend(cpu(), in(folder));
  for (int k = 0; k < 50; ++k) {
    const auto ready = std::make_shared<HostEvent>();
    Stored one = store(backend, 4 * kChunk, k, ready);
    ready->reach();
    one.event->wait();
    CHECK(one.memory.owner.use_count() == 1 && ready.use_count() == 1);
  }
}

TEST(times) {
  const Folder folder;
  FileBackend backend(cpu(), in(folder));
  const EventPtr before = backend.now();
  Stored one = store(backend, 9 * kChunk, 1, before);
  one.event->wait();
  CHECK(one.event->seconds_after(*before) > 0);
  struct DeviceEvent : Event {
    bool reached() override { return true; }
    void wait() override {}
    double seconds_after(Event&) override { return 0; }
  } of_a_device;
  const double copying = one.event->seconds_after(of_a_device);
  CHECK(copying > 0 && copying <= one.event->seconds_after(*before));
}

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

TEST(many_threads) {
  const Folder folder;
  FileBackend backend(cpu(), in(folder));
  const auto work = [&](unsigned thread) {
    std::mt19937 random(thread);
    std::vector<Stored> all;
    for (unsigned k = 0; k < 60; ++k) {
      all.push_back(store(backend, 1 + random() % (5 * kChunk), 100 * thread + k));
      if (all.size() < 6) continue;
      const size_t which = random() % all.size();
      if (random() % 4 == 0) {
        backend.cancel(all[which].event);
        all[which].event->wait();
      }
      if (!all[which].event->reached() || !all[which].event->failed()) {
        check_comes_back(backend, all[which]);
      }
      all.erase(all.begin() + which);
    }
    for (Stored& one : all) one.event->wait();
  };
  std::vector<std::thread> threads;
  for (unsigned thread = 0; thread < 4; ++thread) threads.emplace_back(work, thread);
  for (std::thread& thread : threads) thread.join();
  CHECK(backend.room_use().in_use == 0);
}

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
  CHECK_RAISES("room for 100 bytes was to be copied from or to 101",
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
