// What limits ask for again and again.
#pragma once
#include <initializer_list>

#include "../opapi/operator.h"

namespace sim {

using Dtypes = std::initializer_list<at::ScalarType>;

struct Named {
  TensorHandle tensor;
  const char* name;
};
using Tensors = std::initializer_list<Named>;

inline bool is_310p() { return soc() == Soc::ascend310p; }
inline bool is_950() { return soc() == Soc::ascend950; }

inline void require_dtype(const TensorHandle& x, const char* name, Dtypes allowed) {
  if (!x) return;
  for (auto dtype : allowed) {
    if (x->scalar_type() == dtype) return;
  }
  std::ostringstream list;
  for (auto dtype : allowed) list << (list.tellp() ? ", " : "") << dtype;
  require(false, name, " is ", x->scalar_type(), "; supported here: ", list.str());
}

inline void require_all_given(Tensors all) {
  for (auto& [tensor, name] : all) require_given(tensor, name);
}

/// float32, float16 and (not on 310P) bfloat16.
inline void require_float(const TensorHandle& x, const char* name) {
  if (is_310p()) return require_dtype(x, name, {at::kFloat, at::kHalf});
  require_dtype(x, name, {at::kFloat, at::kHalf, at::kBFloat16});
}

inline void require_same_dtype(const TensorHandle& x, const char* name, const TensorHandle& like,
                               const char* like_name) {
  if (!x || !like) return;
  require(x->scalar_type() == like->scalar_type(), name, " is ", x->scalar_type(), ", ", like_name, " is ",
          like->scalar_type(), ": they must be the same");
}

inline void require_shape(const TensorHandle& x, const char* name, at::IntArrayRef shape) {
  if (!x) return;
  require(x->sizes() == shape, name, " has shape ", x->sizes(), ", it must be ", shape);
}

inline void require_axes(const TensorHandle& x, const char* name, int64_t least, int64_t most) {
  if (!x) return;
  require(x->dim() >= least && x->dim() <= most, name, " has ", x->dim(), " axes, supported are ", least,
          " to ", most);
}

inline void require_contiguous(const TensorHandle& x, const char* name) {
  if (!x) return;
  require(x->is_contiguous(), name, " is not contiguous (strides ", x->strides(), " of shape ", x->sizes(),
          ")");
}

inline void require_not_empty(const TensorHandle& x, const char* name) {
  if (!x) return;
  require(x->numel() > 0, name, " is empty");
}

/// Bytes of the last axis.
inline int64_t row_bytes(const TensorHandle& x) {
  return x->dim() ? x->size(-1) * static_cast<int64_t>(x->element_size()) : 0;
}

}  // namespace sim
