#include "pool.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace memopt::offload {

Slab pageable_slab(size_t bytes) {
  const std::shared_ptr<void> memory(std::aligned_alloc(kPage, bytes), std::free);
  return {memory.get(), memory, false};
}

PoolRoom::~PoolRoom() {
  pool_->release(ranges_);
}

std::shared_ptr<Pool> Pool::make(PoolOptions options) {
  if (!std::has_single_bit(options.step) || options.step < kPage) {
    throw std::invalid_argument("memopt: the pool's step must be a power of two of at least " +
                                std::to_string(kPage) + " bytes, got " +
                                std::to_string(options.step));
  }
  return std::shared_ptr<Pool>(new Pool(std::move(options)));
}

std::unique_ptr<PoolRoom> Pool::reserve(size_t bytes) {
  if (bytes == 0) throw std::invalid_argument("memopt: a space of 0 bytes was asked for");
  const std::lock_guard<std::mutex> lock(mutex_);
  const size_t could_grow = options_.most_bytes - std::min(options_.most_bytes, space_.size());
  if (bytes > space_.available() && bytes - space_.available() > could_grow) return nullptr;
  // A piece lies in one slab, so a large request has some in any case.
  const size_t most_pieces = Space::kMostPieces + bytes / options_.step;
  for (;;) {
    auto ranges = space_.allocate(bytes, most_pieces);
    if (!ranges.empty()) return room(std::move(ranges), bytes);
    if (!add_slab()) return nullptr;
  }
}

bool Pool::add_slab() {
  const size_t left = options_.most_bytes - std::min(options_.most_bytes, space_.size());
  const size_t bytes = std::min(options_.step, std::bit_floor(left));
  if (bytes < kPage) return false;
  Slab slab = options_.make_slab(bytes);
  if (slab.data == nullptr) return false;
  if (reinterpret_cast<uintptr_t>(slab.data) % kPage != 0) {
    throw std::invalid_argument("memopt: a slab must begin at a multiple of " +
                                std::to_string(kPage) + " bytes");
  }
  if (!slab.pinned) pageable_ += bytes;
  slabs_.emplace(space_.end(), Held{std::move(slab), bytes});
  space_.grow(bytes, /*wall=*/true);
  return true;
}

std::unique_ptr<PoolRoom> Pool::room(std::vector<Range> ranges, size_t bytes) {
  std::vector<Piece> pieces;
  pieces.reserve(ranges.size());
  for (const Range& range : ranges) {
    const auto& [begin, held] = *std::prev(slabs_.upper_bound(range.offset));
    auto* data = static_cast<std::byte*>(held.slab.data) + (range.offset - begin);
    pieces.push_back({data, std::min(range.bytes, bytes)});
    bytes -= pieces.back().bytes;
  }
  return std::make_unique<PoolRoom>(shared_from_this(), std::move(ranges), std::move(pieces));
}

void Pool::release(const std::vector<Range>& ranges) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Range& range : ranges) space_.free(range);
}

RoomUse Pool::use() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return {space_.in_use(), space_.high_water(), space_.size(), pageable_};
}

size_t Pool::trim() {
  std::vector<Slab> dropped;  // after the lock
  const std::lock_guard<std::mutex> lock(mutex_);
  const size_t before = space_.size();
  for (auto entry = slabs_.begin(); entry != slabs_.end();) {
    const auto& [offset, held] = *entry;
    if (!space_.remove({offset, held.bytes})) {
      ++entry;
      continue;
    }
    if (!held.slab.pinned) pageable_ -= held.bytes;
    dropped.push_back(held.slab);
    entry = slabs_.erase(entry);
  }
  return before - space_.size();
}

}  // namespace memopt::offload
