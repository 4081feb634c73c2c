// What several test programs share: bytes with a pattern, events that a test reaches.
#pragma once

#include <dirent.h>
#include <stdlib.h>
#include <unistd.h>

#include <random>
#include <string>
#include <vector>

#include "../../../csrc/offload/host_event.h"
#include "../../../csrc/offload/pool.h"
#include "check.h"

namespace check {

inline std::vector<std::byte> random_bytes(size_t bytes, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> made(bytes);
  for (std::byte& byte : made) byte = static_cast<std::byte>(random());
  return made;
}

inline std::shared_ptr<memopt::offload::HostEvent> not_reached() {
  return std::make_shared<memopt::offload::HostEvent>();
}

// A new folder below $TMPDIR or /tmp, removed at the end.
class Folder {
 public:
  Folder() {
    const char* base = ::getenv("TMPDIR");
    path_ = std::string(base ? base : "/tmp") + "/memopt-test-XXXXXX";
    CHECK(::mkdtemp(path_.data()) != nullptr);
  }
  ~Folder() { ::rmdir(path_.c_str()); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  const std::string& path() const { return path_; }

  bool is_empty() const {
    DIR* folder = ::opendir(path_.c_str());
    CHECK(folder != nullptr);
    int entries = 0;
    while (::readdir(folder) != nullptr) ++entries;
    ::closedir(folder);
    return entries == 2;  // . and ..
  }

 private:
  std::string path_;
};

}  // namespace check
