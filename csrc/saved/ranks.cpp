#include "ranks.h"

#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <iterator>

#include "current.h"

namespace memopt::saved {

Ranks::Ranks(std::unique_ptr<Link> link, int64_t rank, int64_t count,
             std::vector<c10::DeviceType> devices)
    : link_(std::move(link)), rank_(rank), count_(count), devices_(std::move(devices)) {}

bool Ranks::takes(c10::Device device) const {
  return std::find(devices_.begin(), devices_.end(), device.type()) != devices_.end();
}

c10::Device Ranks::device_of_messages() const {
  if (devices_[0] == c10::DeviceType::CPU) return c10::DeviceType::CPU;
  return c10::impl::VirtualGuardImpl(devices_[0]).getDevice();
}

std::unique_ptr<Gather> Ranks::gather(at::Tensor part) {
  unfinished();  // gives back what has ended
  auto all = at::empty({count_ * part.numel()}, part.options());
  auto pending = link_->start(part, all);
  const auto stream = current_stream(part.device());
  return std::make_unique<Gather>(
      shared_from_this(), Transfer{std::move(pending), std::move(part), std::move(all)}, stream);
}

size_t Ranks::unfinished() {
  std::vector<Transfer> held;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    held.swap(held_);
  }
  const auto ended = std::partition(held.begin(), held.end(), [](const Transfer& transfer) {
    return !transfer.pending->is_done();
  });
  const std::vector<Transfer> dropped(std::make_move_iterator(ended),
                                      std::make_move_iterator(held.end()));
  held.erase(ended, held.end());
  const size_t count = held.size();
  const std::lock_guard<std::mutex> lock(mutex_);
  std::move(held.begin(), held.end(), std::back_inserter(held_));
  return count;
}

void Ranks::hold(Transfer transfer) {
  if (transfer.pending->is_done()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  held_.push_back(std::move(transfer));
}

Gather::~Gather() {
  if (transfer_.pending != nullptr) ranks_->hold(std::move(transfer_));
}

at::Tensor Gather::wait() {
  transfer_.pending->wait();
  transfer_.pending.reset();
  transfer_.part.reset();
  return std::move(transfer_.all);
}

}  // namespace memopt::saved
