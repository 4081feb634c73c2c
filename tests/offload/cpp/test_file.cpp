// The file: that nobody else sees it, what it says of bad directories and full disks, and that it
// gives back what was written whatever the system's calls do.
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <cstring>

#include "faulty_calls.h"
#include "support.h"

using namespace memopt::offload;
using check::Folder;

namespace {

constexpr size_t kStep = 64 * kPage;

FileOptions in(const Folder& folder) {
  FileOptions options;
  options.directory = folder.path();
  options.step = kStep;
  return options;
}

// Whole pages at the beginning of a page, as the file wants them.
struct Pages {
  explicit Pages(size_t bytes, unsigned seed = 0) : slab(pageable_slab(bytes)), bytes(bytes) {
    std::memcpy(slab.data, check::random_bytes(bytes, seed).data(), bytes);
  }
  bool operator==(const Pages& other) const {
    return bytes == other.bytes && std::memcmp(slab.data, other.slab.data, bytes) == 0;
  }
  Slab slab;
  size_t bytes;
};

void write_and_read(SpillFile& file, unsigned times = 20) {
  std::vector<std::pair<Range, Pages>> written;
  for (unsigned seed = 1; seed <= times; ++seed) {
    const auto ranges = file.reserve(seed * 3 * kPage - 1);
    CHECK(ranges.size() == 1);
    written.emplace_back(ranges[0], Pages(ranges[0].bytes, seed));
    file.write(ranges[0].offset, written.back().second.slab.data, ranges[0].bytes);
  }
  for (const auto& [range, pages] : written) {
    Pages read(range.bytes);
    file.read(range.offset, read.slab.data, range.bytes);
    CHECK(read == pages);
  }
}

}  // namespace

TEST(gives_back_what_was_written) {
  const Folder folder;
  SpillFile file(in(folder));
  CHECK(folder.is_empty());
  std::printf("  direct: %d\n", file.is_direct());
  write_and_read(file);
  CHECK(folder.is_empty());
}

TEST(without_direct_io) {
  const Folder folder;
  FileOptions options = in(folder);
  check::without_direct(options.calls);
  SpillFile file(options);
  CHECK(!file.is_direct());
  write_and_read(file);
}

TEST(without_files_that_have_no_name) {
  const Folder folder;
  FileOptions options = in(folder);
  check::without_tmpfile(options.calls);
  SpillFile file(options);
  CHECK(folder.is_empty());
  write_and_read(file);
}

TEST(calls_that_move_a_part_or_are_interrupted) {
  for (const bool direct : {true, false}) {
    const Folder folder;
    FileOptions options = in(folder);
    if (!direct) check::without_direct(options.calls);
    check::interrupted(options.calls);
    SpillFile file(options);
    write_and_read(file);
  }
}

TEST(bad_directories_are_named) {
  const Folder folder;
  FileOptions options = in(folder);
  options.directory += "/nowhere";
  CHECK_RAISES("directory '" + options.directory + "': No such file or directory",
               SpillFile{options});
  options.directory = "/dev/null";
  CHECK_RAISES("directory '/dev/null': Not a directory", SpillFile{options});
  options.directory = "/proc/self";
  CHECK_RAISES("directory '/proc/self'", SpillFile{options});
  options.directory = "";
  CHECK_RAISES("directory ''", SpillFile{options});
  if (::geteuid() != 0) {  // root may write anywhere
    ::chmod(folder.path().c_str(), 0555);
    options.directory = folder.path();
    CHECK_RAISES("Permission denied", SpillFile{options});
  }
}

TEST(grows_in_steps) {
  const Folder folder;
  SpillFile file(in(folder));
  CHECK(file.use().allocated == 0);
  const auto a = file.reserve(1);
  CHECK(file.use().allocated == kStep && file.use().in_use == kPage);
  const auto b = file.reserve(kStep);
  CHECK(file.use().allocated == 2 * kStep);
  const auto c = file.reserve(5 * kStep);
  CHECK(c.size() == 1 && file.use().allocated == 7 * kStep);
  file.release(a);
  file.release(b);
  file.release(c);
  CHECK(file.use().in_use == 0 && file.use().high_water == kPage + 6 * kStep);
  for (int k = 0; k < 3; ++k) file.release(file.reserve(7 * kStep));
  CHECK(file.use().allocated == 7 * kStep);
}

TEST(a_full_disk_is_known_when_room_is_reserved) {
  const Folder folder;
  FileOptions options = in(folder);
  const size_t disk = 2 * kStep + 7 * kPage;
  check::small_disk(options.calls, disk);
  SpillFile file(options);
  CHECK(file.reserve(disk + 1).empty());
  CHECK(file.no_room(disk + 1).find(folder.path()) != std::string::npos);
  CHECK(file.no_room(disk + 1).find("No space left on device") != std::string::npos);
  // All of it is used, in whatever steps, and all that is reserved can be written.
  const auto a = file.reserve(2 * kStep - kPage), b = file.reserve(8 * kPage);
  CHECK(!a.empty() && !b.empty() && file.use().in_use == disk);
  CHECK(file.reserve(1).empty());
  file.release(a);
  write_and_read(file, 8);
}

