#include "cache/kv_buffer.h"

#include <ATen/ops/as_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/COW.h>
#include <c10/core/impl/COWDeleter.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>

#include "common/checks.h"

namespace liteboost {
namespace {

namespace cow = c10::impl::cow;

// How many storages share bytes is not public. Naming a private member is allowed in an explicit instantiation.
std::atomic<int64_t>& sharing(cow::COWDeleterContext& context);

template <std::atomic<int64_t> cow::COWDeleterContext::* Member>
struct Reader {
  friend std::atomic<int64_t>& sharing(cow::COWDeleterContext& context) { return context.*Member; }
};
template struct Reader<&cow::COWDeleterContext::refcount_>;

const char* bytes_of(const at::Tensor& tensor) { return static_cast<const char*>(tensor.storage().data()); }

// To write where nobody who shares the bytes looks: through mutable_data_ptr the memory would get a copy of its own.
char* writable(const at::Tensor& memory, int64_t position, int64_t dim) {
  const char* first = bytes_of(memory) + memory.storage_offset() * memory.element_size();
  return const_cast<char*>(first) + position * memory.stride(dim) * memory.element_size();
}

c10::Storage handed_out(const at::Tensor& memory) {
  if (memory.is_cpu()) {
    auto made = cow::lazy_clone_storage(*memory.storage().unsafeGetStorageImpl());
    if (made) return c10::Storage(std::move(made));
  }
  return memory.storage();
}

at::Tensor made_of(c10::Storage storage, const at::Tensor& like, at::IntArrayRef sizes,
                   at::IntArrayRef strides, int64_t offset) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::TensorImpl::VIEW, std::move(storage), like.key_set(),
                                                   like.dtype());
  impl->set_sizes_and_strides(sizes, strides, offset);
  return at::Tensor(std::move(impl));
}

// More than this many bytes are worth several threads.
constexpr int64_t kCopiedBytes = 64 << 10;

// Copies `added` to `to`, laid out with `strides`, run by run, if both are made of runs from `dim` on: a token's heads,
// one after the other. What copy_ sees to before it moves a byte takes longer than moving it.
bool copied_in_runs(char* to, caffe2::TypeMeta dtype, at::IntArrayRef strides, const at::Tensor& added,
                    int64_t dim) {
  if (!added.is_cpu() || added.dtype() != dtype || added.is_conj() || added.is_neg() ||
      static_cast<int64_t>(added.nbytes()) > kCopiedBytes)
    return false;
  int64_t run = 1, runs = 1;
  for (int64_t d = added.dim() - 1; d >= dim; --d) {
    if (added.size(d) != 1 && (strides[d] != run || added.stride(d) != run)) return false;
    run *= added.size(d);
  }
  for (int64_t d = 0; d < dim; ++d) runs *= added.size(d);
  const auto size = static_cast<int64_t>(added.element_size());
  const char* from = static_cast<const char*>(added.const_data_ptr());
  for (int64_t at = 0; at < runs; ++at) {
    int64_t rest = at, here = 0, there = 0;
    for (int64_t d = dim - 1; d >= 0; --d) {
      here += rest % added.size(d) * strides[d];
      there += rest % added.size(d) * added.stride(d);
      rest /= added.size(d);
    }
    std::memcpy(to + here * size, from + there * size, run * size);
  }
  return true;
}

void check_append(const at::Tensor& memory, const at::Tensor& added, int64_t dim, int64_t start,
                  int64_t length) {
  constexpr const char* op = "_cache_append";
  LB_CHECK_VALUE(dim >= 0 && dim < memory.dim() && added.dim() == memory.dim() && memory.is_contiguous(), op,
                 "memory must be contiguous and added have its dimensions, got ", memory.sizes(), " and ",
                 added.sizes(), " along ", dim);
  for (int64_t d = 0; d < memory.dim(); ++d) {
    LB_CHECK_VALUE(d == dim || added.size(d) == memory.size(d), op, "added ", added.sizes(),
                   " does not fit into memory ", memory.sizes(), " along ", dim);
  }
  LB_CHECK_VALUE(start >= 0 && length >= 0 && start + length + added.size(dim) <= memory.size(dim), op,
                 "positions ", start, " to ", start + length + added.size(dim), " are not within ",
                 memory.size(dim));
}

