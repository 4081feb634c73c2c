// Pinned host memory. As PyTorch's own allocator does, it keeps a freed block from reuse until the
// copies that were given it are done; in strict mode it does not, so that code which must hold its
// buffers itself is seen to do so. What is freed is poisoned.
#include <ATen/core/CachingHostAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "control.h"
#include "moment.h"

namespace sim {
namespace {

constexpr size_t kAlignment = 4096;
constexpr int kPoison = 0xff;

struct Block {
  char* address;
  size_t bytes;
  std::vector<MomentPtr> uses;
};

struct Pinned {
  std::mutex mutex;
  std::map<const char*, Block*> in_use;  // by address
  std::map<size_t, std::vector<Block*>> free;
  std::vector<Block*> waiting;
  PinnedCounts counts;
  bool works = true;
  bool strict = false;
};

Pinned& pinned() {
  static auto* it = new Pinned;
  return *it;
}

Block* find(const void* pointer) {
  const auto* at = static_cast<const char*>(pointer);
  auto after = pinned().in_use.upper_bound(at);
  if (after == pinned().in_use.begin()) return nullptr;
  Block* block = std::prev(after)->second;
  return at < block->address + block->bytes ? block : nullptr;
}

void reuse(Block* block) {
  block->uses.clear();
  std::memset(block->address, kPoison, block->bytes);
  pinned().free[block->bytes].push_back(block);
}

void free_what_is_done() {
  auto& waiting = pinned().waiting;
  const auto is_done = [](Block* block) {
    if (!std::all_of(block->uses.begin(), block->uses.end(), is_reached)) return false;
    reuse(block);
    return true;
  };
  waiting.erase(std::remove_if(waiting.begin(), waiting.end(), is_done), waiting.end());
}

void free_block(void* pointer) {
  if (pointer == nullptr) return;
  const std::lock_guard<std::mutex> lock(pinned().mutex);
  Block* block = find(pointer);
  pinned().in_use.erase(block->address);
  pinned().counts.allocated -= static_cast<int64_t>(block->bytes);
  if (pinned().strict) return reuse(block);
  pinned().waiting.push_back(block);
}

struct Allocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &free_block, c10::Device(c10::kCPU)};
    bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    const std::lock_guard<std::mutex> lock(pinned().mutex);
    TORCH_CHECK(pinned().works, "sim: pinning host memory fails, as the test asked");
    free_what_is_done();
    auto& blocks = pinned().free[bytes];
    if (blocks.empty()) {
      auto* address = static_cast<char*>(std::aligned_alloc(kAlignment, bytes));
      std::memset(address, kPoison, bytes);
      blocks.push_back(new Block{address, bytes, {}});
      ++pinned().counts.reservations;
    }
    Block* block = blocks.back();
    blocks.pop_back();
    pinned().in_use.emplace(block->address, block);
    pinned().counts.allocated += static_cast<int64_t>(bytes);
    return {block->address, block->address, &free_block, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  bool record_event(void* pointer, void*, c10::Stream stream) override {
    record_pinned_use(pointer, stream);
    return true;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override {
    at::HostStats stats;
    stats.active_bytes.current = pinned_counts().allocated;
    stats.num_host_alloc = pinned_counts().reservations;
    return stats;
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

const bool registered = [] {
  at::setHostAllocator(kType, new Allocator);
  return true;
}();

}  // namespace

bool is_pinned(const void* pointer) {
  const std::lock_guard<std::mutex> lock(pinned().mutex);
  return find(pointer) != nullptr;
}

void record_pinned_use(const void* pointer, const c10::Stream& stream) {
  MomentPtr moment = record(stream);
  const std::lock_guard<std::mutex> lock(pinned().mutex);
  Block* block = find(pointer);
  if (block == nullptr) return;
  auto& uses = block->uses;
  uses.erase(std::remove_if(uses.begin(), uses.end(), is_reached), uses.end());
  uses.push_back(std::move(moment));
}

PinnedCounts pinned_counts() {
  const std::lock_guard<std::mutex> lock(pinned().mutex);
  return pinned().counts;
}

void set_pinning_works(bool works) {
  const std::lock_guard<std::mutex> lock(pinned().mutex);
  pinned().works = works;
}

void set_pinned_strict(bool strict) {
  const std::lock_guard<std::mutex> lock(pinned().mutex);
  pinned().strict = strict;
}

}  // namespace sim
