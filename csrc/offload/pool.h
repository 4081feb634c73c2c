// Host memory for offloaded tensors, in slabs that are allocated once.
//
// Pinning memory takes longer than copying to it, and stops the device; so slabs stay until trim(),
// and a training step finds the space that the step before gave back. The caller says where slabs
// come from: a device's pinned allocator, or pageable_slab().
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "backend.h"
#include "space.h"

namespace memopt::offload {

// Memory and disks are read and written in pages of this.
inline constexpr size_t kPage = 4096;

struct Slab {
  void* data = nullptr;  // at a page's beginning; null where there was no memory
  std::shared_ptr<void> owner;
  bool pinned = false;
};

Slab pageable_slab(size_t bytes);

struct PoolOptions {
  using MakeSlab = std::function<Slab(size_t bytes)>;

  MakeSlab make_slab = pageable_slab;
  size_t most_bytes = SIZE_MAX;  // of all slabs together
  // What the pool grows by: a power of two, as PyTorch's pinned allocator rounds up to one. Less
  // only where `most_bytes` leaves less.
  size_t step = size_t{64} << 20;
};

struct Piece {
  std::byte* data;
  size_t bytes;
};

class Pool;

class PoolRoom : public Room {
 public:
  PoolRoom(std::shared_ptr<Pool> pool, std::vector<Range> ranges, std::vector<Piece> pieces)
      : pool_(std::move(pool)), ranges_(std::move(ranges)), pieces_(std::move(pieces)) {}
  PoolRoom(const PoolRoom&) = delete;
  PoolRoom& operator=(const PoolRoom&) = delete;
  ~PoolRoom() override;

  // Of the bytes that were asked for altogether. Each begins at a page and lies in one slab.
  const std::vector<Piece>& pieces() const { return pieces_; }

 private:
  std::shared_ptr<Pool> pool_;
  std::vector<Range> ranges_;
  std::vector<Piece> pieces_;
};

// Held by its rooms. Thread-safe; a slab is made under the pool's lock.
class Pool : public std::enable_shared_from_this<Pool> {
 public:
  // Raises std::invalid_argument where the step is no power of two or less than a page.
  static std::shared_ptr<Pool> make(PoolOptions options);

  // Room for `bytes` > 0; null where `most_bytes` or the memory of the host does not suffice.
  std::unique_ptr<PoolRoom> reserve(size_t bytes);

  RoomUse use() const;

  // Gives up the slabs that nothing is in. Returns their bytes.
  size_t trim();

 private:
  friend class PoolRoom;
  struct Held {
    Slab slab;
    size_t bytes;
  };

  explicit Pool(PoolOptions options) : options_(std::move(options)) {}
  bool add_slab();
  std::unique_ptr<PoolRoom> room(std::vector<Range> ranges, size_t bytes);
  void release(const std::vector<Range>& ranges);

  const PoolOptions options_;
  mutable std::mutex mutex_;
  Space space_{kPage};            // of all slabs, with walls between
  std::map<size_t, Held> slabs_;  // by their offset in space_
  size_t pageable_ = 0;
};

}  // namespace memopt::offload
