// Picks the instruction set's table at run time. Compiled once, for the baseline.
#include <cstdlib>
#include <cstring>

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
  const char* error;
};

Choice choose() {
  const Candidate candidates[] = {
      {&baseline::kernels, true},
#if defined(MEMOPT_X86)
      {&avx2::kernels, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                           __builtin_cpu_supports("f16c")},
      {&avx512::kernels, __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                             __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")},
#endif
  };
  const char* wanted = std::getenv("MEMOPT_CPU_CAPABILITY");
  if (wanted == nullptr || *wanted == '\0') {
    const Kernels* best = nullptr;
    for (const Candidate& c : candidates) {
      if (c.runs_here) best = c.kernels;
    }
    return {best, nullptr};
  }
  for (const Candidate& c : candidates) {
    if (std::strcmp(wanted, c.kernels->name) != 0) continue;
    if (c.runs_here) return {c.kernels, nullptr};
    return {nullptr, "MEMOPT_CPU_CAPABILITY names an instruction set that this processor does not have"};
  }
  return {nullptr, "MEMOPT_CPU_CAPABILITY must be one of the compiled instruction sets (baseline, avx2, avx512)"};
}

}  // namespace

const Kernels* cpu_kernels(const char** error) {
  static const Choice choice = choose();
  *error = choice.error;
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
