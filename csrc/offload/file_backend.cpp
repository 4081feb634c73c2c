#include "file_backend.h"

#include <stdexcept>

#include "pool.h"

namespace memopt::offload {

namespace {

FileBackendOptions checked(FileBackendOptions options) {
  if (options.chunk_bytes == 0 || options.chunk_bytes % kPage != 0) {
    throw std::invalid_argument("memopt: chunk_bytes must be a multiple of " +
                                std::to_string(kPage) + ", got " +
                                std::to_string(options.chunk_bytes));
  }
  return options;
}

EventPtr failed_in_child() {
  auto event = std::make_shared<HostEvent>();
  event->fail(
      "memopt: a tensor that was offloaded to a file cannot be copied in a child of fork(): the "
      "file is the parent process's");
  return event;
}

}  // namespace

FileBackend::FileBackend(std::shared_ptr<Device> device, FileBackendOptions options)
    : device_(std::move(device)),
      chunk_bytes_(checked(options).chunk_bytes),
      checksums_(options.checksums),
      file_(std::make_shared<SpillFile>(std::move(options.file))),
      threads_(options.threads, chunk_bytes_,
               [this](size_t bytes) { return device_->host_buffer(bytes); }) {}

std::unique_ptr<Room> FileBackend::reserve(size_t bytes) {
  if (!process_.is_current()) return nullptr;
  std::vector<Range> ranges = file_->reserve(bytes);
  if (ranges.empty()) return nullptr;
  return std::make_unique<FileRoom>(file_, std::move(ranges), bytes, chunk_bytes_, checksums_);
}

EventPtr FileBackend::store(const Memory& from, Room& to, const EventPtr& ready) {
  return begin(FileCopy::Direction::store, to, from, ready, nullptr);
}

EventPtr FileBackend::load(Room& from, const Memory& to, const EventPtr& ready,
                           const EventPtr& stored) {
  return begin(FileCopy::Direction::load, from, to, ready, stored);
}

EventPtr FileBackend::begin(FileCopy::Direction direction, Room& any_room, const Memory& memory,
                            const EventPtr& ready, const EventPtr& stored) {
  if (!process_.is_current()) return failed_in_child();
  auto& room = static_cast<FileRoom&>(any_room);
  if (memory.bytes != room.bytes()) {
    throw std::invalid_argument("memopt: a space of " + std::to_string(room.bytes()) +
                                " bytes was to be copied from or to " +
                                std::to_string(memory.bytes));
  }
  auto copy = std::make_shared<FileCopy>(direction, *device_, room, memory, ready, stored);
  threads_.submit(copy, /*urgent=*/direction == FileCopy::Direction::load);
  return copy;
}

void FileBackend::cancel(const EventPtr& event) {
  if (const auto* copy = dynamic_cast<const FileCopy*>(event.get())) threads_.withdraw(*copy);
}

RoomUse FileBackend::room_use() {
  return process_.is_current() ? file_->use() : RoomUse{};
}

}  // namespace memopt::offload
