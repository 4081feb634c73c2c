// The pool: pieces that do not overlap, its cap, what it counts, and what it asks the host for.
#include <cstring>
#include <map>
#include <thread>

#include "support.h"

using namespace memopt::offload;

namespace {

constexpr size_t kStep = 16 * kPage;

struct Source {
  std::vector<size_t> made;
  size_t fails_after = SIZE_MAX;  // slabs
  bool pinned = true;

  PoolOptions options(size_t most_bytes = SIZE_MAX) {
    return {[this](size_t bytes) {
              if (made.size() == fails_after) return Slab{};
              made.push_back(bytes);
              Slab slab = pageable_slab(bytes);
              slab.pinned = pinned;
              return slab;
            },
            most_bytes, kStep};
  }
};

size_t bytes_of(const PoolRoom& room) {
  size_t bytes = 0;
  for (const Piece& piece : room.pieces()) bytes += piece.bytes;
  return bytes;
}

void fill(const PoolRoom& room, int value) {
  for (const Piece& piece : room.pieces()) std::memset(piece.data, value, piece.bytes);
}

bool is_full_of(const PoolRoom& room, int value) {
  for (const Piece& piece : room.pieces()) {
    for (size_t k = 0; k < piece.bytes; ++k) {
      if (piece.data[k] != static_cast<std::byte>(value)) return false;
    }
  }
  return true;
}

}  // namespace

TEST(grows_in_steps_and_never_shrinks) {
  Source source;
  const auto pool = Pool::make(source.options());
  for (int step = 0; step < 5; ++step) {
    auto a = pool->reserve(kStep), b = pool->reserve(kStep / 2), c = pool->reserve(1);
    CHECK(a->pieces().size() == 1 && b->pieces().size() == 1);
    CHECK(c->pieces()[0].bytes == 1);
  }
  CHECK((source.made == std::vector<size_t>{kStep, kStep}));
  const RoomUse use = pool->use();
  CHECK(use.in_use == 0 && use.high_water == kStep + kStep / 2 + kPage);
  CHECK(use.allocated == 2 * kStep && use.pageable == 0);
}

TEST(large_requests_get_several_slabs) {
  Source source;
  const auto pool = Pool::make(source.options());
  const size_t bytes = 40 * kStep + 100;
  const auto room = pool->reserve(bytes);
  CHECK(bytes_of(*room) == bytes && room->pieces().size() == 41);
  for (const Piece& piece : room->pieces()) {
    CHECK(reinterpret_cast<uintptr_t>(piece.data) % kPage == 0);
  }
  fill(*room, 1);  // no piece leaves its slab, or AddressSanitizer says so
  CHECK((source.made == std::vector<size_t>(41, kStep)));
}

TEST(fragments_are_used_before_it_grows) {
  Source source;
  const auto pool = Pool::make(source.options());
  std::vector<std::unique_ptr<PoolRoom>> rooms;
  for (int k = 0; k < 16; ++k) rooms.push_back(pool->reserve(kPage));
  for (int k = 0; k < 16; k += 2) rooms[k].reset();
  const auto room = pool->reserve(8 * kPage - 7);
  CHECK(room->pieces().size() == 8 && bytes_of(*room) == 8 * kPage - 7);
  CHECK(source.made.size() == 1);
}

TEST(the_cap_is_hard) {
  Source source;
  const auto pool = Pool::make(source.options(2 * kStep + kStep / 2 + 5));
  CHECK(pool->reserve(3 * kStep) == nullptr);
  CHECK(source.made.empty());  // nothing is made for what cannot fit
  const auto a = pool->reserve(2 * kStep + kStep / 2);
  CHECK(a != nullptr && pool->reserve(1) == nullptr);
  CHECK((source.made == std::vector<size_t>{kStep, kStep, kStep / 2}));
  CHECK(pool->use().allocated <= 2 * kStep + kStep / 2 + 5);
  CHECK(Pool::make(source.options(kPage - 1))->reserve(1) == nullptr);
}

