// What hardware rejects of cache operators: documents of ops-transformer (scatter_pa_kv_cache) and ops-nn
// (index/scatter, index/scatter_nd_update).
#include "checks.h"

using namespace sim;

namespace {

std::string text(CP x, const char* otherwise) { return x ? x : otherwise; }

/// [blocks, size, heads, dim], or in FRACTAL_NZ order [blocks, heads * dim / width, size, width].
void check_cache(const TensorHandle& cache, const char* name, const TensorHandle& rows, bool nz) {
  require_axes(cache, name, 4, 4);
  require_contiguous(cache, name);
  require_same_dtype(cache, name, rows, "key or value");
  auto heads = rows->size(1), dim = rows->size(2), width = 32 / static_cast<int64_t>(rows->element_size());
  if (nz) {
    require((heads * dim) % width == 0, "N * D is ", heads * dim, ", PA_NZ needs a multiple of ", width);
    require(cache->size(1) == heads * dim / width && cache->size(3) == width, name, " has shape ",
            cache->sizes(), ", PA_NZ is [blocks, ", heads * dim / width, ", block size, ", width, "]");
  } else {
    require(cache->size(2) == heads && cache->size(3) == dim, name, " has shape ", cache->sizes(),
            ", it must be [blocks, block size, ", heads, ", ", dim, "]");
  }
}

}  // namespace

LIMITS(aclnnScatterPaKvCache, T, key, R, key_cache, T, slots, T, value, R, value_cache, T, compress_lens, T,
       compress_offsets, T, seq_lens, CP, cache_mode, CP, scatter_mode, IA, strides, IA, offsets) {
  require_all_given({{key, "key"},
                     {key_cache, "keyCacheRef"},
                     {slots, "slotMapping"},
                     {value, "value"},
                     {value_cache, "valueCacheRef"}});
  require_dtype(key, "key", {at::kHalf, at::kBFloat16, at::kChar});
  require_same_dtype(value, "value", key, "key");
  require_dtype(slots, "slotMapping", {at::kInt, at::kLong});
  auto mode = text(cache_mode, "Norm"), scatter = text(scatter_mode, "None");
  require(mode == "Norm" || mode == "PA_NZ", "cacheMode is \"", mode, "\": Norm or PA_NZ");
  require(scatter == "None" && !compress_lens && !compress_offsets && !seq_lens, "scatterMode \"", scatter,
          "\" and compression are not simulated");
  require_axes(key, "key", 3, 3);
  require_contiguous(slots, "slotMapping");
  require_shape(slots, "slotMapping", {key->size(0)});
  check_cache(key_cache, "keyCacheRef", key, mode == "PA_NZ");
  if (!value->dim()) return;  // only keys
  require_axes(value, "value", 3, 3);
  require(value->sizes().slice(0, 2) == key->sizes().slice(0, 2), "key has shape ", key->sizes(), ", value ",
          value->sizes());
  check_cache(value_cache, "valueCacheRef", value, mode == "PA_NZ");
  // ops-transformer, attention/scatter_pa_kv_cache/op_host/scatter_pa_kv_cache_tiling.cpp: one number of blocks, one size.
  const int64_t size_axis = mode == "PA_NZ" ? 2 : 1;
  require(value_cache->size(0) == key_cache->size(0) &&
              value_cache->size(size_axis) == key_cache->size(size_axis),
          "keyCacheRef has shape ", key_cache->sizes(), ", valueCacheRef ", value_cache->sizes(),
          ": blocks and their size must be the same");
}

