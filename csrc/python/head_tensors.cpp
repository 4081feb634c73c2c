#include "head_tensors.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

namespace memopt::python {

using at::Tensor;

namespace {

std::unordered_set<HeadTensors*>& alive() {
  static auto* const alive = new std::unordered_set<HeadTensors*>;  // outlives all of them
  return *alive;
}

bool is_freed(const Tensor& tensor) {
  return tensor.storage().sym_nbytes() == 0 && tensor.sym_numel() != 0;
}

// Whether they have the same elements of the same storage.
bool is_same_memory(const Tensor& one, const Tensor& other) {
  return one.storage().is_alias_of(other.storage()) &&
         one.sym_storage_offset() == other.sym_storage_offset() &&
         one.sym_sizes() == other.sym_sizes() && one.sym_strides() == other.sym_strides();
}

}  // namespace

HeadTensors::HeadTensors(const Tensor& input, const Tensor& weight,
                         const std::optional<Tensor>& bias,
                         std::vector<std::optional<Tensor>> owned)
    : owned_(std::move(owned)) {
  made_.reserve(3);
  read_.reserve(4);
  add(input);
  add(weight);
  add(bias.value_or(Tensor()));
  alive().insert(this);
}

HeadTensors::~HeadTensors() {
  alive().erase(this);
}

void HeadTensors::add(const Tensor& tensor) {
  if (!tensor.defined()) {
    made_.emplace_back();
    return;
  }
  reads(tensor);
  made_.push_back({tensor, tensor.requires_grad() ? tensor.view_as(tensor) : Tensor()});
}

void HeadTensors::reads(const Tensor& tensor) {
  read_.push_back({tensor, static_cast<uint32_t>(tensor._version())});
}

HeadTensors::Three HeadTensors::now() const {
  const Tensor& bias = made_[2].tensor;
  return {made_[0].tensor, made_[1].tensor, bias.defined() ? std::optional(bias) : std::nullopt};
}

// Whether the tensor is its view of then, from now on at least.
bool HeadTensors::exchange(Made& made) {
  if (!made.seen.defined()) return false;
  if (!made.tensor.is_same(made.seen) && is_same_memory(made.tensor, made.seen)) return false;
  made.tensor = made.seen;
  return true;
}

std::optional<const char*> HeadTensors::check() {
  bool is_exchanged = false, is_written = was_stepped_, is_gone = false;
  for (Made& made : made_) {
    if (!exchange(made)) continue;
    is_exchanged = true;
    is_gone |= is_freed(made.seen);
  }
  for (const Read& read : read_) {
    is_written |= static_cast<uint32_t>(read.tensor._version()) != read.version;
    is_gone |= is_freed(read.tensor);
  }
  if (is_written) return "were written in place since (by an optimizer's step, say)";
  if (is_gone) {
    return "were freed since (FSDP2 frees weights after their module's forward)";
  }
  return is_exchanged ? std::optional("") : std::nullopt;
}

bool HeadTensors::any() {
  return !alive().empty();
}

void HeadTensors::stepped(const std::vector<Tensor>& written) {
  const auto is_written = [&](const std::optional<Tensor>& owned) {
    return owned.has_value() &&
           std::any_of(written.begin(), written.end(),
                       [&](const Tensor& each) { return each.is_same(*owned); });
  };
  for (HeadTensors* head : alive()) {
    head->was_stepped_ |= std::any_of(head->owned_.begin(), head->owned_.end(), is_written);
  }
}

}  // namespace memopt::python
