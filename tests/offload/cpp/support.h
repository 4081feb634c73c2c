// What several test programs share: bytes with a pattern, events that a test reaches.
#pragma once

#include <dirent.h>
#include <stdlib.h>
#include <unistd.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "../../../csrc/offload/device.h"
#include "../../../csrc/offload/host_event.h"
#include "../../../csrc/offload/pool.h"
#include "../../support/check.h"

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

// The memory of the process.
class CpuDevice : public memopt::offload::Device {
 public:
  memopt::offload::StreamId current_stream() override { return 0; }
  memopt::offload::EventPtr now() override { return memopt::offload::HostEvent::now(); }
  memopt::offload::Memory allocate(size_t bytes) override { return host_buffer(bytes); }
  void wait(const memopt::offload::EventPtr& event) override { event->wait(); }
  void read(void* host, const memopt::offload::Memory& from, size_t offset, size_t bytes) override {
    std::memcpy(host, static_cast<const std::byte*>(from.data) + offset, bytes);
  }
  void write(const memopt::offload::Memory& to, size_t offset, const void* host,
             size_t bytes) override {
    std::memcpy(static_cast<std::byte*>(to.data) + offset, host, bytes);
  }
};

}  // namespace check
