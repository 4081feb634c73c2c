// Every operator without a kernel of its own: the host learns the results' geometry by running it
// on meta tensors, allocates them, and queues a task that runs the CPU's kernel on the hidden
// mapping and copies what it gives into them. Where there is no geometry to be had (its size
// depends on data, it gives a number, no meta kernel) the host waits for the stream, as CUDA's
// operators do.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>

#include <exception>
#include <map>
#include <mutex>

#include "control.h"
#include "fallback.h"
#include "random.h"
#include "tensors.h"

namespace sim {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

namespace {

struct Synchronised {
  std::mutex mutex;
  std::map<std::string, int64_t> calls;
};

Synchronised& synchronised() {
  static auto* it = new Synchronised;
  return *it;
}

c10::Device device_of(const c10::OperatorHandle& op, const std::vector<IValue>& arguments) {
  std::optional<c10::Device> found;
  for (const IValue& argument : arguments) {
    with_tensors(argument, [&](const Tensor& tensor) {
      if (!is_sim(tensor)) return tensor;
      TORCH_CHECK(!found.has_value() || *found == tensor.device(), "sim: ", op.schema().name(),
                  ": expected all tensors to be on the same device, found ", *found, " and ",
                  tensor.device());
      found = tensor.device();
      return tensor;
    });
    if (!found.has_value() && argument.isDevice() && argument.toDevice().type() == kType) {
      const auto device = argument.toDevice();
      found = c10::Device(kType, device.has_index() ? device.index() : current_device());
    }
  }
  TORCH_CHECK(found.has_value(), "sim: ", op.schema().name(), " was called with no tensor of sim");
  return *found;
}

Tensor on_meta(const Tensor& tensor) {
  if (tensor.is_cpu() && tensor.dim() == 0) return tensor;  // a number, as for all devices
  const auto count = static_cast<int64_t>(tensor.storage().nbytes() / tensor.itemsize());
  const auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(at::kMeta);
  return at::empty({count}, options)
      .as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
}

IValue on_meta(const IValue& argument) {
  if (argument.isDevice() && argument.toDevice().type() == kType) return c10::Device(at::kMeta);
  if (argument.isGenerator()) return IValue();
  return with_tensors(argument, [](const Tensor& tensor) { return on_meta(tensor); });
}

// The arguments of a task. A CPU tensor is read now: the host may change it before the task runs.
IValue for_stream(const c10::OperatorHandle& op, const IValue& argument) {
  if (argument.isDevice() && argument.toDevice().type() == kType) return c10::Device(at::kCPU);
  const bool is_index = argument.isOptionalTensorList();
  return with_tensors(argument, [&](const Tensor& tensor) {
    if (is_sim(tensor)) return hidden_view(tensor);
    TORCH_CHECK(tensor.is_cpu() && (tensor.dim() == 0 || is_index), "sim: ", op.schema().name(),
                ": expected all tensors to be on sim, found one of ", tensor.sizes(), " on ",
                tensor.device());
    Tensor copy = tensor.clone();
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      copy.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    return copy;
  });
}

bool writes(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

// The argument that a result is, or is a view of.
std::optional<size_t> source_of(const c10::FunctionSchema& schema, const c10::Argument& result) {
  if (result.alias_info() == nullptr) return std::nullopt;
  const auto& sets = result.alias_info()->beforeSets();
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto* info = schema.arguments()[i].alias_info();
    if (info != nullptr && info->beforeSets() == sets) return i;
  }
  return std::nullopt;
}

Tensor view_like(const Tensor& source, const Tensor& meta) {
  Tensor view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(source.storage()), source.key_set(), meta.dtype());
  auto* impl = view.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(meta.sizes(), meta.strides(), meta.storage_offset());
  return view;
}

// out= arguments take the size that the meta kernel gave theirs.
void resize_like(const Tensor& tensor, const Tensor& meta) {
  if (tensor.sizes() == meta.sizes()) return;
  tensor.resize_(meta.sizes());
  tensor.as_strided_(meta.sizes(), meta.strides());
}

class Call {
 public:
  Call(const c10::OperatorHandle& op, std::vector<IValue> arguments)
      : op_(op),
        schema_(op.schema()),
        arguments_(std::move(arguments)),
        device_(device_of(op, arguments_)),
        stream_(current_stream(device_.index())) {}

  Stack run() {
    const std::optional<Stack> meta = geometry();
    const Kernel kernel = kernel_for(op_, schema_, arguments_, for_stream_all(), device_);
    return meta.has_value() ? queue(*meta, kernel) : wait_for(kernel);
  }

 private:
  std::vector<IValue> for_stream_all() const {
    std::vector<IValue> all;
    for (const IValue& argument : arguments_) all.push_back(for_stream(op_, argument));
    return all;
  }

