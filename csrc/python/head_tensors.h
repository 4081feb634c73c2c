// The tensors that a head's logits will be made of, and whether they still are what they were.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

namespace memopt::python {

// With the GIL throughout.
class HeadTensors {
 public:
  using Three = std::tuple<at::Tensor, at::Tensor, std::optional<at::Tensor>>;

  // Without what requires no gradient now, whatever becomes of its flag: that comes detached.
  // `owned`: weight and bias as the caller knows them, which an optimizer may write.
  HeadTensors(const at::Tensor& input, const at::Tensor& weight,
              const std::optional<at::Tensor>& bias, std::vector<std::optional<at::Tensor>> owned);
  ~HeadTensors();
  HeadTensors(const HeadTensors&) = delete;
  HeadTensors& operator=(const HeadTensors&) = delete;

  // Notes what something made of the logits will be made of later.
  void reads(const at::Tensor& tensor);

  // input, weight and bias, with the memory that they had.
  Three now() const;

  // nullopt: all are as they were. "": the memory of one was exchanged (weight.data = other), and
  // now() has that of then. Anything else: what has become of one, for the text of an error.
  std::optional<const char*> check();

  static bool any();
  // Fused optimizers write weights without counting it in their versions.
  static void stepped(const std::vector<at::Tensor>& written);

 private:
  struct Made {
    at::Tensor tensor;  // undefined: there is no bias
    at::Tensor seen;    // a view of it, which keeps the memory; undefined without a gradient
  };
  struct Read {
    at::Tensor tensor;
    uint32_t version;
  };

  void add(const at::Tensor& tensor);
  bool exchange(Made& made);

  std::vector<Made> made_;
  std::vector<Read> read_;
  std::vector<std::optional<at::Tensor>> owned_;
  bool was_stepped_ = false;
};

}  // namespace memopt::python
