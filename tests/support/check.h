// The least that a test program needs: TEST(name) { ... }, CHECK and CHECK_RAISES.
//
// A program runs the tests that its arguments name, or all, and stops at the first failure.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace check {

struct Test {
  std::string name;
  std::function<void()> run;
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

[[noreturn]] inline void failed(const char* file, int line, const std::string& what) {
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
  std::fflush(nullptr);
  std::_Exit(1);
}

struct Registered {
  Registered(const char* name, std::function<void()> run) {
    tests().push_back({name, std::move(run)});
  }
};

}  // namespace check

#define TEST(name)                                               \
  static void name();                                            \
  static const check::Registered registered_##name(#name, name); \
  static void name()

#define CHECK(condition)                                                     \
  do {                                                                       \
    if (!(condition)) check::failed(__FILE__, __LINE__, "not: " #condition); \
  } while (false)

// `statement` raises std::exception, whose text has `text` in it.
#define CHECK_RAISES(text, statement)                                                      \
  do {                                                                                     \
    std::string raised;                                                                    \
    try {                                                                                  \
      statement;                                                                           \
    } catch (const std::exception& error) {                                                \
      raised = error.what();                                                               \
    }                                                                                      \
    if (raised.empty()) check::failed(__FILE__, __LINE__, "raises nothing: " #statement);  \
    if (raised.find(text) == std::string::npos) check::failed(__FILE__, __LINE__, raised); \
  } while (false)

int main(int count, char** arguments) {
  const std::vector<std::string_view> wanted(arguments + 1, arguments + count);
  int run = 0;
  for (const check::Test& test : check::tests()) {
    bool is_wanted = wanted.empty();
    for (const auto& name : wanted) is_wanted = is_wanted || name == test.name;
    if (!is_wanted) continue;
    std::printf("%s\n", test.name.c_str());
    std::fflush(stdout);
    test.run();
    ++run;
  }
  return run == 0;
}