  // What the operator gives on meta tensors; results that are arguments stay as they are.
  std::optional<Stack> geometry() {
    bool needed = false;
    for (const auto& argument : schema_.arguments()) {
      needed = needed || (argument.kwarg_only() && writes(argument));
    }
    for (const auto& result : schema_.returns()) {
      needed = needed || !writes(result);
      const auto kind = result.type()->kind();
      if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType) {
        return std::nullopt;
      }
    }
    if (!needed) return Stack(schema_.returns().size());
    Stack stack;
    for (const IValue& argument : arguments_) stack.push_back(on_meta(argument));
    const Stack given = stack;
    try {
      op_.callBoxed(stack);
    } catch (const std::exception&) {
      return std::nullopt;
    }
    for (size_t i = 0; i < given.size(); ++i) {
      if (writes(schema_.arguments()[i]) && given[i].isTensor() && arguments_[i].isTensor() &&
          arguments_[i].toTensor().defined()) {
        resize_like(arguments_[i].toTensor(), given[i].toTensor());
      }
    }
    return stack;
  }

  Stack queue(const Stack& meta, const Kernel& kernel) {
    Stack results;
    Stack into;
    bool computes = meta.empty();
    for (size_t i = 0; i < schema_.returns().size(); ++i) {
      const auto source = source_of(schema_, schema_.returns()[i]);
      if (writes(schema_.returns()[i]) && source.has_value()) {
        results.push_back(arguments_[*source]);
        into.emplace_back();
        computes = true;
      } else if (source.has_value() && meta[i].isTensor()) {
        results.push_back(view_like(arguments_[*source].toTensor(), meta[i].toTensor()));
        into.emplace_back();
      } else {
        results.push_back(with_tensors(
            meta[i], [&](const Tensor& like) { return empty_like_geometry(like, device_); }));
        into.push_back(
            with_tensors(results.back(), [](const Tensor& t) { return hidden_view(t); }));
        computes = true;
      }
    }
    if (!computes) return results;
    const auto name = op_.operator_name().name;
    enqueue(stream_, {Kind::kKernel, name, [kernel, into] { store(kernel(), into); }});
    return results;
  }

  // Copies what the CPU's kernel gave into the memory of the results.
  static void store(const Stack& given, const Stack& into) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto copy = [](const Tensor& to, const Tensor& from) {
      if (!to.defined()) return;
      TORCH_CHECK(from.defined() && from.sizes() == to.sizes() && from.dtype() == to.dtype(),
                  "the meta kernel promised another result");
      to.copy_(from);
    };
    for (size_t i = 0; i < into.size(); ++i) {
      if (into[i].isTensor()) copy(into[i].toTensor(), given.at(i).toTensor());
      if (!into[i].isTensorList()) continue;
      const auto to = into[i].toTensorVector();
      const auto from = given.at(i).toTensorVector();
      for (size_t k = 0; k < to.size(); ++k) copy(to[k], from.at(k));
    }
  }

  Stack wait_for(const Kernel& kernel) {
    struct Outcome {
      Stack results;
      std::exception_ptr raised;
    };
    const auto name = op_.operator_name().name;
    {
      const std::lock_guard<std::mutex> lock(synchronised().mutex);
      ++synchronised().calls[name];
    }
    const auto outcome = std::make_shared<Outcome>();
    enqueue(stream_, {Kind::kKernel, name, [outcome, kernel] {
                        try {
                          outcome->results = kernel();
                        } catch (const std::exception&) {
                          outcome->raised = std::current_exception();
                        }
                      }});
    wait_on_host(record(stream_));
    if (outcome->raised) std::rethrow_exception(outcome->raised);
    Stack results;
    for (size_t i = 0; i < schema_.returns().size(); ++i) {
      const auto source = source_of(schema_, schema_.returns()[i]);
      TORCH_CHECK(!source.has_value() || writes(schema_.returns()[i]), "sim: ", name,
                  " gives a view, and has no meta kernel");
      results.push_back(source.has_value() ? arguments_[*source]
                                           : with_tensors(outcome->results[i], to_device()));
    }
    return results;
  }

  std::function<Tensor(const Tensor&)> to_device() const {
    return [this](const Tensor& from) {
      Tensor to = empty_like_geometry(from, device_);
      enqueue(stream_, {Kind::kKernel, "results", [from, into = hidden_view(to)] {
                          const at::AutoDispatchBelowADInplaceOrView below;
                          into.copy_(from);
                        }});
      return to;
    };
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  const std::vector<IValue> arguments_;
  const c10::Device device_;
  const c10::Stream stream_;
};

}  // namespace

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const size_t count = op.schema().arguments().size();
  auto arguments = torch::jit::last(*stack, count).vec();
  torch::jit::drop(*stack, count);
  for (IValue& result : Call(op, std::move(arguments)).run()) stack->push_back(std::move(result));
}

std::map<std::string, int64_t> synchronised_calls() {
  const std::lock_guard<std::mutex> lock(synchronised().mutex);
  return synchronised().calls;
}

}  // namespace sim
