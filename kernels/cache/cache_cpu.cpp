#include <torch/library.h>

#include <cstring>

#include "cache/cache_checks.h"
#include "common/parallel.h"

namespace liteboost {
namespace {

// Addresses and strides, in bytes, for copying keys or values into their cache.
struct CopyArgs {
  const char* from;
  char* to;
  int64_t bytes;  // of a run: one head of a token, or all of them where they are adjacent on both sides
  int64_t runs;
  int64_t from_batch, from_run, from_token;
  int64_t to_block, to_run, to_place;

  void run(int64_t batch, int64_t token, int64_t block, int64_t place) const {
    const char* source = from + batch * from_batch + token * from_token;
    char* target = to + block * to_block + place * to_place;
    for (int64_t run = 0; run < runs; ++run) {
      std::memcpy(target + run * to_run, source + run * from_run, static_cast<size_t>(bytes));
    }
  }
};

CopyArgs copy_args(const at::Tensor& added, const at::Tensor& cache) {
  CopyArgs args{};
  if (added.numel() == 0) return args;  // no runs, and no address to count from
  const int64_t element = added.element_size();
  args.from = static_cast<const char*>(added.const_data_ptr());
  args.to = static_cast<char*>(cache.mutable_data_ptr());
  args.bytes = added.size(3) * element;
  args.runs = added.size(1);
  args.from_batch = added.stride(0) * element;
  args.from_run = added.stride(1) * element;
  args.from_token = added.stride(2) * element;
  args.to_block = cache.stride(0) * element;
  args.to_run = cache.stride(1) * element;
  args.to_place = cache.stride(2) * element;
  if (args.from_run == args.bytes && args.to_run == args.bytes) {
    args.bytes *= args.runs;
    args.runs = 1;
  }
  return args;
}

at::Tensor adjacent(const at::Tensor& tensor) {
  return tensor.stride(3) == 1 || tensor.size(3) <= 1 ? tensor : tensor.contiguous();
}

void check_range(const int64_t* slots, int64_t count, const at::Tensor& keys) {
  const int64_t places = keys.size(0) * keys.size(2);
  for (int64_t i = 0; i < count; ++i) {
    TORCH_CHECK_INDEX(slots[i] >= 0 && slots[i] < places, "liteboost::kv_append: slots must be 0 .. ",
                      places - 1, ", below blocks * block_size of keys ", keys.sizes(), ", got ", slots[i],
                      "; pass block * block_size + place of each token, or a larger cache");
  }
}

void kv_append_cpu(const at::Tensor& keys, const at::Tensor& values, const at::Tensor& key,
                   const at::Tensor& value, const at::Tensor& slots) {
  check_kv_append(keys, values, key, value, slots);
  const int64_t count = slots.numel(), q_len = slots.size(1), block_size = keys.size(2);
  const auto contiguous = slots.expect_contiguous();
  const int64_t* slot = contiguous->const_data_ptr<int64_t>();
  check_range(slot, count, keys);
  if (count == 0) return;
  const at::Tensor key_rows = adjacent(key), value_rows = adjacent(value);
  const CopyArgs copy_keys = copy_args(key_rows, keys), copy_values = copy_args(value_rows, values);
  const int64_t work = key.size(1) * (key.size(3) + value.size(3));
  parallel_rows(count, work, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t block = slot[i] / block_size, place = slot[i] % block_size;
      copy_keys.run(i / q_len, i % q_len, block, place);
      copy_values.run(i / q_len, i % q_len, block, place);
    }
  });
}

}  // namespace
}  // namespace liteboost

TORCH_LIBRARY_IMPL(liteboost, CPU, m) { m.impl("kv_append", &liteboost::kv_append_cpu); }
