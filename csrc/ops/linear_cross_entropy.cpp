// The cross entropy of a linear's output, in chunks of rows: neither the logits nor their gradient
// exist for more than one chunk.
//
//   for each chunk:   logits = x W^T + bias                          PyTorch's product
//                     loss, log_sum, entropy; over the logits: g     one kernel
//                     dx = g W                                       PyTorch's products
//                     dW += g^T x     dbias += sum over rows (g)
//
// The order of sums: over the words a product's own; over the rows of a chunk a product's own; over
// chunks from the first to the last. So results depend on the chunk size, and on the number of
// threads only as far as PyTorch's products do.
//
// dW is summed in the dtype of the result for float32 and float64, where the product adds to it; in
// float32 for float16, which is what is returned then; and for bfloat16 in 24 bits
// (kernels/split_sum.h), block by block of W's rows, whose products are rounded to bfloat16.
// dbias is summed in the type of sums.
//
// Memory: the logits of a chunk; a block of kBlockBytes, and 1 byte an element of W, for bfloat16;
// a block for a bias of 16 bits.
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "checks.h"
#include "cross_entropy.h"
#include "declare.h"
#include "launch.h"
#include "tensors.h"

namespace memopt::ops {
namespace {

using kernels::SplitSumParams;
using kernels::cpu::Kernels;

// Of a chunk's logits, at least; a sixteenth of the rows, up to kMostRows, if that is more. At
// least kLeastRows, whatever they take.
//
// Each chunk reads and writes the sum of the weight's gradient once, so that few rows are mostly
// that traffic. So a quarter of the rows, as long as a chunk takes no more than kWordBytes for each
// word: its logits, and what a bfloat16 sum has beside its result.
constexpr int64_t kChunkBytes = int64_t{12} << 20;
constexpr int64_t kMostRows = 512;
constexpr int64_t kLeastRows = 128;
constexpr int64_t kWordBytes = 1024;

// `sum_bytes`: for each word, what the sum takes beside its result where there are several chunks.
int64_t chunk_rows(std::optional<int64_t> chunk, int64_t rows, int64_t cols, int64_t itemsize,
                   int64_t sum_bytes) {
  if (chunk.has_value()) return std::min(*chunk, std::max<int64_t>(rows, 1));
  const int64_t fitting = kChunkBytes / (cols * itemsize);
  const int64_t sixteenth = std::min(kernels::ceil_div(rows, 16), kMostRows);
  const int64_t quarter = std::min(kernels::ceil_div(rows, 4), (kWordBytes - sum_bytes) / itemsize);
  const int64_t each = std::max({fitting, sixteenth, quarter, kLeastRows});
  // One chunk has no sum: where that is more than the logits of the other rows, it takes less.
  const bool is_one = (rows - each) * itemsize <= sum_bytes;
  return is_one ? std::max<int64_t>(rows, 1) : each;
}

// All rows are the tensor itself: a view takes the host longer than what it is for.
Tensor rows_at(const Tensor& tensor, int64_t begin, int64_t size) {
  return size == tensor.size(0) ? tensor : tensor.narrow(0, begin, size);
}

constexpr int64_t kBlockBytes = int64_t{2} << 20;  // in the caches of its threads
constexpr int64_t kDeviceBlockBytes = int64_t{64} << 20;

// A product's sum over the chunks: dW.
class WeightGradient {
 public:
  WeightGradient(const char* op, const Tensor& result, at::ScalarType dtype, int64_t chunks)
      : op_(op), result_(result), dtype_(dtype) {
    if (dtype == at::kBFloat16 && chunks > 1) {
      lower_ = at::zeros(result.sizes(), result.options().dtype(at::kByte));
    }
  }

  // += g^T x
  void add(const Tensor& g, const Tensor& x) {
    const bool is_first = is_first_;
    is_first_ = false;
    if (dtype_ != at::kHalf && is_first) {
      at::mm_out(result_, g.t(), x);
    } else if (dtype_ == result_.scalar_type() && !lower_.defined()) {
      at::addmm_out(result_, result_, g.t(), x);
    } else {
      add_blocks(g, x, is_first);
    }
  }

  void finish() {
    if (is_first_) result_.zero_();
    if (lower_.defined()) split_sum(Tensor(), 0, result_.size(0));
    lower_ = Tensor();
  }

