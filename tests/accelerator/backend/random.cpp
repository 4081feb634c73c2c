#include "random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones_like.h>
#include <torch/library.h>

#include "generator.h"

namespace sim {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

namespace {

// splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014).
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

Stack call(const c10::OperatorHandle& op, Stack stack) {
  const at::AutoDispatchBelowADInplaceOrView below;
  op.callBoxed(stack);
  return stack;
}

Tensor state_tensor(const Draw& drawn) {
  Tensor state = at::detail::empty_cpu({2}, at::kLong);
  auto* words = static_cast<int64_t*>(state.data_ptr());
  words[0] = static_cast<int64_t>(drawn.seed);
  words[1] = static_cast<int64_t>(drawn.offset);
  return state;
}

// memopt's: they compute their numbers from a state [seed, offset]. Without one they would draw it
// from the CPU's generator. They return the state that they drew, and none that they were given.
Kernel private_kernel(const c10::OperatorHandle& op, std::vector<IValue> on_stream,
                      std::optional<size_t> place, const Tensor& state) {
  if (place.has_value()) {
    on_stream[*place] = state;
    return [op, on_stream, state] {
      Stack results = call(op, on_stream);
      if (!results.back().toTensor().defined()) results.back() = state;
      return results;
    };
  }
  TORCH_CHECK(op.schema().name() == "memopt::_dropout_forward", "sim: no generator for ",
              op.schema().name());
  // Its kernel is the backward's, which takes the state.
  static const auto backward =
      c10::Dispatcher::singleton().findSchemaOrThrow("memopt::_dropout_backward", "");
  return [on_stream, state] {
    Stack results = call(backward, {on_stream[0], state, on_stream[1]});
    results.emplace_back(state);
    return results;
  };
}

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p,
                                          std::optional<bool> train) {
  if (!train.value_or(true) || input.numel() == 0) {
    return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  }
  Tensor mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input.mul(mask).mul(p == 1 ? 0 : 1 / (1 - p)), mask};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("native_dropout", &native_dropout);
}

}  // namespace

Kernel kernel_for(const c10::OperatorHandle& op, const c10::FunctionSchema& schema,
                  const std::vector<IValue>& arguments, std::vector<IValue> on_stream,
                  c10::Device device) {
  const auto place = [&](const char* name) -> std::optional<size_t> {
    const auto index = schema.argumentIndexWithName(name);
    return index.has_value() ? std::optional<size_t>(*index) : std::nullopt;
  };
  if (const auto generator = place("generator")) {
    const IValue& given = arguments[*generator];
    const Draw drawn =
        draw(given.isGenerator() ? given.toGenerator() : default_generator(device.index()));
    on_stream[*generator] = at::detail::createCPUGenerator(mix(mix(drawn.seed) + drawn.offset));
  } else if (op.hasTag(at::Tag::nondeterministic_seeded)) {
    const auto state = place("rng_state");
    if (!state.has_value() || arguments[*state].isNone() ||
        !arguments[*state].toTensor().defined()) {
      return private_kernel(op, std::move(on_stream), state,
                            state_tensor(draw(default_generator(device.index()))));
    }
  }
  return [op, on_stream] { return call(op, on_stream); };
}

}  // namespace sim
