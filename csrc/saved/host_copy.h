// The fourth fate: the handle holds a copy in host memory, and gives back a new tensor on the
// device.
//
// Both copies are asynchronous for the host and run on the stream that computes: memory that either
// side gives back is reused in stream order, so no stream has to be told about it (record_stream)
// and nothing has to be held until a copy has finished. The recompute may run on another stream
// than forward did; an event orders it after the copy to the host.
#pragma once

#include <c10/core/Event.h>

#include <optional>

#include "fate.h"

namespace memopt::saved {

class HostCopy : public Handle {
 public:
  explicit HostCopy(const at::Tensor& tensor);

  // The tensor again: a leaf with the same values, strides and requires_grad.
  at::Tensor restore() override;

 private:
  at::Tensor values_;  // pinned, on the host
  c10::Device device_;
  std::vector<int64_t> strides_;
  bool requires_grad_;
  std::optional<c10::Event> copied_;  // the copy to the host; none where the device has no streams
};

// A copy of each tensor that it is asked for, where that frees device memory and gives the same
// tensor back. Expanded tensors are views of smaller ones; layouts other than strided have no
// values that a plain copy keeps.
class ToHost : public Fate {
 public:
  c10::intrusive_ptr<Handle> take(const at::Tensor& tensor) override;
};

// Whether it is on a device whose memory a copy would free.
bool is_on_accelerator(const at::Tensor& tensor);

// What went over the link since the process began.
struct LinkTraffic {
  int64_t tensors_to_host;
  int64_t bytes_to_host;
  int64_t tensors_to_device;
  int64_t bytes_to_device;
};
LinkTraffic link_traffic();

// For tests on machines without an accelerator: take this device type for one. None: ask PyTorch.
void pretend_accelerator(std::optional<c10::DeviceType> type);

}  // namespace memopt::saved
