// The ranks of a group, and the one collective that memopt starts itself: an all-gather of bytes.
// Nothing here knows c10d: whoever makes a group brings a Link.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace memopt::saved {

// An all-gather that has begun.
class Pending {
 public:
  virtual ~Pending() = default;
  // Until it has ended; on an accelerator: makes the current stream wait for it. Raises if it
  // failed.
  virtual void wait() = 0;
  // Whether it has ended, or failed, and uses its memory no more. Does not wait.
  virtual bool is_done() = 0;
};

class Link {
 public:
  virtual ~Link() = default;
  // Begins to gather into `all` the `part` of every rank, in the order of ranks: bytes, on one
  // device. All ranks start the same gathers in the same order. It reads and writes after what the
  // current stream has been given.
  virtual std::unique_ptr<Pending> start(const at::Tensor& part, const at::Tensor& all) = 0;
};

class Gather;

class Ranks : public std::enable_shared_from_this<Ranks> {
 public:
  // `devices`: the types of device that the link takes, the preferred one for messages first.
  Ranks(std::unique_ptr<Link> link, int64_t rank, int64_t count,
        std::vector<c10::DeviceType> devices);

  int64_t rank() const { return rank_; }
  int64_t count() const { return count_; }
  bool takes(c10::Device device) const;
  // Where a few numbers for all ranks should be.
  c10::Device device_of_messages() const;

  std::unique_ptr<Gather> gather(at::Tensor part);

  // How many gathers that nobody waits for any more still use their memory.
  size_t unfinished();

 private:
  friend class Gather;
  struct Transfer {
    std::unique_ptr<Pending> pending;
    at::Tensor part;
    at::Tensor all;
  };
  void hold(Transfer transfer);

  const std::unique_ptr<Link> link_;
  const int64_t rank_;
  const int64_t count_;
  const std::vector<c10::DeviceType> devices_;
  std::mutex mutex_;  // nothing is called, and no tensor dropped, under it
  std::vector<Transfer> held_;
};

// One gather. Dropped before it has ended, it leaves its memory with the ranks until then: others
// may still be writing there.
class Gather {
 public:
  Gather(std::shared_ptr<Ranks> ranks, Ranks::Transfer transfer, std::optional<c10::Stream> stream)
      : ranks_(std::move(ranks)), transfer_(std::move(transfer)), stream_(stream) {}
  ~Gather();
  Gather(const Gather&) = delete;
  Gather& operator=(const Gather&) = delete;

  // Every rank's part, one after another. Once.
  at::Tensor wait();

  // Whose memory the result is; empty on the CPU.
  std::optional<c10::Stream> stream() const { return stream_; }

 private:
  std::shared_ptr<Ranks> ranks_;
  Ranks::Transfer transfer_;
  std::optional<c10::Stream> stream_;
};

}  // namespace memopt::saved
