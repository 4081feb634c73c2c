// An allocator of ranges of [0, end), for a pool or a file. It does not touch the bytes there.
//
// A request takes the smallest free range that it fits in, the first of equal ones: the same
// requests, repeated step after step, find the same places. Where none is large enough it gets
// several ranges, so that nothing is lost to fragmentation. Not thread-safe.
#pragma once

#include <cstddef>
#include <map>
#include <set>
#include <utility>
#include <vector>

namespace memopt::offload {

struct Range {
  size_t offset;
  size_t bytes;
};

class Space {
 public:
  // More pieces than this cost more in calls than their room is worth.
  static constexpr size_t kMostPieces = 16;

  // All offsets and lengths are multiples of `alignment`, a power of two.
  explicit Space(size_t alignment) : alignment_(alignment) {}

  // Adds `bytes`, a multiple of the alignment, at the end. A wall keeps ranges from reaching over
  // the border to what lies before.
  void grow(size_t bytes, bool wall);

  // Ranges of `bytes` > 0 altogether, rounded up to the alignment; of several ranges the largest
  // come first. Empty where there is no room, or it lies in more than `most_pieces` ranges.
  std::vector<Range> allocate(size_t bytes, size_t most_pieces = kMostPieces);

  // Gives back a range, or a part of one.
  void free(Range range);

  // Takes a range out for good, if all of it is free. It lies between walls or ends.
  bool remove(Range range);

  size_t rounded(size_t bytes) const { return (bytes + alignment_ - 1) & ~(alignment_ - 1); }

  size_t end() const { return end_; }    // the offset at which it grows
  size_t size() const { return size_; }  // in use or free
  size_t in_use() const { return in_use_; }
  size_t high_water() const { return high_water_; }  // the most that was in use at one time
  size_t available() const { return size_ - in_use_; }

 private:
  void insert(size_t offset, size_t bytes);
  void erase(size_t offset, size_t bytes);
  Range take(size_t offset, size_t found, size_t bytes);

  size_t alignment_;
  size_t end_ = 0;
  size_t size_ = 0;
  size_t in_use_ = 0;
  size_t high_water_ = 0;
  std::map<size_t, size_t> free_;                 // offset -> bytes; neighbours are merged
  std::set<std::pair<size_t, size_t>> by_bytes_;  // the same as (bytes, offset)
  std::set<size_t> walls_;                        // offsets
};

}  // namespace memopt::offload
