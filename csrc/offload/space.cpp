#include "space.h"

#include <algorithm>
#include <stdexcept>

namespace memopt::offload {

void Space::grow(size_t bytes, bool wall) {
  if (bytes == 0 || bytes != rounded(bytes)) {
    throw std::invalid_argument("Space::grow: bytes must be a multiple of the alignment");
  }
  if (wall) walls_.insert(end_);
  const size_t offset = end_;
  end_ += bytes;
  size_ += bytes;
  in_use_ += bytes;
  free({offset, bytes});
}

std::vector<Range> Space::allocate(size_t bytes, size_t most_pieces) {
  size_t missing = rounded(bytes);
  std::vector<Range> ranges;
  if (missing == 0 || missing < bytes || missing > available()) return ranges;
  while (missing > 0) {
    if (ranges.size() == most_pieces) {
      for (const Range& range : ranges) free(range);
      return {};
    }
    auto found = by_bytes_.lower_bound({missing, 0});
    if (found == by_bytes_.end()) --found;  // the largest
    ranges.push_back(take(found->second, found->first, std::min(missing, found->first)));
    missing -= ranges.back().bytes;
  }
  high_water_ = std::max(high_water_, in_use_);
  return ranges;
}

void Space::free(Range range) {
  size_t offset = range.offset;
  size_t bytes = range.bytes;
  const auto next = free_.lower_bound(offset);
  const bool overlaps_next = next != free_.end() && next->first < offset + bytes;
  const auto before = next == free_.begin() ? free_.end() : std::prev(next);
  const bool overlaps_before = before != free_.end() && before->first + before->second > offset;
  if (overlaps_next || overlaps_before || bytes > in_use_ || offset + bytes > end_) {
    throw std::logic_error("Space::free: the range is not in use");
  }
  in_use_ -= bytes;
  if (next != free_.end() && next->first == offset + bytes && !walls_.contains(next->first)) {
    bytes += next->second;
    erase(next->first, next->second);  // does not invalidate `before`
  }
  if (before != free_.end() && before->first + before->second == offset &&
      !walls_.contains(offset)) {
    offset = before->first;
    bytes += before->second;
    erase(before->first, before->second);
  }
  insert(offset, bytes);
}

bool Space::remove(Range range) {
  const auto found = free_.find(range.offset);
  if (found == free_.end() || found->second != range.bytes) return false;
  erase(range.offset, range.bytes);
  size_ -= range.bytes;
  return true;
}

Range Space::take(size_t offset, size_t found, size_t bytes) {
  erase(offset, found);
  if (bytes < found) insert(offset + bytes, found - bytes);
  in_use_ += bytes;
  return {offset, bytes};
}

void Space::insert(size_t offset, size_t bytes) {
  free_.emplace(offset, bytes);
  by_bytes_.emplace(bytes, offset);
}

void Space::erase(size_t offset, size_t bytes) {
  free_.erase(offset);
  by_bytes_.erase({bytes, offset});
}

}  // namespace memopt::offload
