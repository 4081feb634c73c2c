// The file backend: copies come back as they went, and in the right order.
#include <thread>

#include "faulty_calls.h"
#include "stored.h"

using namespace check;

namespace {

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
