// The target of offloading: the host's memory, or a directory on disk. There is one for each place,
// for the whole process, with an engine for each device, and its copies serve every scope and
// region: a mask that all layers get is copied once.
#pragma once

#include <c10/core/Device.h>

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "../offload/engine.h"
#include "memory_peak.h"
#include "once_per_storage.h"

namespace memopt::saved {

struct OffloadLimits {
  size_t copies_in_flight = 4;
  size_t most_host_bytes = SIZE_MAX;
  bool checksums = false;  // of what is written to disk; for debugging
  std::string directory;   // for those who name none; empty: there is none
};

// One device's part of a target.
struct OffloadDevice {
  c10::Device device;
  std::shared_ptr<offload::Engine> engine;
  PeakWatch peak_watch;

  OffloadDevice(c10::Device of, std::shared_ptr<offload::Engine> by)
      : device(of), engine(std::move(by)), peak_watch(of) {}

  // To be called when something goes or comes back.
  void watch_peak() { peak_watch.see(device, engine->bytes_away()); }

  // The order of what the calling thread's regions offload. It is one engine's: see ticket.h.
  std::shared_ptr<offload::Sequence> sequence_of_thread();

 private:
  std::mutex mutex_;
  std::map<std::thread::id, std::shared_ptr<offload::Sequence>> sequences_;
};

class OffloadTarget {
 public:
  using Devices = std::unordered_map<c10::Device, std::shared_ptr<OffloadDevice>>;

  // The one for this place, made when it is first asked for. `directory` is empty for host memory.
  // Raises if nothing can be written to the directory.
  static std::shared_ptr<OffloadTarget> get(const std::string& directory);
  static std::vector<std::shared_ptr<OffloadTarget>> all();
  // For the engines that are made from now on; those that hold nothing are made anew.
  static void set_limits(OffloadLimits limits);
  static OffloadLimits limits();
  // Gives back the memory and the files that hold nothing; returns their bytes.
  static size_t empty_cache();

  explicit OffloadTarget(std::string directory) : directory_(std::move(directory)) {}

  const std::string& directory() const { return directory_; }
  bool is_disk() const { return !directory_.empty(); }

  std::shared_ptr<OffloadDevice> device(c10::Device device);
  Devices devices();
  // The most that are under way at one time: of an engine that holds something they may be other
  // than the limits say.
  size_t copies_in_flight();

  // What is away, by storage.
  const std::shared_ptr<TakenStorages>& taken() const { return taken_; }

 private:
  size_t trim();

  const std::string directory_;
  const std::shared_ptr<TakenStorages> taken_ = std::make_shared<TakenStorages>();
  std::mutex mutex_;
  Devices devices_;
};

}  // namespace memopt::saved
