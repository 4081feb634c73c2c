// Picks the instruction set's table at run time. Compiled once, for the baseline.
#include <cstdlib>
#include <cstring>
#include <string>

#include "kernels.h"

namespace memopt::kernels::cpu {

namespace baseline {
extern const Kernels kernels;
}
#if defined(MEMOPT_X86)
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
#endif

namespace {

struct Candidate {
  const Kernels* kernels;
  bool runs_here;
};

struct Choice {
  const Kernels* kernels;
  std::string error;  // empty where there are kernels
};

Choice choose() {
  const Candidate candidates[] = {
      {&baseline::kernels, true},
#if defined(MEMOPT_X86)
      {&avx2::kernels, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                           __builtin_cpu_supports("f16c")},
      {&avx512::kernels, __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                             __builtin_cpu_supports("avx512vl") &&
                             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma") &&
                             __builtin_cpu_supports("f16c")},
#endif
  };
  const char* wanted = std::getenv("MEMOPT_CPU_CAPABILITY");
  if (wanted == nullptr || *wanted == '\0') {
    const Kernels* best = nullptr;
    for (const Candidate& c : candidates) {
      if (c.runs_here) best = c.kernels;
    }
    return {best, ""};
  }
  for (const Candidate& c : candidates) {
    if (std::strcmp(wanted, c.kernels->name) != 0) continue;
    if (c.runs_here) return {c.kernels, ""};
    return {
        nullptr,
        std::string("MEMOPT_CPU_CAPABILITY must name an instruction set of this processor, got '") +
            wanted + "'"};
  }
  std::string names;
  for (const Candidate& c : candidates)
    names += (names.empty() ? "" : ", ") + std::string(c.kernels->name);
  return {nullptr, "MEMOPT_CPU_CAPABILITY must be one of " + names + ", got '" + wanted + "'"};
}

}  // namespace

const Kernels* cpu_kernels(const char** error) {
  static const Choice choice = choose();
  *error = choice.error.c_str();
  return choice.kernels;
}

const char* const* compiled_capabilities() {
  static const char* const names[] = {
      "baseline",
#if defined(MEMOPT_X86)
      "avx2",
      "avx512",
#endif
      nullptr,
  };
  return names;
}

}  // namespace memopt::kernels::cpu