TEST(the_limit_is_hard) {
  const Folder folder;
  FileOptions options = in(folder);
  options.most_bytes = kStep + 10 * kPage;
  SpillFile file(options);
  const auto a = file.reserve(kStep), b = file.reserve(10 * kPage);
  CHECK(!a.empty() && !b.empty() && file.reserve(1).empty());
  CHECK(file.use().allocated == options.most_bytes);
  CHECK(file.no_room(1).find("the limit is 303104 bytes") != std::string::npos);
  CHECK(file.reserve(SIZE_MAX).empty() && file.reserve(SIZE_MAX / 2).empty());
  CHECK_RAISES("0 bytes", file.reserve(0));
}

TEST(scattered_room_is_used_where_the_disk_is_full) {
  const Folder folder;
  FileOptions options = in(folder);
  check::small_disk(options.calls, 16 * kPage);
  SpillFile file(options);
  std::vector<std::vector<Range>> pages;
  for (int k = 0; k < 16; ++k) pages.push_back(file.reserve(1));
  for (int k = 0; k < 16; k += 2) file.release(pages[k]);
  CHECK(file.reserve(8 * kPage).size() == 8);
  CHECK(file.reserve(kPage).empty());
}

TEST(file_systems_that_cannot_reserve) {
  const Folder folder;
  FileOptions options = in(folder);
  options.calls.allocate = [](int, off_t, off_t) {
    return static_cast<int>(check::error(EOPNOTSUPP));
  };
  SpillFile file(options);
  write_and_read(file);
}

TEST(an_interrupted_reservation_is_tried_again) {
  const Folder folder;
  FileOptions options = in(folder);
  int calls = 0;
  options.calls.allocate = [&](int file, off_t offset, off_t bytes) {
    return ++calls < 5 ? static_cast<int>(check::error(EINTR))
                       : ::fallocate(file, 0, offset, bytes);
  };
  SpillFile file(options);
  CHECK(!file.reserve(1).empty() && calls == 5);
  CHECK(file.use().allocated == kStep);  // and nothing less
}

TEST(errors_of_reads_and_writes_are_told) {
  const Folder folder;
  const Pages pages(kStep);
  const auto good = std::make_shared<std::atomic<int64_t>>(int64_t{1} << 40);
  FileOptions options = in(folder);
  options.calls.write = check::fails_after(options.calls.write, good, ENOSPC);
  options.calls.read = check::fails_after(options.calls.read, good, EIO);
  SpillFile file(options);
  const size_t offset = file.reserve(kStep)[0].offset;
  *good = 0;
  CHECK_RAISES(
      "writing the file for offloaded tensors in '" + folder.path() + "': No space left on device",
      file.write(offset, pages.slab.data, kStep));
  CHECK_RAISES(
      "reading the file for offloaded tensors in '" + folder.path() + "': Input/output error",
      file.read(offset, pages.slab.data, kStep));
}

TEST(a_call_that_moves_nothing_is_an_error) {
  const Folder folder;
  FileOptions options = in(folder);
  options.calls.write = [](int, const void*, size_t, off_t) { return ssize_t{0}; };
  SpillFile file(options);
  const size_t offset = file.reserve(kStep)[0].offset;
  const Pages pages(kStep);
  CHECK_RAISES("No space left", file.write(offset, pages.slab.data, kStep));
  CHECK_RAISES("past the end", file.read(file.use().allocated, pages.slab.data, kStep));
}

// A limit of the system instead of a replaced call.
TEST(a_file_size_limit) {
  const Folder folder;
  const pid_t child = ::fork();
  CHECK(child >= 0);
  if (child == 0) {
    ::signal(SIGXFSZ, SIG_IGN);  // as Python does
    const rlimit limit{10 * kPage, 10 * kPage};
    CHECK(::setrlimit(RLIMIT_FSIZE, &limit) == 0);
    SpillFile file(in(folder));
    CHECK(file.reserve(11 * kPage).empty());
    CHECK(file.no_room(11 * kPage).find("File too large") != std::string::npos);
    CHECK(!file.reserve(6 * kPage).empty() && !file.reserve(4 * kPage).empty());
    CHECK(file.reserve(1).empty());
    std::_Exit(0);
  }
  int status = 0;
  CHECK(::waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

// In memory: there is nothing below that pages could be written to.
TEST(on_tmpfs) {
  FileOptions options;
  options.directory = "/dev/shm";
  options.step = kStep;
  if (::access("/dev/shm", W_OK) != 0) return;
  SpillFile file(options);
  std::printf("  direct: %d\n", file.is_direct());
  write_and_read(file);
}
