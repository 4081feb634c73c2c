// One tensor's space in a file, and one copy to it or from it: the job of the I/O threads and the
// event that it ends with are the same object.
#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <vector>

#include "device.h"
#include "file.h"
#include "host_event.h"
#include "io_threads.h"

namespace memopt::offload {

// What one thread copies at a time.
struct Chunk {
  size_t in_file;
  size_t in_memory;
  size_t bytes;
};

class FileRoom : public Room {
 public:
  FileRoom(std::shared_ptr<SpillFile> file, std::vector<Range> ranges, size_t bytes,
           size_t chunk_bytes, bool checksums);
  FileRoom(const FileRoom&) = delete;
  FileRoom& operator=(const FileRoom&) = delete;
  ~FileRoom() override;

  size_t bytes() const { return bytes_; }
  const std::vector<Chunk>& chunks() const { return chunks_; }

 private:
  friend class FileCopy;
  std::shared_ptr<SpillFile> file_;
  Process process_;
  std::vector<Range> ranges_;
  size_t bytes_;
  std::vector<Chunk> chunks_;
  std::vector<uint64_t> checksums_;  // of each chunk; empty unless asked for
};

class FileCopy : public HostEvent, public IoJob {
 public:
  enum class Direction { store, load };

  // All of `memory`, which is as large as the room. `stored`: of a load, the event of the store.
  FileCopy(Direction direction, Device& device, FileRoom& room, Memory memory, EventPtr ready,
           EventPtr stored);

  size_t parts() const override { return room_.chunks().size(); }
  bool can_begin() override;
  void run(size_t part, void* buffer) noexcept override;
  void skip(size_t parts) noexcept override;

 private:
  void copy(size_t part, void* buffer);
  void note(std::string error);
  void done(size_t parts);

  const Direction direction_;
  Device& device_;
  FileRoom& room_;
  Memory memory_;  // this and the next two are let go of before the event is reached
  EventPtr ready_;
  EventPtr stored_;
  std::atomic<size_t> left_;  // parts
  std::atomic<bool> has_failed_ = false;
  std::mutex mutex_;
  std::string first_error_;
};

}  // namespace memopt::offload
