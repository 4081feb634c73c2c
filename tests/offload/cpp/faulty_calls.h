// The file's system calls with faults: file systems that refuse, disks that are full or broken.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <memory>

#include "../../../csrc/offload/file.h"

namespace check {

inline ssize_t error(int number) {
  errno = number;
  return -1;
}

// As where O_TMPFILE is not supported.
inline void without_tmpfile(memopt::offload::FileCalls& calls) {
  calls.open = [](const char*, int) { return static_cast<int>(error(EOPNOTSUPP)); };
}

// As where O_DIRECT is accepted and its writes are refused.
inline void without_direct(memopt::offload::FileCalls& calls) {
  calls.write = [](int file, const void* data, size_t bytes, off_t offset) {
    if (::fcntl(file, F_GETFL) & O_DIRECT) return error(EINVAL);
    return ::pwrite(file, data, bytes, offset);
  };
}

// After `good` bytes from now on each call fails with `number`.
template <class Call>
auto fails_after(Call call, std::shared_ptr<std::atomic<int64_t>> good, int number) {
  return [=](int file, auto* data, size_t bytes, off_t offset) -> ssize_t {
    if ((*good -= static_cast<int64_t>(bytes)) < 0) return error(number);
    return call(file, data, bytes, offset);
  };
}

// Every other call is interrupted by a signal, the others move only a part, of whole pages or not.
template <class Call>
auto interrupted(Call call) {
  return [=, count = std::make_shared<std::atomic<int>>(0)](int file, auto* data, size_t bytes,
                                                            off_t offset) -> ssize_t {
    if ((*count)++ % 2) return error(EINTR);
    const ssize_t moved = call(file, data, bytes, offset);
    return moved > 8192 ? moved / 2 + 100 : moved;
  };
}

inline void interrupted(memopt::offload::FileCalls& calls) {
  calls.write = interrupted(calls.write);
  calls.read = interrupted(calls.read);
}

// A disk of so many bytes, as fallocate sees it.
inline void small_disk(memopt::offload::FileCalls& calls, off_t bytes) {
  calls.allocate = [bytes, real = calls.allocate](int file, off_t offset, off_t more) {
    return offset + more > bytes ? static_cast<int>(error(ENOSPC)) : real(file, offset, more);
  };
}

}  // namespace check
