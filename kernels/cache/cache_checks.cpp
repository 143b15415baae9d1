#include "cache/cache_checks.h"

namespace liteboost {
namespace {

constexpr const char* kOp = "kv_append";

void check_shapes(const at::Tensor& keys, const at::Tensor& values, const at::Tensor& key,
                  const at::Tensor& value, const at::Tensor& slots) {
  LB_CHECK_VALUE(keys.dim() == 4, kOp, "keys must have shape [blocks, kv_heads, block_size, head_dim], got ",
                 keys.sym_sizes(), "; view the cache so");
  LB_CHECK_VALUE(values.dim() == 4, kOp,
                 "values must have shape [blocks, kv_heads, block_size, value_dim], got ", values.sym_sizes(),
                 "; view the cache so");
  LB_CHECK_VALUE(key.dim() == 4, kOp, "key must have shape [batch, kv_heads, q_len, head_dim], got ",
                 key.sym_sizes(), "; reshape it");
  LB_CHECK_VALUE(value.dim() == 4, kOp, "value must have shape [batch, kv_heads, q_len, value_dim], got ",
                 value.sym_sizes(), "; reshape it");
  const auto cached = keys.sym_sizes(), added = key.sym_sizes();
  LB_CHECK_VALUE(values.sym_sizes().slice(0, 3) == cached.slice(0, 3), kOp,
                 "values must have the blocks, kv_heads and block_size of keys ", cached, ", got ",
                 values.sym_sizes(), "; pass the two halves of one cache");
  LB_CHECK_VALUE(added[1] == cached[1] && added[3] == cached[3], kOp, "key must have kv_heads = ", cached[1],
                 " and head_dim = ", cached[3], " as keys ", cached, " has, got ", added,
                 "; pass the cache of this layer");
  LB_CHECK_VALUE(value.sym_sizes().slice(0, 3) == added.slice(0, 3), kOp,
                 "value must have the batch, kv_heads and q_len of key ", added, ", got ", value.sym_sizes(),
                 "; pass the key and value of the same tokens");
  LB_CHECK_VALUE(value.sym_size(3) == values.sym_size(3), kOp,
                 "value must have value_dim = ", values.sym_size(3), " as values ", values.sym_sizes(),
                 " has, got ", value.sym_sizes(), "; pass the cache of this layer");
  LB_CHECK_VALUE(slots.dim() == 2 && slots.sym_size(0) == added[0] && slots.sym_size(1) == added[2], kOp,
                 "slots must have shape [batch, q_len] = [", added[0], ", ", added[2], "], got ",
                 slots.sym_sizes(), "; pass one slot a token");
}

// What is written to: one address for each element, the channels of a head adjacent.
void check_cache(const char* argument, const at::Tensor& cache) {
  if (cache.sym_numel() == 0) return;
  const auto sizes = cache.sym_sizes(), strides = cache.sym_strides();
  LB_CHECK_VALUE(sizes[3] == 1 || strides[3] == 1, kOp, argument,
                 " must have stride 1 in dimension 3, got strides ", strides,
                 "; lay the cache out with the channels of a head side by side");
  for (size_t dim = 0; dim < 4; ++dim) {
    LB_CHECK_VALUE(sizes[dim] == 1 || strides[dim] != 0, kOp, argument,
                   " must have memory for each element, got stride 0 in dimension ", dim,
                   "; pass what was expanded, or a copy");
  }
}

void check_memory(const char* argument, const at::Tensor& added, const at::Tensor& keys,
                  const at::Tensor& values) {
  LB_CHECK_VALUE(!added.is_alias_of(keys) && !added.is_alias_of(values), kOp, argument,
                 " must not lie in the memory of the cache, got a view of it; pass a copy");
}

}  // namespace

void check_kv_append(const at::Tensor& keys, const at::Tensor& values, const at::Tensor& key,
                     const at::Tensor& value, const at::Tensor& slots) {
  check_shapes(keys, values, key, value, slots);
  check_dtype(kOp, "keys", keys);
  check_same_dtype(kOp, "values", values, "keys", keys);
  check_same_dtype(kOp, "key", key, "keys", keys);
  check_same_dtype(kOp, "value", value, "keys", keys);
  LB_CHECK_TYPE(slots.scalar_type() == at::kLong, kOp, "slots must be int64, got ", slots.scalar_type(),
                "; convert it");
  check_same_device(kOp, "values", values, "keys", keys);
  check_same_device(kOp, "key", key, "keys", keys);
  check_same_device(kOp, "value", value, "keys", keys);
  check_same_device(kOp, "slots", slots, "keys", keys);
  LB_CHECK_NO_GRAD(kOp, "keys", keys);
  LB_CHECK_NO_GRAD(kOp, "values", values);
  LB_CHECK_NO_GRAD(kOp, "key", key);
  LB_CHECK_NO_GRAD(kOp, "value", value);
  check_cache("keys", keys);
  check_cache("values", values);
  LB_CHECK_VALUE(keys.sym_numel() == 0 || !values.is_alias_of(keys) ||
                     values.sym_storage_offset() != keys.sym_storage_offset(),
                 kOp,
                 "values must have memory of their own, got that of keys; pass the two halves of one cache");
  check_memory("key", key, keys, values);
  check_memory("value", value, keys, values);
}

}  // namespace liteboost
