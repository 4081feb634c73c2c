// The process that made an object.
//
// A child of fork() has a copy of an object that works with threads, but not the threads, and not
// their promise to unlock what they have locked. Such an object asks here before it waits or locks,
// and says no in a child.
#pragma once

#include <cstdint>

namespace memopt::offload {

class Process {
 public:
  // The one that runs.
  Process();

  bool is_current() const;

 private:
  uint64_t forks_;  // between the first process and this one
};

}  // namespace memopt::offload
