// A tensor that was given to a file backend, and whether it comes back.
#pragma once

#include <cstring>

#include "../../../csrc/offload/file_backend.h"
#include "support.h"

namespace check {

using namespace memopt::offload;

inline constexpr size_t kChunk = 16 * kPage;

inline FileBackendOptions in(const Folder& folder, bool checksums = true) {
  FileBackendOptions options;
  options.file.directory = folder.path();
  options.file.step = 64 * kPage;
  options.chunk_bytes = kChunk;
  options.checksums = checksums;
  return options;
}

inline Memory memory_of(const std::vector<std::byte>& bytes) {
  Memory memory = CpuDevice().allocate(bytes.size());
  std::memcpy(memory.data, bytes.data(), bytes.size());
  return memory;
}

inline Memory poisoned(size_t bytes) {
  Memory memory = CpuDevice().allocate(bytes);
  std::memset(memory.data, 0xee, bytes);
  return memory;
}

inline bool equal(const Memory& memory, const std::vector<std::byte>& bytes) {
  return std::memcmp(memory.data, bytes.data(), bytes.size()) == 0;
}

inline std::shared_ptr<CpuDevice> cpu() {
  return std::make_shared<CpuDevice>();
}

struct Stored {
  std::vector<std::byte> bytes;
  Memory memory;
  std::unique_ptr<Room> room;
  EventPtr event;
};

inline Stored store(FileBackend& backend, size_t bytes, unsigned seed = 1,
                    EventPtr ready = HostEvent::now()) {
  Stored made{check::random_bytes(bytes, seed), {}, backend.reserve(bytes), nullptr};
  CHECK(made.room != nullptr);
  made.memory = memory_of(made.bytes);
  made.event = backend.store(made.memory, *made.room, ready);
  return made;
}

inline EventPtr load(FileBackend& backend, const Stored& stored, const Memory& to) {
  return backend.load(*stored.room, to, HostEvent::now(), stored.event);
}

inline void check_comes_back(FileBackend& backend, Stored& stored) {
  Memory to = poisoned(stored.bytes.size());
  const EventPtr loaded = load(backend, stored, to);
  loaded->wait();
  CHECK(!loaded->failed());
  CHECK(equal(to, stored.bytes));
}

}  // namespace check
