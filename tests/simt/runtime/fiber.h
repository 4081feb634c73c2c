// Fibers: the threads of a block take turns on one operating-system thread.
//
// A fiber is entered once by ucontext and from then on by __builtin_setjmp and __builtin_longjmp.
// Unlike swapcontext they make no system call: a block of 256 threads switches thousands of times.
#pragma once

#include <cstddef>

namespace simt {

class Fiber {
 public:
  // `number` < kMaxFibers picks the stack: one fiber for each number.
  explicit Fiber(int number);

  // Runs the fiber from where it paused, or `body` from its beginning, until it pauses or `body`
  // returns. True: `body` returned. The next call starts anew.
  bool resume(void (*body)());

  // Called inside a fiber: goes back to its resume().
  static void pause();

  // The paused fiber will not go on: its next resume() begins anew.
  void abandon();

  static constexpr int kMaxFibers = 1024;

  using Context = void* [5];  // as the builtins ask for

 private:
  static void entry();
  void enter();

  char* stack_;
  size_t stack_size_;
  bool entered_ = false;
  bool finished_ = false;
  void (*body_)() = nullptr;
  Context context_;
};

}  // namespace simt