LIMITS(aclnnInplaceScatterUpdate, R, data, T, indices, T, updates, int64_t, axis) {
  require_all_given({{data, "data"}, {indices, "indices"}, {updates, "updates"}});
  require_dtype(data, "data", {at::kChar, at::kByte, at::kHalf, at::kFloat, at::kInt, at::kBFloat16});
  require_same_dtype(updates, "updates", data, "data");
  require_dtype(indices, "indices", {at::kInt, at::kLong});
  for (auto& [tensor, name] : Tensors{{data, "data"}, {indices, "indices"}, {updates, "updates"}}) {
    require_not_empty(tensor, name);
  }
  require_axes(data, "data", 2, 8);
  require_axes(updates, "updates", data->dim(), data->dim());
  require_axes(indices, "indices", 0, 2);
  require(axis > -data->dim() && axis < data->dim() && axis != 0, "axis is ", axis, " of ", data->dim(),
          " axes; it must not be 0");
  auto along = axis < 0 ? axis + data->dim() : axis;
  require(along != 0, "axis ", axis, " is the first");
  require(updates->size(0) == (indices->dim() ? indices->size(0) : 1) && updates->size(0) <= data->size(0),
          "updates has ", updates->size(0), " rows, indices ", indices->numel(), ", data ", data->size(0));
  require(indices->dim() < 2 || indices->size(1) == 2,
          "indices of two axes must have shape (rows, 2), it has ", indices->sizes());
  for (int64_t k = 1; k < data->dim(); k++) {
    require(k == along || updates->size(k) == data->size(k), "updates has shape ", updates->sizes(),
            ", data ", data->sizes(), ": they may differ in the first axis and in axis ", axis);
  }
  auto memory = indices->numel() * static_cast<int64_t>(indices->element_size()) + 224;
  require(memory <= 192 * 1024, "indices need ", memory, " bytes of the vector core's ", 192 * 1024);
}

LIMITS(aclnnScatterNdUpdate, R, data, T, indices, T, updates) {
  require_all_given({{data, "varRef"}, {indices, "indices"}, {updates, "updates"}});
  require_dtype(data, "varRef", {at::kHalf, at::kBFloat16, at::kFloat, at::kLong, at::kBool, at::kChar});
  require_same_dtype(updates, "updates", data, "varRef");
  require_dtype(indices, "indices", {at::kInt, at::kLong});
  // aclnn_scatter_nd_update.cpp, 8.5.0 to 9.1.0: where one is empty nothing is launched, and no shape is looked at.
  if (!data->numel() || !indices->numel() || !updates->numel()) return;
  require_axes(data, "varRef", 1, 8);
  require(indices->dim() >= 2, "indices has ", indices->dim(), " axes, at least 2 are needed");
  auto depth = indices->size(-1);
  require(depth >= 1 && depth <= 7 && depth <= data->dim(), "the last axis of indices is ", depth,
          ", varRef has ", data->dim(), " axes");
  auto shape = indices->sizes().slice(0, static_cast<size_t>(indices->dim() - 1)).vec();
  auto rest = data->sizes().slice(static_cast<size_t>(depth));
  shape.insert(shape.end(), rest.begin(), rest.end());
  require_shape(updates, "updates", shape);
}

LIMITS(aclnnIndexPutImpl, R, data, TL, indices, T, values, bool, accumulate, bool, unsafe) {
  require_all_given({{data, "selfRef"}, {values, "values"}});
  if (!indices) throw NullError("indices is null");
  // DTYPE_SUPPORT_LIST in ops-nn, index/index_put_v2/op_api/aclnn_index_put_impl.cpp, 8.5.0 to 9.1.0.
  require_dtype(data, "selfRef",
                {at::kFloat, at::kInt, at::kLong, at::kHalf, at::kShort, at::kChar, at::kByte, at::kDouble,
                 at::kBool, at::kBFloat16});
  require_same_dtype(values, "values", data, "selfRef");
  require_axes(data, "selfRef", 1, 8);
  for (auto* t : indices.p->v) {
    if (t && t->i->t.numel()) require_dtype(T{{t}}, "an index", {at::kInt, at::kLong, at::kBool, at::kByte});
  }
  require(static_cast<int64_t>(indices.size()) <= data->dim(), indices.size(), " indices for selfRef of ",
          data->dim(), " axes");
}
