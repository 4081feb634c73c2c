// Checks that the compiler puts into the kernels (-fsanitize=alignment,bounds), reported as faults
// of the running thread: the interpreter takes the place of the sanitizer's own run-time library,
// which would only print.
#include <cstdint>
#include <string>

#include "block.h"
#include "control.h"
#include "meeting.h"

namespace {

// The layouts that GCC and Clang pass to these handlers.
struct SourceLocation {
  const char* file;
  uint32_t line;
  uint32_t column;
};
struct TypeDescriptor {
  uint16_t kind;
  uint16_t info;
  char name[1];
};
struct TypeMismatch {
  SourceLocation location;
  const TypeDescriptor* type;
  unsigned char log_alignment;
  unsigned char kind;
};
struct OutOfBounds {
  SourceLocation location;
  const TypeDescriptor* array_type;
  const TypeDescriptor* index_type;
};

std::string where(const SourceLocation& l) {
  return " in " + simt::place(l.file, static_cast<int>(l.line));
}

}  // namespace

extern "C" {

void __ubsan_handle_type_mismatch_v1(const TypeMismatch* check, uintptr_t address) {
  simt::require_aligned(reinterpret_cast<const void*>(address), size_t{1} << check->log_alignment,
                        check->location.file, static_cast<int>(check->location.line));
}

void __ubsan_handle_out_of_bounds(const OutOfBounds* check, uintptr_t index) {
  simt::report("index out of bounds: " + std::to_string(static_cast<intptr_t>(index)) +
               " in an array of type " + check->array_type->name + where(check->location));
}

}  // extern "C"
