// Writes to key and value caches, also in blocks (paged).
#include "fused.h"

using namespace sim;

using at::Tensor;

namespace {

bool is_nz(CP mode) { return mode && std::string(mode) == "PA_NZ"; }

/// Slots must lie in the cache and be different: hardware writes elsewhere, or in any order, without a word.
Tensor checked_slots(const Tensor& slots, int64_t places) {
  auto all = slots.to(at::kLong).flatten();
  if (!all.numel()) return all;
  TORCH_CHECK(all.min().item<int64_t>() >= 0 && all.max().item<int64_t>() < places, "a slot is not in 0..",
              places - 1, " (-1 is not documented as padding)");
  TORCH_CHECK(std::get<0>(at::_unique(all)).numel() == all.numel(),
              "a slot is written twice: which value stays is not defined");
  return all;
}

/// Writes rows [tokens, heads, dim] to slots of a cache [blocks, block size, heads, dim].
void scatter_rows(Tensor cache, const Tensor& rows, const Tensor& slots) {
  auto size = cache.size(1);
  cache.index_put_({at::floor_divide(slots, size), at::remainder(slots, size)}, rows);
}

/// The same to a cache in FRACTAL_NZ order [blocks, heads * dim / width, block size, width].
void scatter_rows_nz(Tensor cache, const Tensor& rows, const Tensor& slots) {
  auto parts = rows.reshape({rows.size(0), cache.size(1), cache.size(3)});
  scatter_rows(cache.transpose(1, 2), parts, slots);
}

}  // namespace

/// Norm: cache [blocks, block size, heads, dim]; PA_NZ: [blocks, heads * dim / 16, block size, 16] (32 for int8).
OP(aclnnScatterPaKvCache, T, key, R, key_cache, T, slots, T, value, R, value_cache, T, compress_lens, T,
   compress_offsets, T, seq_lens, CP, cache_mode, CP, scatter_mode, IA, strides, IA, offsets) {
  auto nz = is_nz(cache_mode);
  auto places = checked_slots(*slots, key_cache->size(0) * key_cache->size(nz ? 2 : 1));
  auto write = nz ? scatter_rows_nz : scatter_rows;
  write(*key_cache, *key, places);
  if (value->dim()) write(*value_cache, *value, places);
}

/// data[i, ..., indices[i] + l, ...] = updates[i, ..., l, ...] along `axis`; two columns of indices are (row, offset).
OP(aclnnInplaceScatterUpdate, R, data, T, indices, T, updates, int64_t, axis) {
  auto along = axis < 0 ? axis + data->dim() : axis;
  auto pairs = indices->to(at::kLong).reshape({updates->size(0), -1});
  auto count = updates->size(along);
  for (int64_t i = 0; i < updates->size(0); i++) {
    auto row = pairs.size(1) == 2 ? pairs[i][0].item<int64_t>() : i;
    auto begin = pairs[i][pairs.size(1) - 1].item<int64_t>();
    TORCH_CHECK(row >= 0 && row < data->size(0) && begin >= 0 && begin + count <= data->size(along), "index ",
                begin, " of row ", row, " with ", count, " values is not in data of shape ", data->sizes());
    data->select(0, row).narrow(along - 1, begin, count).copy_((*updates)[i]);
  }
}

OP(aclnnScatterNdUpdate, R, data, T, indices, T, updates) {
  if (!data->numel() || !indices->numel() || !updates->numel()) return;
  auto depth = indices->size(-1);
  auto flat = indices->to(at::kLong).reshape({-1, depth});
  c10::List<std::optional<Tensor>> at_;
  for (int64_t k = 0; k < depth; k++) {
    auto column = flat.select(1, k);
    TORCH_CHECK(!column.numel() ||
                    (column.min().item<int64_t>() >= 0 && column.max().item<int64_t>() < data->size(k)),
                "an index is not in axis ", k, " of data of shape ", data->sizes());
    at_.push_back(column);
  }
  std::vector<int64_t> shape = {flat.size(0)};
  for (int64_t k = depth; k < data->dim(); k++) shape.push_back(data->size(k));
  data->index_put_(at_, updates->reshape(shape));
}
