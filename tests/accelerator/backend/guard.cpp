// What c10 asks of a device: c10::impl::VirtualGuardImpl, c10::Stream and c10::Event end here.
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include "control.h"
#include "moment.h"

namespace sim {
namespace {

// Recording it again leaves what waits for the earlier moment as it is.
struct Event {
  MomentPtr moment;
  bool timed;
};

c10::Device device(c10::DeviceIndex index) {
  return {kType, index};
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Device exchangeDevice(c10::Device to) const override {
    return device(exchange_device(to.index()));
  }
  c10::Device getDevice() const override { return device(current_device()); }
  void setDevice(c10::Device to) const override { exchange_device(to.index()); }
  void uncheckedSetDevice(c10::Device to) const noexcept override { exchange_device(to.index()); }

  c10::Stream getStream(c10::Device of) const override {
    return fault() == Fault::stream_is_remembered ? getDefaultStream(of)
                                                  : current_stream(of.index());
  }
  c10::Stream getDefaultStream(c10::Device of) const override {
    const auto index = of.has_index() ? of.index() : current_device();
    return c10::Stream(c10::Stream::DEFAULT, device(index));
  }
  c10::Stream getNewStream(c10::Device of, int) const override { return new_stream(of.index()); }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool high_priority) const override {
    return pool_stream(of.index(), high_priority);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return exchange_stream(stream); }
  void* getStreamNativeHandle(c10::Stream stream) const override { return native_handle(stream); }

  bool queryStream(const c10::Stream& stream) const override { return is_idle(stream); }
  void synchronizeStream(const c10::Stream& stream) const override {
    wait_on_host(sim::record(stream));
  }
  void synchronizeDevice(c10::DeviceIndex index) const override { synchronize_device(index); }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex index,
              c10::EventFlag flag) const override {
    TORCH_CHECK(index < 0 || index == stream.device_index(), "sim: an event of device ", int(index),
                " cannot be recorded on ", stream);
    if (*event == nullptr) *event = new Event{nullptr, flag == c10::EventFlag::BACKEND_DEFAULT};
    static_cast<Event*>(*event)->moment = sim::record(stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (fault() == Fault::waits_are_ignored) return;
    if (event != nullptr) wait(stream, static_cast<Event*>(event)->moment);
  }
  bool queryEvent(void* event) const override {
    if (fault() == Fault::moments_are_reached) return true;
    return event == nullptr || is_reached(static_cast<Event*>(event)->moment);
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) wait_on_host(static_cast<Event*>(event)->moment);
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* last, c10::DeviceIndex) const override {
    if (fault() == Fault::moments_are_reached) return 0;
    const auto& from = *static_cast<Event*>(first);
    const auto& to = *static_cast<Event*>(last);
    TORCH_CHECK(from.timed && to.timed, "sim: elapsedTime needs events made with timing");
    TORCH_CHECK(is_reached(from.moment) && is_reached(to.moment),
                "sim: elapsedTime of an event that is not reached yet");
    return milliseconds_between(from.moment, to.moment);
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_use(data.get(), stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace
}  // namespace sim