 private:
  void add_blocks(const Tensor& g, const Tensor& x, bool is_first) {
    const int64_t words = result_.size(0), features = result_.size(1);
    const int64_t bytes = result_.is_cpu() ? kBlockBytes : kDeviceBlockBytes;
    const int64_t most = std::min(
        words, std::max<int64_t>(1, bytes / std::max<int64_t>(1, features * x.element_size())));
    const Tensor block = at::empty({most, features}, x.options());
    for (int64_t begin = 0; begin < words; begin += most) {
      const int64_t count = std::min(most, words - begin);
      Tensor product = block.narrow(0, 0, count);
      at::mm_out(product, g.narrow(1, begin, count).t(), x);
      if (lower_.defined()) {
        split_sum(product, begin, count);
      } else if (is_first) {
        result_.narrow(0, begin, count).copy_(product);
      } else {
        result_.narrow(0, begin, count).add_(product);
      }
    }
  }

  // Adds `product` to rows of the sum, or rounds them to the result where there is none.
  void split_sum(const Tensor& product, int64_t begin, int64_t count) {
    const Tensor upper = result_.narrow(0, begin, count), lower = lower_.narrow(0, begin, count);
    SplitSumParams p{};
    p.upper = static_cast<uint16_t*>(upper.mutable_data_ptr());
    p.lower = lower.mutable_data_ptr<uint8_t>();
    p.x = static_cast<const uint16_t*>(const_data(product));
    p.size = upper.numel();
    launch(
        op_, upper,
        [&](const Kernels& cpu) {
          parallel_blocks(p.size,
                          [&](int64_t first, int64_t last) { cpu.split_sum(p, first, last); });
        },
        MEMOPT_CUDA_KERNEL(split_sum), p);
  }

