// The tensors that one step of training holds in a slab, in the order in which they come and go,
// and the size of the slab that they need.
//
// Steps repeat. So a slab that is made for one step, by the same allocator that will divide it
// (space.h), fits the next one to the byte. Not thread-safe.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

namespace memopt::offload {

class Demand {
 public:
  using Id = size_t;  // 0, 1, ...

  explicit Demand(size_t alignment) : alignment_(alignment) {}

  // So many bytes > 0 are held from now on, until end() is called for them.
  Id begin(size_t bytes);
  void end(Id id);

  size_t begun() const { return sizes_.size(); }   // how many
  size_t most_held() const { return most_held_; }  // how many at one time
  size_t most() const { return most_; }            // the most bytes at one time, each rounded up

  // The bytes of a slab in which each of the requests that count finds one range: most(), unless
  // they come and go in an order that leaves gaps.
  size_t slab_bytes(const std::function<bool(Id)>& counts) const;

 private:
  size_t rounded(size_t bytes) const;
  // The bytes of the first request that finds no room in a slab of so many; 0 if all do.
  size_t first_without_room(size_t slab, const std::function<bool(Id)>& counts) const;

  // In order: a request begins (the first time that it occurs) or ends.
  std::vector<Id> events_;
  std::vector<size_t> sizes_;  // by id
  size_t alignment_;
  size_t held_ = 0;
  size_t most_held_ = 0;
  size_t bytes_ = 0;
  size_t most_ = 0;
};

}  // namespace memopt::offload
