#include "arguments.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>

#include <algorithm>

#include "flags.h"
#include "geometry.h"

namespace memopt::saved {

namespace {

class EachHandle : public ArgumentsHandle {
 public:
  explicit EachHandle(std::vector<c10::intrusive_ptr<Handle>> handles)
      : handles_(std::move(handles)) {}

  bool has(size_t number) const override { return handles_[number].defined(); }

  std::vector<at::Tensor> restore() override {
    std::vector<at::Tensor> tensors;
    tensors.reserve(handles_.size());
    for (const auto& handle : handles_)
      tensors.push_back(handle.defined() ? handle->restore() : at::Tensor());
    return tensors;
  }

 private:
  std::vector<c10::intrusive_ptr<Handle>> handles_;
};

class EachArgument : public FateOfArguments {
 public:
  explicit EachArgument(c10::intrusive_ptr<Fate> fate) : fate_(std::move(fate)) {}

  c10::intrusive_ptr<ArgumentsHandle> take(const std::vector<ArgumentTensor>& tensors) override {
    std::vector<c10::intrusive_ptr<Handle>> handles(tensors.size());
    bool takes_any = false;
    for (size_t number = 0; number < tensors.size(); ++number) {
      const auto& argument = tensors[number];
      if (argument.tensor.is_inference() || !argument.may_leave_device) continue;
      handles[number] = fate_->take(argument.values);
      takes_any = takes_any || handles[number].defined();
    }
    if (!takes_any) return {};
    return c10::make_intrusive<EachHandle>(std::move(handles));
  }

 private:
  c10::intrusive_ptr<Fate> fate_;
};

}  // namespace

c10::intrusive_ptr<FateOfArguments> for_each_argument(c10::intrusive_ptr<Fate> fate) {
  return c10::make_intrusive<EachArgument>(std::move(fate));
}

Arguments::Arguments(const std::vector<ArgumentTensor>& tensors, FateOfArguments* fate) {
  if (fate != nullptr) taken_ = fate->take(tensors);
  const bool has_hooks = at::SavedTensorDefaultHooks::get_hooks().has_value();
  Flags keeping = flags();
  keeping.keeping_arguments = true;
  const FlagsGuard guard(keeping);
  held_.reserve(tensors.size());
  for (size_t number = 0; number < tensors.size(); ++number) {
    const auto& tensor = tensors[number].tensor;
    Held held{Version(tensor), {}, {}, {}, tensor.requires_grad()};
    if (tensor.is_inference()) {
      held.inference = tensor;
    } else if (!taken_.defined() || !taken_->has(number)) {
      held.saved = torch::autograd::SavedVariable(tensor, /*is_output=*/false);
      if (has_hooks) held.hooked = storage_of(tensor);
    }
    held_.push_back(std::move(held));
  }
}

std::vector<at::Tensor> Arguments::restore() const {
  auto tensors = taken_.defined() ? taken_->restore() : std::vector<at::Tensor>(held_.size());
  for (size_t number = 0; number < held_.size(); ++number) {
    auto& tensor = tensors[number];
    const auto& held = held_[number];
    if (!tensor.defined()) {
      tensor = held.inference.defined() ? held.inference : held.saved.unpack();
      if (held.version.moved()) {
        // What the hooks have is for every recompute, and this one may write to it as forward did.
        const at::AutoGradMode grad_mode(held.requires_grad);
        tensor = tensor.clone();
      }
    } else if (tensor.requires_grad() != held.requires_grad) {
      // A fate that gave another tensor back: that one has no history, and is this region's own.
      auto* impl = tensor.unsafeGetTensorImpl();
      tensor = at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(),
                                                        /*allow_tensor_metadata_change=*/false));
      tensor.set_requires_grad(held.requires_grad);
    }
  }
  return tensors;
}

std::optional<Arguments::Written> Arguments::first_written(bool hooks_copy) const {
  for (size_t number = 0; number < held_.size(); ++number) {
    const auto& held = held_[number];
    if (!held.version.moved()) continue;
    const bool is_copy =
        hooks_copy && held.hooked != nullptr && storage_of(held.saved.unpack()) != held.hooked;
    if (!is_copy) return Written{number, held.version};
  }
  return std::nullopt;
}

}  // namespace memopt::saved
