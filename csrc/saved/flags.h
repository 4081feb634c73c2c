// The calling thread's state: in a region's first forward, in its recompute, or in neither.
//
// The flags belong to a thread, because backward may run in another thread than forward did, and
// one thread may recompute a region while another still runs its forward.
#pragma once

namespace memopt::saved {

struct Flags {
  bool checkpointing = false;
  bool recomputing = false;
  bool disabled = false;
  bool keeping_arguments = false;  // of a region, which backward will call it with again
};

// The calling thread's.
Flags& flags();

// Sets the thread's flags in a scope and puts them back at its end, however it ends.
class FlagsGuard {
 public:
  explicit FlagsGuard(Flags set) : before_(flags()) { flags() = set; }
  ~FlagsGuard() { flags() = before_; }
  FlagsGuard(const FlagsGuard&) = delete;
  FlagsGuard& operator=(const FlagsGuard&) = delete;

 private:
  Flags before_;
};

}  // namespace memopt::saved
