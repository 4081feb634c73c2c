// Times of copies and stalls, read from events once they have been reached: asking never waits.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "event.h"
#include "prefetch_depth.h"
#include "stats.h"

namespace memopt::offload {

class Timing {
 public:
  // A copy that could begin at `ready` and ends at `done`. Where copies overlap, the time with any
  // of them under way counts once.
  void copy_out(EventPtr ready, EventPtr done, size_t bytes);
  void copy_in(EventPtr ready, EventPtr done, size_t bytes);
  // The device had come to `before` when it was told to wait for `done`.
  void stall_out(EventPtr before, EventPtr done);
  // The device had come to `asked` when backward `backward` asked for `bytes`, and had to wait for
  // `loaded`; empty if they were on the device.
  void restored(EventPtr asked, EventPtr loaded, size_t bytes, int64_t backward);

  // Adds what is known by now.
  void settle(LinkStats& out, LinkStats& in);

  // How many copies back should be under way beside the one that is asked for: the fewest with
  // which the last backward that was measured would have waited no longer than with `most`. 1 while
  // none was.
  size_t prefetch_depth(size_t most);

 private:
  struct Copy {
    EventPtr ready, done;
    size_t bytes;
  };
  struct Stall {
    EventPtr before, done;
  };
  struct Direction {
    std::deque<Copy> copies;
    std::deque<Stall> stalls;
    EventPtr last_done;

    void settle(LinkStats& stats);
  };
  struct Request {
    EventPtr asked, loaded;
    size_t bytes;
    int64_t backward;
  };

  void settle_requests();

  Direction out_, in_;
  std::deque<Request> requests_;
  double seconds_per_byte_ = 0;      // on the way back; 0: not known
  std::vector<Requested> measured_;  // of the backward that is being measured
  size_t depth_ = 1;
  size_t depth_most_ = 0;
  std::vector<Requested> last_;  // of the last one measured; what depth_ was computed from
};

}  // namespace memopt::offload
