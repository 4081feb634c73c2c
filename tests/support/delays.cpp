// Delays of threads, loaded before all else (LD_PRELOAD; see delays.py): after it has woken another
// or was woken, a thread sleeps for a while, at random. So a thread that lets go of something only
// when it has told others to go on does so late, as it may on a machine that has much to do.
//
// The main thread does not sleep: it is the one that a test's result depends on if it goes ahead.
// Which condition variables there are in what is tested does not matter, they are all taken. Not
// delayed are threads that wait in other ways, such as OpenMP's.
#include <dlfcn.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <ctime>

namespace {

double from_environment(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr ? 0 : std::atof(text);
}

const double share = from_environment("DELAYS_SHARE");  // of all times; 0 until it is read
const double longest_us = from_environment("DELAYS_US");

// In [0, 1). A generator for each thread (Numerical Recipes' linear congruence).
double random_number() {
  thread_local auto state = static_cast<uint32_t>(syscall(SYS_gettid)) * 2654435761u;
  state = state * 1664525u + 1013904223u;
  return static_cast<double>(state >> 8) / (1 << 24);
}

int and_sleep(int result) {
  if (syscall(SYS_gettid) == getpid() || random_number() >= share) return result;
  const timespec duration{0, static_cast<long>(random_number() * longest_us * 1e3)};
  syscall(SYS_nanosleep, &duration, nullptr);
  return result;
}

template <class Function>
Function* next(const char* name) {
  // The newer of two versions: the first is another structure's.
  return reinterpret_cast<Function*>(dlvsym(RTLD_NEXT, name, "GLIBC_2.3.2"));
}

}  // namespace

extern "C" {

int pthread_cond_broadcast(pthread_cond_t* condition) {
  static auto* const call = next<decltype(pthread_cond_broadcast)>("pthread_cond_broadcast");
  return and_sleep(call(condition));
}

int pthread_cond_signal(pthread_cond_t* condition) {
  static auto* const call = next<decltype(pthread_cond_signal)>("pthread_cond_signal");
  return and_sleep(call(condition));
}

int pthread_cond_wait(pthread_cond_t* condition, pthread_mutex_t* mutex) {
  static auto* const call = next<decltype(pthread_cond_wait)>("pthread_cond_wait");
  return and_sleep(call(condition, mutex));
}

int pthread_cond_timedwait(pthread_cond_t* condition, pthread_mutex_t* mutex,
                           const timespec* until) {
  static auto* const call = next<decltype(pthread_cond_timedwait)>("pthread_cond_timedwait");
  return and_sleep(call(condition, mutex, until));
}
}
