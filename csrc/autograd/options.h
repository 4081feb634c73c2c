// The options of a graph node's function as one IValue: what compiled autograd tells two calls by.
#pragma once

#include <ATen/core/ivalue.h>

#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace memopt::autograd {

inline at::IValue pack_field(bool field) {
  return field;
}
inline at::IValue pack_field(int64_t field) {
  return field;
}
template <class Enum, class = std::enable_if_t<std::is_enum_v<Enum>>>
at::IValue pack_field(Enum field) {
  return static_cast<int64_t>(field);
}
template <class Enum, class = std::enable_if_t<std::is_enum_v<Enum>>>
at::IValue pack_field(std::optional<Enum> field) {
  return field.has_value() ? pack_field(*field) : at::IValue();
}
inline at::IValue pack_field(double field) {
  return field;
}
inline at::IValue pack_field(std::optional<double> field) {
  return field;
}
inline at::IValue pack_field(const std::string& field) {
  return field;
}

// Of a struct with visit(options, f), which calls f(field...).
template <class Options>
at::IValue packed_options(const Options& options) {
  std::vector<at::IValue> packed;
  Options::visit(options,
                 [&](const auto&... fields) { (packed.push_back(pack_field(fields)), ...); });
  return c10::ivalue::Tuple::create(std::move(packed));
}

}  // namespace memopt::autograd
