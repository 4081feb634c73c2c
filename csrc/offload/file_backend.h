// The backend that stores tensors in ranges of a file: for hosts without memory to spare, and the
// only one that helps where the device is the CPU.
//
// I/O threads copy in chunks, each through a buffer of its own. Copies that backward waits for come
// before those that forward offloads.
#pragma once

#include <string>

#include "backend.h"
#include "device.h"
#include "file.h"
#include "file_copy.h"
#include "io_threads.h"

namespace memopt::offload {

struct FileBackendOptions {
  FileOptions file;
  int threads = 4;
  size_t chunk_bytes = size_t{2} << 20;  // whole pages; what one thread reads or writes at a time
  // A checksum of each chunk, made before it is written and compared after it is read.
  bool checksums = false;
};

// In a child of fork(), whose file this also is, there is no room and copies fail.
class FileBackend : public Backend {
 public:
  // Raises std::system_error where the directory takes no file, std::invalid_argument where an
  // option is out of range.
  FileBackend(std::shared_ptr<Device> device, FileBackendOptions options);

  StreamId current_stream() override { return device_->current_stream(); }
  EventPtr now() override { return device_->now(); }
  Memory allocate(size_t bytes) override { return device_->allocate(bytes); }
  void wait(const EventPtr& event) override { device_->wait(event); }

  std::unique_ptr<Room> reserve(size_t bytes) override;
  EventPtr store(const Memory& from, Room& to, const EventPtr& ready) override;
  EventPtr load(Room& from, const Memory& to, const EventPtr& ready,
                const EventPtr& stored) override;
  void cancel(const EventPtr& event) override;
  std::string no_room(size_t bytes) override { return file_->no_room(bytes); }
  RoomUse room_use() override;

  // Whether the file's reads and writes go past the page cache.
  bool is_direct() const { return file_->is_direct(); }

 private:
  EventPtr begin(FileCopy::Direction direction, Room& room, const Memory& memory,
                 const EventPtr& ready, const EventPtr& stored);

  std::shared_ptr<Device> device_;
  const size_t chunk_bytes_;
  const bool checksums_;
  Process process_;
  std::shared_ptr<SpillFile> file_;  // held by the rooms
  IoThreads threads_;                // last: the threads use what is above
};

}  // namespace memopt::offload
