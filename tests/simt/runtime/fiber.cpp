#include "fiber.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>

namespace simt {
namespace {

constexpr size_t kStackSize = 256 * 1024;
constexpr size_t kGuardSize = 4096;

// Stacks begin at different distances from a page: were they alike, the few lines that each thread
// touches would all fall into the same sets of the processor's caches.
size_t usable_size(int number) {
  return kStackSize - kGuardSize - number * 11 * 64 % (32 * 1024);
}

// All stacks in one reservation (memory that is not touched costs nothing), a guard page below
// each.
char* reserve_stacks() {
  const size_t size = Fiber::kMaxFibers * kStackSize;
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    std::perror("simt: stacks for the threads of a block");
    std::abort();
  }
  char* stacks = static_cast<char*>(memory);
  for (int i = 0; i < Fiber::kMaxFibers; ++i)
    mprotect(stacks + i * kStackSize, kGuardSize, PROT_NONE);
  return stacks;
}

Fiber* running = nullptr;
Fiber::Context scheduler;

// A function of its own: __builtin_longjmp may not share one with __builtin_setjmp.
[[noreturn, gnu::noinline]] void jump(Fiber::Context& context) {
  __builtin_longjmp(context, 1);
}

}  // namespace

Fiber::Fiber(int number) : stack_size_(usable_size(number)) {
  static char* const stacks = reserve_stacks();
  stack_ = stacks + number * kStackSize + kGuardSize;
}

bool Fiber::resume(void (*body)()) {
  if (!entered_ || finished_) body_ = body;
  finished_ = false;
  running = this;
  if (__builtin_setjmp(scheduler) == 0) {
    if (entered_) jump(context_);
    enter();
  }
  running = nullptr;
  return finished_;
}

void Fiber::enter() {
  entered_ = true;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = stack_;
  context.uc_stack.ss_size = stack_size_;
  context.uc_link = nullptr;
  makecontext(&context, &Fiber::entry, 0);
  setcontext(&context);
}

// Never returns: when a body has returned, the fiber waits for its next one.
void Fiber::entry() {
  for (;;) {
    running->body_();
    running->finished_ = true;
    pause();
  }
}

void Fiber::pause() {
  if (__builtin_setjmp(running->context_) == 0) jump(scheduler);
}

void Fiber::abandon() {
  entered_ = false;
}

}  // namespace simt
