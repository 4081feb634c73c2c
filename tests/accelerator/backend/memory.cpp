// The device's memory: a file in memory, mapped twice. Tensors carry addresses of a mapping that
// allows no access; the threads of streams use another one.
//
// The allocator is like CUDA's: a freed block serves the next allocation of its size on its stream,
// at once, with no wait, since that stream's work is done in order. Its old bytes go in that order
// as well: what reads them later, or unordered on another stream, finds 0xff, which is NaN, -1 and
// out of range.
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "control.h"
#include "moment.h"

namespace sim {
namespace {

constexpr size_t kReach = size_t{1} << 36;  // addresses of a device; pages exist once written
constexpr size_t kRound = 512;
constexpr int kPoison = 0xff;

struct Block {
  char* address;
  size_t bytes;
  c10::Stream stream;
  std::vector<c10::Stream> used_on;  // by record_stream
};

struct Waiting {
  Block* block;
  std::vector<MomentPtr> moments;
};

class Memory {
 public:
  explicit Memory(c10::DeviceIndex device) : device_(device) {
    const int file = memfd_create("sim", 0);
    TORCH_CHECK(file >= 0 && ftruncate(file, kReach) == 0, "sim: no memory file");
    base_ = map(file, PROT_NONE);
    hidden_ = map(file, PROT_READ | PROT_WRITE);
    close(file);
  }

  void* allocate(size_t bytes) {
    bytes = (bytes + kRound - 1) / kRound * kRound;
    const auto stream = current_stream(device_);
    const std::lock_guard<std::mutex> lock(mutex_);
    free_what_is_done();
    TORCH_CHECK_WITH(OutOfMemoryError, counts_.allocated + static_cast<int64_t>(bytes) <= capacity_,
                     "sim: out of memory: ", bytes, " bytes wanted, ", counts_.allocated, " of ",
                     capacity_, " in use");
    Block* block = nullptr;
    auto& blocks = free_[{stream.id(), bytes}];
    if (!blocks.empty()) {
      block = blocks.back();
      blocks.pop_back();
    } else {
      TORCH_CHECK(used_ + bytes <= kReach, "sim: out of addresses");
      block = new Block{base_ + used_, bytes, stream, {}};
      used_ += bytes;
      std::memset(to_hidden(block->address), kPoison, bytes);
      ++counts_.reservations;
    }
    in_use_.emplace(block->address, block);
    counts_.allocated += static_cast<int64_t>(bytes);
    counts_.peak = std::max(counts_.peak, counts_.allocated);
    return block->address;
  }

  void free(void* address) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = in_use_.find(address);
    Block* block = found->second;
    in_use_.erase(found);
    counts_.allocated -= static_cast<int64_t>(block->bytes);
    if (block->used_on.empty()) return reuse(block);
    Waiting waiting{block, {}};
    for (const auto& stream : block->used_on) waiting.moments.push_back(sim::record(stream));
    block->used_on.clear();
    waiting_.push_back(std::move(waiting));
  }

  void record_use(const void* pointer, const c10::Stream& stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++counts_.recorded;
    const auto found = in_use_.find(const_cast<void*>(pointer));
    if (found == in_use_.end() || found->second->stream == stream) return;
    found->second->used_on.push_back(stream);
  }

  bool holds(const void* pointer) const { return pointer >= base_ && pointer < base_ + kReach; }
  char* to_hidden(const void* pointer) const {
    return hidden_ + (static_cast<const char*>(pointer) - base_);
  }

  MemoryCounts counts() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return counts_;
  }
  size_t reserved() const { return used_; }
  void reset_peak() {
    const std::lock_guard<std::mutex> lock(mutex_);
    counts_.peak = counts_.allocated;
  }
  void set_capacity(int64_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    capacity_ = bytes;
  }

 private:
  static char* map(int file, int protection) {
    void* at = mmap(nullptr, kReach, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
    TORCH_CHECK(at != MAP_FAILED, "sim: no addresses");
    return static_cast<char*>(at);
  }

  void reuse(Block* block) {
    char* bytes = to_hidden(block->address);
    const size_t count = block->bytes;
    enqueue_quietly(block->stream, {Kind::kPoison, "poison",
                                    [bytes, count] { std::memset(bytes, kPoison, count); }});
    free_[{block->stream.id(), count}].push_back(block);
  }

  void free_what_is_done() {
    const auto is_done = [this](const Waiting& waiting) {
      if (!std::all_of(waiting.moments.begin(), waiting.moments.end(), is_reached)) return false;
      reuse(waiting.block);
      return true;
    };
    waiting_.erase(std::remove_if(waiting_.begin(), waiting_.end(), is_done), waiting_.end());
  }

  const c10::DeviceIndex device_;
  char* base_;
  char* hidden_;
  std::mutex mutex_;
  size_t used_ = 0;
  int64_t capacity_ = kReach;
  MemoryCounts counts_;
  std::unordered_map<void*, Block*> in_use_;
  std::map<std::pair<c10::StreamId, size_t>, std::vector<Block*>> free_;
  std::vector<Waiting> waiting_;
};

Memory& memory(c10::DeviceIndex device) {
  static auto* all = new std::array<Memory, kDevices>{Memory(0), Memory(1)};
  return all->at(static_cast<size_t>(device));
}

Memory& memory_of(const void* pointer) {
  for (c10::DeviceIndex device = 0; device < kDevices; ++device) {
    if (memory(device).holds(pointer)) return memory(device);
  }
  TORCH_CHECK(false, "sim: ", pointer, " is not an address of the device");
}

void free_block(void* pointer) {
  if (pointer != nullptr) memory_of(pointer).free(pointer);
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const auto device = current_device();
    void* data = bytes == 0 ? nullptr : memory(device).allocate(bytes);
    return {data, data, &free_block, c10::Device(kType, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    enqueue(current_stream(-1), {Kind::kDeviceToDevice, "copy_data",
                                 [=] { std::memcpy(hidden(to), hidden(from), bytes); }});
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    record_use(data.get(), stream);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const MemoryCounts counts = memory_counts(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = counts.allocated;
    stats.allocated_bytes[0].peak = counts.peak;
    stats.reserved_bytes[0].current = static_cast<int64_t>(memory(device).reserved());
    stats.reserved_bytes[0].peak = stats.reserved_bytes[0].current;
    stats.num_device_alloc = counts.reservations;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { reset_peak(device); }
};

const bool registered = [] {
  c10::SetAllocator(kType, new Allocator);
  return true;
}();

}  // namespace

char* hidden(const void* pointer) {
  return memory_of(pointer).to_hidden(pointer);
}

void record_use(const void* pointer, const c10::Stream& stream) {
  if (pointer != nullptr) memory_of(pointer).record_use(pointer, stream);
}

MemoryCounts memory_counts(c10::DeviceIndex device) {
  return memory(device).counts();
}
void reset_peak(c10::DeviceIndex device) {
  memory(device).reset_peak();
}
void set_capacity(c10::DeviceIndex device, int64_t bytes) {
  memory(device).set_capacity(bytes);
}

}  // namespace sim
