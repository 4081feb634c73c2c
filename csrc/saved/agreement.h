// Finds the tensors of a call that are identical on all ranks of a group: in shape, strides, dtype
// and every bit.
//
// Shape alone does not tell: with sequence parallelism each rank has other rows of one shape. So
// calls compare, over all ranks: one all-gather of kWords numbers of 64 bits from each rank. Each
// module's first call does, and its second, fourth, eighth and so on: a first call may have been
// given zeros everywhere, to warm up. A tensor that differs once is kept whole from then on; one
// that does not is taken to be identical until the next comparison.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ranks.h"

namespace memopt::saved {

// Of one structure of arguments.
class Verdict {
 public:
  explicit Verdict(std::vector<bool> whole) : whole_(std::move(whole)) {}

  bool is_whole(size_t number);
  // Returns whether it was not so before.
  bool keep_whole(size_t number);

  // To be asked once for each call after the first: whether it should compare.
  bool is_due();

 private:
  std::mutex mutex_;
  uint64_t calls_ = 1;
  std::vector<bool> whole_;
};

// Of one module, or of one plain function's code.
class Agreement {
 public:
  // `structure` names which argument each tensor is. Null if none was found yet.
  std::shared_ptr<Verdict> find(const std::string& structure);
  void add(const std::string& structure, std::shared_ptr<Verdict> verdict);

 private:
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Verdict>> verdicts_;
};

inline constexpr int64_t kWords = 64;

// What this rank has: `taken` has the tensors that it would split, and nothing in the places of the
// others; `place` is the call's number in the order of calls. Raises where other ranks are at
// another place. All ranks call it alike. Returns whether each tensor has to stay whole; all if
// ranks have another number of them. (The tensors past number kWords - 3 stay or go together.)
std::vector<bool> compare(Ranks& ranks, const std::vector<at::Tensor>& taken, int64_t place);

// A number that depends on every bit of a tensor's bytes and on their order: with 64-bit words w
// and odd weights 2i + 1, the sum of w (2i + 1) plus an odd multiple of the sum of (w >> 32)
// (2i + 1), modulo 2^64. Any one word that differs changes it; others escape at a chance of 2^-64.
// (The second sum is for the sign of a word's upper half: 2^63 times an even difference of weights
// is nothing.) Exact integers: the same on any device and in any order of summation.
int64_t checksum(const at::Tensor& tensor);

}  // namespace memopt::saved