// Whether anybody but the memory and the layer that keeps `held` may see what lies behind it.
bool is_seen(const at::Tensor& held, const at::Tensor& memory) {
  const auto own = held.storage().unsafeGetStorageImpl();
  if (own == memory.storage().unsafeGetStorageImpl()) {
    return memory.is_cpu() || held.storage().use_count() > 2;
  }
  auto* context = memory.storage().data_ptr().cast_context<cow::COWDeleterContext>(cow::cow_deleter);
  return context == nullptr || held.storage().use_count() > 1 || sharing(*context).load() > 2;
}

int64_t cache_start(const at::Tensor& held, const at::Tensor& memory, int64_t dim, int64_t end) {
  const int64_t start = start_in_memory(held, memory, dim);
  if (start < 0) return -1;
  const int64_t behind = start + held.size(dim);
  if (behind == end) return start;
  return behind < end && !is_seen(held, memory) ? start : -1;
}

}  // namespace

at::Tensor view_of(const at::Tensor& whole, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset) {
  if (!whole.is_cpu()) return at::as_strided(whole, sizes, strides, offset);
  return made_of(whole.storage(), whole, sizes, strides, offset);
}

at::Tensor append_in_memory(const at::Tensor& memory, const at::Tensor& added, int64_t dim, int64_t start,
                            int64_t length) {
  check_append(memory, added, dim, start, length);
  const int64_t end = start + length;
  const auto offset = [&](int64_t position) {
    return memory.storage_offset() + position * memory.stride(dim);
  };
  if (!memory.is_cpu()) {
    view_of(memory, added.sizes(), memory.strides(), offset(end)).copy_(added);
  } else if (char* to = writable(memory, end, dim);
             !copied_in_runs(to, memory.dtype(), memory.strides(), added, dim)) {
    at::from_blob(to, added.sizes(), memory.strides(), memory.options()).copy_(added);
  }
  c10::DimVector sizes(memory.sizes());
  sizes[dim] = length + added.size(dim);
  if (!memory.is_cpu()) return view_of(memory, sizes, memory.strides(), offset(start));
  return made_of(handed_out(memory), memory, sizes, memory.strides(), offset(start));
}

int64_t start_in_memory(const at::Tensor& held, const at::Tensor& memory, int64_t dim) {
  if (held.dim() != memory.dim() || held.scalar_type() != memory.scalar_type() || held.is_conj() ||
      held.is_neg() || held.device() != memory.device() || held.layout() != at::kStrided ||
      held.strides() != memory.strides() || bytes_of(held) != bytes_of(memory) || bytes_of(held) == nullptr) {
    return -1;
  }
  for (int64_t d = 0; d < held.dim(); ++d) {
    if (d != dim && held.size(d) != memory.size(d)) return -1;
  }
  return (held.storage_offset() - memory.storage_offset()) / memory.stride(dim);
}

}  // namespace liteboost

TORCH_LIBRARY_FRAGMENT(liteboost, m) {
  m.def("_cache_append(Tensor(a!) memory, Tensor added, int dim, int start, int length) -> Tensor",
        [](const at::Tensor& memory, const at::Tensor& added, int64_t dim, int64_t start, int64_t length) {
          const at::AutoDispatchBelowADInplaceOrView below_autograd;
          return liteboost::append_in_memory(memory, added, dim, start, length);
        });
  m.def("_cache_start(Tensor held, Tensor memory, int dim, int end) -> int", &liteboost::cache_start);
}
