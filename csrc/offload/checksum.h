// A number that tells whether bytes came back as they were written: for debugging, not against
// intent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace memopt::offload {

// FNV-1a (Fowler, Noll, Vo) over words of 8 bytes, zeros after the last. Each step is invertible,
// so a change within one word always shows.
inline uint64_t checksum(const void* data, size_t bytes) {
  const auto* at = static_cast<const unsigned char*>(data);
  uint64_t hash = 0xcbf29ce484222325;
  for (size_t done = 0; done < bytes; done += 8) {
    uint64_t word = 0;
    std::memcpy(&word, at + done, bytes - done < 8 ? bytes - done : 8);
    hash = (hash ^ word) * 0x100000001b3;
  }
  return hash;
}

}  // namespace memopt::offload