  const char* op_;
  Tensor result_;
  at::ScalarType dtype_;  // of the products
  Tensor lower_;
  bool is_first_ = true;
};

void check_linear(const char* op, const Tensor& input, const Tensor& weight,
                  const OptionalTensor& bias) {
  check_input(op, "input", input);
  TORCH_CHECK(input.dim() == 2 && weight.defined() && weight.dim() == 2, op,
              ": input and linear_weight must have two dimensions here");
  check_like(op, "linear_weight", weight, "input", input, {weight.sym_size(0), input.sym_size(1)});
  if (bias.has_value() && bias->defined()) {
    check_like(op, "linear_bias", *bias, "input", input, {weight.sym_size(0)});
  }
}

// What the user called.
const char* name_of(bool log_probs, const Tensor& target) {
  if (!target.defined()) return "linear_logsumexp";
  return log_probs ? "linear_log_probs" : "linear_cross_entropy";
}

// dbias += sum over rows (g). On a CPU PyTorch adds up 16-bit numbers in a float32 copy of them, so
// in blocks.
void add_rows(const Tensor& dbias, const Tensor& g) {
  const int64_t words = g.size(1);
  const bool is_copied = g.is_cpu() && g.scalar_type() != dbias.scalar_type();
  const int64_t column = g.size(0) * dbias.element_size();
  const int64_t most = is_copied ? std::max<int64_t>(1, kBlockBytes / column) : words;
  for (int64_t begin = 0; begin < words; begin += most) {
    const int64_t count = std::min(most, words - begin);
    dbias.narrow(0, begin, count)
        .add_(at::sum(g.narrow(1, begin, count), {0}, false, dbias.scalar_type()));
  }
}

}  // namespace

LossResults _linear_cross_entropy(
    const Tensor& input, const Tensor& linear_weight, const OptionalTensor& linear_bias,
    const OptionalTensor& target_or_none, const OptionalTensor& class_weight,
    const OptionalTensor& grad_loss, const OptionalTensor& grad_entropy,
    const OptionalTensor& log_sum, const OptionalTensor& entropy, int64_t ignore_index,
    double label_smoothing, double softcap, double logit_scale, double z_loss, bool log_probs,
    bool with_entropy, std::array<bool, 3> output_mask, std::optional<int64_t> chunk) {
  const Tensor target = target_or_none.value_or(Tensor());
  const Loss loss{name_of(log_probs, target),
                  target,
                  class_weight,
                  ignore_index,
                  label_smoothing,
                  softcap,
                  logit_scale,
                  z_loss};
  const char* op = loss.op;
  check_linear(op, input, linear_weight, linear_bias);
  const c10::SymInt n = input.sym_size(0), words = linear_weight.sym_size(0);
  check_loss(loss, input, n, words);
  TORCH_CHECK(!chunk.has_value() || *chunk >= 1, op, ": chunk must be at least 1, got ",
              chunk.value_or(0));

  RowTensors rows;
  rows.again = log_sum.has_value() && log_sum->defined();
  rows.loss = empty_rows(input, n, !rows.again);
  rows.log_sum = rows.again ? as_sums(log_sum, input) : empty_rows(input, n, true);
  rows.entropy = rows.again ? as_sums(entropy, input) : empty_rows(input, n, with_entropy);
  rows.dloss = as_sums(grad_loss, input);
  rows.dentropy = as_sums(grad_entropy, input);
  const auto sums = input.options().dtype(accumulate_type(input));
  const auto weight_options = input.scalar_type() == at::kHalf ? sums : input.options();
  Tensor dx, dweight, dbias, total;
  if (output_mask[0]) dx = at::empty_symint(input.sym_sizes(), input.options());
  if (output_mask[1]) dweight = at::empty_symint(linear_weight.sym_sizes(), weight_options);
  if (output_mask[2]) dbias = at::zeros_symint({words}, sums);
  const auto results = [&] {
    return rows.again
               ? LossResults{total, Tensor(), Tensor(), Tensor(), dx, dweight, dbias}
               : LossResults{total, rows.loss, rows.log_sum, rows.entropy, dx, dweight, dbias};
  };
  if (input.is_meta()) {
    if (!rows.again) total = at::empty({}, sums);
    return results();
  }

  const int64_t count = input.size(0), cols = linear_weight.size(0);
  check_classes(loss, cols);
  const bool has_sum = output_mask[1] && input.scalar_type() == at::kBFloat16;
  const int64_t each =
      chunk_rows(chunk, count, cols, input.element_size(), has_sum ? input.size(1) : 0);
  const bool wants_gradients = output_mask[0] || output_mask[1] || output_mask[2];
  const Tensor bias = linear_bias.value_or(Tensor());
  const Tensor buffer = at::empty({std::min(each, count), cols}, input.options());
  std::optional<WeightGradient> weight_gradient;
  if (output_mask[1]) {
    weight_gradient.emplace(op, dweight, input.scalar_type(), kernels::ceil_div(count, each));
  }
  for (int64_t begin = 0; begin < count; begin += each) {
    const int64_t size = std::min(each, count - begin);
    const Tensor x = rows_at(input, begin, size);
    Tensor logits = rows_at(buffer, 0, size);
    if (bias.defined()) {
      at::addmm_out(logits, bias, x, linear_weight.t());
    } else {
      at::mm_out(logits, x, linear_weight.t());
    }
    run_loss(loss, rows, begin, logits, wants_gradients ? logits : Tensor());
    if (output_mask[0]) {
      Tensor dx_rows = rows_at(dx, begin, size);
      at::mm_out(dx_rows, logits, linear_weight);
    }
    if (output_mask[1]) weight_gradient->add(logits, x);
    if (output_mask[2]) add_rows(dbias, logits);
  }
  if (output_mask[1]) weight_gradient->finish();
  if (!rows.again) total = total_of(rows.loss);
  return results();
}

MEMOPT_DECLARE_PRIVATE(
    _linear_cross_entropy, {},
    R"(_linear_cross_entropy(Tensor input, Tensor linear_weight, Tensor? linear_bias, Tensor? target,
       Tensor? class_weight, Tensor? grad_loss, Tensor? grad_entropy, Tensor? log_sum,
       Tensor? entropy, *, int ignore_index, float label_smoothing=0.0, float softcap=0.0,
       float logit_scale=1.0, float z_loss=0.0, bool log_probs=False, bool with_entropy=False,
       bool[3] output_mask, int? chunk=None)
       -> (Tensor total, Tensor loss, Tensor log_sum, Tensor entropy, Tensor grad_input,
           Tensor grad_weight, Tensor grad_bias))");

}  // namespace memopt::ops
