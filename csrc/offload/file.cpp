#include "file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <system_error>

#include "pool.h"

namespace memopt::offload {

FileCalls::FileCalls()
    : open([](const char* path, int flags) { return ::open(path, flags, S_IRUSR | S_IWUSR); }),
      write(::pwrite),
      read(::pread),
      allocate([](int file, off_t offset, off_t bytes) {
        return ::fallocate(file, 0, offset, bytes);
      }) {}

SpillFile::SpillFile(FileOptions options) : options_(std::move(options)), space_(kPage) {
  open();
  is_direct_ = takes_direct();
}

SpillFile::~SpillFile() {
  ::close(file_);
}

void SpillFile::open() {
  const std::string& directory = options_.directory;
  file_ = options_.calls.open(directory.c_str(), O_TMPFILE | O_EXCL | O_RDWR | O_CLOEXEC);
  if (file_ >= 0) return;
  // Some file systems have no O_TMPFILE. Where nothing helps, the reason is this one's.
  // An empty name is a mistake and not the root.
  std::string path = directory.empty() ? "" : directory + "/memopt-offload-XXXXXX";
  file_ = ::mkostemp(path.data(), O_CLOEXEC);
  if (file_ < 0) {
    throw std::system_error(
        errno, std::generic_category(),
        "memopt: no file for offloaded tensors can be made in directory '" + directory + "'");
  }
  ::unlink(path.c_str());
}

// A file system may accept the flag and refuse the writes, or want other alignment than a page's.
bool SpillFile::takes_direct() {
  const int flags = ::fcntl(file_, F_GETFL);
  if (flags < 0 || ::fcntl(file_, F_SETFL, flags | O_DIRECT) != 0) return false;
  const Slab page = pageable_slab(2 * kPage);
  auto* written = static_cast<std::byte*>(page.data);
  std::byte* read = written + kPage;
  bool works = written != nullptr;
  if (works) {
    std::memset(written, 0x5a, kPage);
    std::memset(read, 0, kPage);
    works = options_.calls.write(file_, written, kPage, 0) == ssize_t{kPage} &&
            options_.calls.read(file_, read, kPage, 0) == ssize_t{kPage} &&
            std::memcmp(written, read, kPage) == 0;
  }
  if (!works) ::fcntl(file_, F_SETFL, flags);
  return ::ftruncate(file_, 0) == 0 && works;
}

std::vector<Range> SpillFile::reserve(size_t bytes) {
  if (bytes == 0) throw std::invalid_argument("memopt: a space of 0 bytes was asked for");
  const size_t needed = space_.rounded(bytes);
  if (needed < bytes) return {};
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Range> ranges = space_.allocate(bytes);
  const size_t left = options_.most_bytes - std::min(options_.most_bytes, space_.size());
  const size_t missing = std::max(kPage, needed - std::min(needed, space_.available()));
  // A whole step, or at least room for this, or at least what all that is free lacks to it.
  size_t more = std::max(space_.rounded(options_.step), needed);
  while (ranges.empty() && more > 0) {
    if (more > left) {
      last_error_ = 0;
    } else if (grow(more)) {
      ranges = space_.allocate(bytes);
      break;
    }
    const size_t least = more > needed ? needed : missing;
    more = more > least ? std::max(space_.rounded(more / 2), least) : 0;
  }
  return ranges;
}

bool SpillFile::grow(size_t bytes) {
  const auto end = static_cast<off_t>(space_.end());
  int result = 0;
  do {
    result = options_.calls.allocate(file_, end, static_cast<off_t>(bytes));
  } while (result != 0 && errno == EINTR);
  if (result != 0 && errno == EOPNOTSUPP) {
    // The file system cannot reserve blocks: a full disk shows when it is written.
    result = ::ftruncate(file_, end + static_cast<off_t>(bytes));
  }
  if (result != 0) {
    last_error_ = errno;
    // What was reserved before the disk was full goes back; if not, it stays for the next try.
    [[maybe_unused]] const int cut = ::ftruncate(file_, end);
    return false;
  }
  space_.grow(bytes, /*wall=*/false);
  return true;
}

std::string SpillFile::no_room(size_t bytes) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::string text = "memopt: no space for an offloaded tensor of " + std::to_string(bytes) +
                           " bytes in directory '" + options_.directory + "', where " +
                           std::to_string(space_.in_use()) + " bytes are";
  if (last_error_ != 0) return text + ": " + std::strerror(last_error_);
  return text + ": the limit is " + std::to_string(options_.most_bytes) + " bytes";
}

void SpillFile::release(const std::vector<Range>& ranges) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Range& range : ranges) space_.free(range);
}

RoomUse SpillFile::use() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return {space_.in_use(), space_.high_water(), space_.size(), 0};
}

void SpillFile::raise(const char* doing, int error) const {
  throw std::system_error(error, std::generic_category(),
                          std::string("memopt: ") + doing + " the file for offloaded tensors in '" +
                              options_.directory + "'");
}

void SpillFile::write(size_t offset, const void* data, size_t bytes) {
  const auto* from = static_cast<const std::byte*>(data);
  size_t done = 0;
  while (done < bytes) {
    const ssize_t written =
        options_.calls.write(file_, from + done, bytes - done, static_cast<off_t>(offset + done));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) raise("writing", errno);
    // What follows a part of a page must begin at that page again.
    const size_t whole = static_cast<size_t>(written) / kPage * kPage;
    if (whole == 0) raise("writing", ENOSPC);
    done += whole;
  }
  if (!is_direct_) write_out(offset, bytes);
}

void SpillFile::read(size_t offset, void* data, size_t bytes) {
  auto* to = static_cast<std::byte*>(data);
  size_t done = 0;
  while (done < bytes) {
    const ssize_t got =
        options_.calls.read(file_, to + done, bytes - done, static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) raise("reading", errno);
    const size_t whole = static_cast<size_t>(got) / kPage * kPage;
    if (whole == 0) raise("reading past the end of", EIO);
    done += whole;
  }
  if (!is_direct_) drop_from_cache(offset, bytes);
}

// Only pages that are on the disk can be dropped. That a page could not be written is told once,
// here; where there is no disk below (tmpfs) nothing is.
void SpillFile::write_out(size_t offset, size_t bytes) {
  const unsigned all =
      SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
  const int result =
      ::sync_file_range(file_, static_cast<off_t>(offset), static_cast<off_t>(bytes), all);
  if (result != 0 && (errno == EIO || errno == ENOSPC || errno == EDQUOT)) raise("writing", errno);
  drop_from_cache(offset, bytes);
}

void SpillFile::drop_from_cache(size_t offset, size_t bytes) {
  ::posix_fadvise(file_, static_cast<off_t>(offset), static_cast<off_t>(bytes),
                  POSIX_FADV_DONTNEED);
}

}  // namespace memopt::offload
