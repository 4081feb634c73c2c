#include "flags.h"

namespace memopt::saved {

Flags& flags() {
  thread_local Flags flags;
  return flags;
}

}  // namespace memopt::saved
