// A file without a name, which holds offloaded memory. It is gone with the process that made
// it, however that ends.
//
// Blocks of the disk are reserved before they are written, in large steps: that a disk is full
// shows when space is asked for, not when a tensor is on its way. Where the file system takes it
// (O_DIRECT) reads and writes go past the system's page cache, which would keep in memory what is
// to leave it; elsewhere pages are written out and dropped at once.
#pragma once

#include <fcntl.h>
#include <sys/types.h>

#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "backend.h"
#include "space.h"

namespace memopt::offload {

// The system's functions, which tests replace: they return -1 and set errno.
struct FileCalls {
  std::function<int(const char* path, int flags)> open;
  std::function<ssize_t(int file, const void* data, size_t bytes, off_t offset)> write;
  std::function<ssize_t(int file, void* data, size_t bytes, off_t offset)> read;
  std::function<int(int file, off_t offset, off_t bytes)> allocate;  // fallocate

  FileCalls();  // those of the system
};

struct FileOptions {
  std::string directory;
  size_t most_bytes = SIZE_MAX;
  size_t step = size_t{256} << 20;  // what the file grows by, where the disk has that much
  FileCalls calls;
};

// Thread-safe.
class SpillFile {
 public:
  // Raises std::system_error, whose text names the directory, where no file can be made in it.
  explicit SpillFile(FileOptions options);
  ~SpillFile();
  SpillFile(const SpillFile&) = delete;
  SpillFile& operator=(const SpillFile&) = delete;

  // Ranges of `bytes` > 0 rounded up to pages; empty where neither the disk nor `most_bytes` has
  // room for them.
  std::vector<Range> reserve(size_t bytes);
  void release(const std::vector<Range>& ranges);

  // Why reserve() gave none last.
  std::string no_room(size_t bytes) const;

  // Whole pages, within one range. `data` begins at a page. Raise std::system_error.
  void write(size_t offset, const void* data, size_t bytes);
  void read(size_t offset, void* data, size_t bytes);

  bool is_direct() const { return is_direct_; }

  RoomUse use() const;

 private:
  void open();
  bool takes_direct();
  bool grow(size_t bytes);
  [[noreturn]] void raise(const char* doing, int error) const;
  void write_out(size_t offset, size_t bytes);
  void drop_from_cache(size_t offset, size_t bytes);

  const FileOptions options_;
  int file_ = -1;
  bool is_direct_ = false;
  mutable std::mutex mutex_;
  Space space_;
  int last_error_ = 0;  // of growing; 0 where `most_bytes` was in the way
};

}  // namespace memopt::offload
