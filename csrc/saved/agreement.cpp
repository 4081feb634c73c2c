#include "agreement.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <bit>

#include "slab.h"

namespace memopt::saved {

namespace {

constexpr uint64_t kOdd = 0x9E3779B97F4A7C15;  // 2^64 over the golden ratio, as in Philox
constexpr int64_t kChunk = 1 << 20;            // words; bounds what a checksum allocates

// A word that no tensor which is taken has but by chance.
constexpr uint64_t kNotTaken = 0;

uint64_t mix(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * kOdd;
  return hash ^ (hash >> 29);
}

uint64_t word_of(const at::Tensor& tensor) {
  uint64_t hash = mix(1, static_cast<uint64_t>(tensor.scalar_type()));
  hash = mix(hash, static_cast<uint64_t>(tensor.device().type()));
  hash = mix(hash, static_cast<uint64_t>(tensor.dim()));
  for (const auto size : tensor.sizes()) hash = mix(hash, static_cast<uint64_t>(size));
  for (const auto stride : tensor.strides()) hash = mix(hash, static_cast<uint64_t>(stride));
  return mix(hash, static_cast<uint64_t>(checksum(tensor)));
}

at::Tensor on_host(std::vector<int64_t>& words) {
  return at::from_blob(words.data(), {static_cast<int64_t>(words.size())},
                       at::TensorOptions().dtype(at::kLong));
}

}  // namespace

bool Verdict::is_whole(size_t number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return number >= whole_.size() || whole_[number];
}

bool Verdict::keep_whole(size_t number) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (number >= whole_.size() || whole_[number]) return false;
  whole_[number] = true;
  return true;
}

bool Verdict::is_due() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::has_single_bit(++calls_);
}

std::shared_ptr<Verdict> Agreement::find(const std::string& structure) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = verdicts_.find(structure);
  return found == verdicts_.end() ? nullptr : found->second;
}

void Agreement::add(const std::string& structure, std::shared_ptr<Verdict> verdict) {
  const std::lock_guard<std::mutex> lock(mutex_);
  verdicts_.insert_or_assign(structure, std::move(verdict));
}

int64_t checksum(const at::Tensor& tensor) {
  const auto bytes = bytes_of_range(tensor);
  uint64_t low = 0;
  uint64_t high = 0;
  for (int64_t begin = 0; begin < bytes.numel(); begin += 8 * kChunk) {
    const int64_t size = std::min(bytes.numel() - begin, 8 * kChunk);
    const int64_t count = (size + 7) / 8;
    auto padded = at::zeros({8 * count}, bytes.options());  // and aligned
    padded.narrow(0, 0, size).copy_(bytes.narrow(0, begin, size));
    const auto words = padded.view(at::kLong);
    const int64_t first = begin / 8;
    const auto weights = at::arange(2 * first + 1, 2 * (first + count) + 1, 2, words.options());
    const auto sum = [&](const at::Tensor& of) {
      return static_cast<uint64_t>(of.mul(weights).sum().item().toLong());
    };
    low += sum(words);
    high += sum(words.__rshift__(32));
  }
  return static_cast<int64_t>(low + kOdd * high);
}

std::vector<bool> compare(Ranks& ranks, const std::vector<at::Tensor>& taken, int64_t place) {
  constexpr size_t kFirst = 2;  // where the tensors' words begin
  std::vector<int64_t> mine(kWords);
  mine[0] = static_cast<int64_t>(taken.size());
  mine[1] = place;
  const auto word_at = [](size_t number) { return std::min<size_t>(kFirst + number, kWords - 1); };
  for (size_t number = 0; number < taken.size(); ++number) {
    auto& word = mine[word_at(number)];
    const auto& tensor = taken[number];
    word = static_cast<int64_t>(
        mix(static_cast<uint64_t>(word), tensor.defined() ? word_of(tensor) : kNotTaken));
  }
  auto part = on_host(mine).to(ranks.device_of_messages(), at::kLong, false, /*copy=*/true);
  std::vector<int64_t> all(ranks.count() * kWords);
  on_host(all).copy_(ranks.gather(part.view(at::kByte))->wait().view(at::kLong));

  std::vector<bool> whole(taken.size(), false);
  for (int64_t rank = 0; rank < ranks.count(); ++rank) {
    const auto* theirs = &all[rank * kWords];
    TORCH_CHECK(theirs[1] == mine[1],
                "checkpoint: with partition=, all ranks of the group must call the same regions in "
                "the same order, got rank ",
                rank, " at region ", theirs[1], " and rank ", ranks.rank(), " at region ", mine[1],
                " since their last backward");
    const bool is_other_number = theirs[0] != mine[0];
    for (size_t number = 0; number < taken.size(); ++number) {
      const size_t at = word_at(number);
      if (is_other_number || theirs[at] != mine[at]) whole[number] = true;
    }
  }
  return whole;
}

}  // namespace memopt::saved
