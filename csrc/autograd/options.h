// An op's options in its node: one IValue, which compiled autograd can read as well.
#pragma once

#include <ATen/core/ivalue.h>

#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "support.h"

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
  return field.empty() ? at::IValue() : at::IValue(field);
}

inline void unpack_field(const at::IValue& value, bool& field) {
  field = value.toBool();
}
inline void unpack_field(const at::IValue& value, int64_t& field) {
  field = value.toInt();
}
template <class Enum, class = std::enable_if_t<std::is_enum_v<Enum>>>
void unpack_field(const at::IValue& value, Enum& field) {
  field = static_cast<Enum>(value.toInt());
}
template <class Enum, class = std::enable_if_t<std::is_enum_v<Enum>>>
void unpack_field(const at::IValue& value, std::optional<Enum>& field) {
  if (value.isNone()) return field.reset();
  field = static_cast<Enum>(value.toInt());
}
inline void unpack_field(const at::IValue& value, double& field) {
  field = value.toDouble();
}
inline void unpack_field(const at::IValue& value, std::optional<double>& field) {
  field = value.toOptional<double>();
}
inline void unpack_field(const at::IValue& value, std::string& field) {
  field = value.isNone() ? std::string() : value.toStringRef();
}

// Options with Op::visit(options, f), which calls f(field...).
template <class Op>
void save_options(AutogradContext* ctx, const typename Op::Options& options) {
  Op::visit(options, [&](const auto&... fields) {
    std::vector<at::IValue> packed;
    packed.reserve(sizeof...(fields));
    (packed.push_back(pack_field(fields)), ...);
    ctx->saved_data["options"] = c10::ivalue::Tuple::create(std::move(packed));
  });
}

template <class Op>
typename Op::Options restore_options(AutogradContext* ctx) {
  typename Op::Options options;
  const auto tuple = ctx->saved_data["options"].toTuple();
  const at::ArrayRef<at::IValue> elements = tuple->elements().asArrayRef();
  Op::visit(options, [&](auto&... fields) {
    size_t next = 0;
    (unpack_field(elements[next++], fields), ...);
  });
  return options;
}

}  // namespace memopt::autograd
