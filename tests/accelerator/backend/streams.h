// The simulated device's streams, events and memory, which know nothing of tensors.
#pragma once

#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace sim {

inline constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
inline constexpr c10::DeviceIndex kDevices = 2;

enum class Kind { kKernel, kHostToDevice, kDeviceToHost, kDeviceToDevice, kEvent, kPoison };
inline constexpr int kKinds = 6;

// A point in a stream's work.
class Moment;
using MomentPtr = std::shared_ptr<Moment>;

// What a stream does next. It holds no tensor: memory stays allocated by the host's care alone, as
// on a device.
struct Task {
  Kind kind;
  std::string name;
  std::function<void()> run;
  MomentPtr end{};  // what is reached with it
};

void enqueue(const c10::Stream& stream, Task task);          // raises what an earlier task raised
void enqueue_quietly(const c10::Stream& stream, Task task);  // for destructors
MomentPtr record(const c10::Stream& stream);
void wait(const c10::Stream& stream, const MomentPtr& moment);  // the stream waits, not the host
bool is_idle(const c10::Stream& stream);
void wait_on_host(const MomentPtr& moment);  // raises what a task raised

c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream exchange_stream(const c10::Stream& stream);
c10::Stream new_stream(c10::DeviceIndex device);
c10::Stream pool_stream(c10::DeviceIndex device, bool high_priority);
void* native_handle(const c10::Stream& stream);
void synchronize_device(c10::DeviceIndex device);

c10::DeviceIndex current_device();
c10::DeviceIndex exchange_device(c10::DeviceIndex device);

// Memory. A device pointer, which nobody may follow, and the same memory for the streams' threads.
char* hidden(const void* device_pointer);
void record_use(const void* device_pointer, const c10::Stream& stream);

// Pinned host memory.
bool is_pinned(const void* pointer);
void record_pinned_use(const void* pointer, const c10::Stream& stream);

}  // namespace sim