TEST(a_host_without_memory_is_no_room) {
  Source source;
  source.fails_after = 1;
  const auto pool = Pool::make(source.options());
  CHECK(pool->reserve(2 * kStep) == nullptr);
  CHECK(pool->use().in_use == 0);
  CHECK(pool->reserve(kStep) != nullptr);  // what was made for the other is used
}

TEST(a_source_that_raises_leaves_the_pool_as_it_was) {
  bool raises = true;
  PoolOptions options;
  options.step = kStep;
  options.make_slab = [&](size_t bytes) {
    if (raises) throw std::runtime_error("no memory to pin");
    return pageable_slab(bytes);
  };
  const auto pool = Pool::make(options);
  CHECK_RAISES("no memory to pin", pool->reserve(1));
  raises = false;
  CHECK(pool->reserve(1) != nullptr);
}

TEST(pageable_slabs_are_counted) {
  Source source;
  const auto pool = Pool::make(source.options());
  auto pinned = pool->reserve(kStep);
  source.pinned = false;
  auto pageable = pool->reserve(kStep);
  CHECK(pool->use().pageable == kStep);
  pageable.reset();
  CHECK(pool->trim() == kStep);
  CHECK(pool->use().pageable == 0 && pool->use().allocated == kStep);
}

TEST(trim_gives_up_empty_slabs_only) {
  Source source;
  const auto pool = Pool::make(source.options());
  auto a = pool->reserve(kStep), b = pool->reserve(kStep), c = pool->reserve(kStep);
  fill(*c, 3);
  a.reset();
  b.reset();
  const auto d = pool->reserve(kPage);
  CHECK(pool->trim() == kStep);
  CHECK(pool->use().allocated == 2 * kStep);
  CHECK(is_full_of(*c, 3));
  fill(*d, 4);
  const auto e = pool->reserve(3 * kStep);
  fill(*e, 5);
  CHECK(is_full_of(*c, 3) && is_full_of(*d, 4));
}

TEST(rooms_hold_the_pool) {
  auto pool = Pool::make({});
  const auto room = pool->reserve(100);
  pool.reset();
  fill(*room, 1);
}

TEST(bad_options) {
  CHECK_RAISES("power of two", Pool::make({pageable_slab, SIZE_MAX, 3 * kPage}));
  CHECK_RAISES("power of two", Pool::make({pageable_slab, SIZE_MAX, kPage / 2}));
  CHECK_RAISES("0 bytes", Pool::make({})->reserve(0));
  const auto odd = [](size_t bytes) {
    Slab slab = pageable_slab(2 * bytes);
    slab.data = static_cast<std::byte*>(slab.data) + 8;
    return slab;
  };
  CHECK_RAISES("must begin at a multiple", Pool::make({odd, SIZE_MAX, kStep})->reserve(1));
}

TEST(many_threads_never_share_a_byte) {
  Source source;
  const auto pool = Pool::make(source.options(64 * kStep));
  const auto work = [&](int thread) {
    std::mt19937 random(thread);
    std::map<int, std::unique_ptr<PoolRoom>> rooms;
    for (int k = 0; k < 300; ++k) {
      const int slot = random() % 8;
      if (rooms[slot]) CHECK(is_full_of(*rooms[slot], 10 * thread + slot));
      rooms[slot].reset();
      rooms[slot] = pool->reserve(1 + random() % (3 * kPage));
      CHECK(rooms[slot] != nullptr);
      fill(*rooms[slot], 10 * thread + slot);
      if (k % 100 == 50) pool->trim();
    }
  };
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) threads.emplace_back(work, thread);
  for (std::thread& thread : threads) thread.join();
  CHECK(pool->use().in_use == 0);
  pool->trim();
  CHECK(pool->use().allocated == 0);
}
