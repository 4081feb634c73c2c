#include "metadata.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <sstream>

namespace memopt::saved {

Metadata Metadata::of(const at::Tensor& tensor) {
  Metadata metadata{{}, tensor.scalar_type(), tensor.device()};
  // A nested tensor of strided layout has no sizes.
  if (!tensor.unsafeGetTensorImpl()->is_nested() || tensor.layout() == at::kJagged) {
    const auto sizes = tensor.sym_sizes();
    metadata.sizes.append(sizes.begin(), sizes.end());
  }
  return metadata;
}

bool Metadata::operator==(const Metadata& other) const {
  return dtype == other.dtype && device == other.device && sizes.size() == other.sizes.size() &&
         std::equal(sizes.begin(), sizes.end(), other.sizes.begin(),
                    [](const c10::SymInt& a, const c10::SymInt& b) {
                      return a.is_heap_allocated() || b.is_heap_allocated()
                                 ? a.sym_eq(b).guard_bool(__FILE__, __LINE__)
                                 : a.as_int_unchecked() == b.as_int_unchecked();
                    });
}

std::string Metadata::text() const {
  std::ostringstream text;
  text << c10::getDtypeNames(dtype).first << '[';
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    text << (dim == 0 ? "" : ", ") << sizes[dim];
  }
  text << "] on " << device;
  return text.str();
}

}  // namespace memopt::saved
