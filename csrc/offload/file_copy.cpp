#include "file_copy.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <stdexcept>

#include "checksum.h"
#include "pool.h"

namespace memopt::offload {

FileRoom::FileRoom(std::shared_ptr<SpillFile> file, std::vector<Range> ranges, size_t bytes,
                   size_t chunk_bytes, bool checksums)
    : file_(std::move(file)), ranges_(std::move(ranges)), bytes_(bytes) {
  size_t in_memory = 0;
  for (const Range& range : ranges_) {
    for (size_t begun = 0; begun < range.bytes && in_memory < bytes; begun += chunk_bytes) {
      const size_t left = std::min(range.bytes - begun, bytes - in_memory);
      chunks_.push_back({range.offset + begun, in_memory, std::min(chunk_bytes, left)});
      in_memory += chunks_.back().bytes;
    }
  }
  if (checksums) checksums_.resize(chunks_.size());
}

FileRoom::~FileRoom() {
  if (process_.is_current()) file_->release(ranges_);
}

FileCopy::FileCopy(Direction direction, Device& device, FileRoom& room, Memory memory,
                   EventPtr ready, EventPtr stored)
    : direction_(direction),
      device_(device),
      room_(room),
      memory_(std::move(memory)),
      ready_(std::move(ready)),
      stored_(std::move(stored)),
      left_(room.chunks().size()) {}

bool FileCopy::can_begin() {
  if (!ready_->reached() || (stored_ && !stored_->reached())) return false;
  begin();
  return true;
}

void FileCopy::run(size_t part, void* buffer) noexcept {
  try {
    if (!has_failed_) copy(part, buffer);
  } catch (const std::exception& error) {
    note(error.what());
  } catch (...) {
    note("memopt: the copy of an offloaded tensor failed");
  }
  done(1);
}

void FileCopy::skip(size_t parts) noexcept {
  if (parts == 0) return;
  note("memopt: the copy of an offloaded tensor was cancelled");
  done(parts);
}

void FileCopy::copy(size_t part, void* buffer) {
  const Chunk& chunk = room_.chunks()[part];
  SpillFile& file = *room_.file_;
  const size_t whole_pages = (chunk.bytes + kPage - 1) / kPage * kPage;
  if (direction_ == Direction::store) {
    device_.read(buffer, memory_, chunk.in_memory, chunk.bytes);
    // What lies behind is another tensor's old bytes.
    std::memset(static_cast<std::byte*>(buffer) + chunk.bytes, 0, whole_pages - chunk.bytes);
    if (!room_.checksums_.empty()) room_.checksums_[part] = checksum(buffer, chunk.bytes);
    file.write(chunk.in_file, buffer, whole_pages);
    return;
  }
  if (stored_ && stored_->failed()) throw std::runtime_error(stored_->error());
  file.read(chunk.in_file, buffer, whole_pages);
  if (!room_.checksums_.empty() && room_.checksums_[part] != checksum(buffer, chunk.bytes)) {
    throw std::runtime_error(
        "memopt: an offloaded tensor came back from the file with other bytes than were written");
  }
  device_.write(memory_, chunk.in_memory, buffer, chunk.bytes);
}

void FileCopy::note(std::string error) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (first_error_.empty()) first_error_ = std::move(error);
  has_failed_ = true;
}

void FileCopy::done(size_t parts) {
  if (left_.fetch_sub(parts) != parts) return;
  ready_.reset();
  stored_.reset();
  memory_ = {};
  if (has_failed_) {
    fail(std::move(first_error_));
  } else {
    reach();
  }
}

}  // namespace memopt::offload
