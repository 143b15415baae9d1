// torch's product, where it is faster than linear's own loops.
#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/linear.h>
#include <c10/core/impl/COW.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <array>
#include <atomic>
#include <exception>
#include <new>

#include "common/isa.h"
#include "common/resources.h"
#include "common/tensors.h"
#include "linear/linear_cpu.h"

#ifdef LB_X86_ISAS
#include <cpuid.h>
#endif

namespace liteboost {

#ifdef LB_X86_ISAS
// MKL, which at::linear takes for fp32, runs its AVX2 code on other vendors' CPUs: 170 GFLOP/s where oneDNN, which torch
// has, too, makes 400 of the weight as it lies (512 rows, two threads of a Zen 5).
static bool mkl_holds_back() {
  unsigned eax, ebx, ecx, edx;
  const bool is_intel = __get_cpuid(0, &eax, &ebx, &ecx, &edx) && ebx == 0x756e6547;  // "Genu"
  return !is_intel && detect_isa() >= Isa::avx512;
}
#else
static bool mkl_holds_back() { return false; }
#endif

using OneDnnLinear = at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                                c10::string_view, c10::List<std::optional<at::Scalar>>,
                                std::optional<c10::string_view>);

// torch's linear by oneDNN, or null in a build of torch without it.
static const c10::TypedOperatorHandle<OneDnnLinear>* one_dnn_linear() {
  static const auto found = [] {
    std::optional<c10::TypedOperatorHandle<OneDnnLinear>> typed;
    const auto handle = c10::Dispatcher::singleton().findSchema({"mkldnn::_linear_pointwise", ""});
    if (handle && at::globalContext().hasMKLDNN()) typed = handle->typed<OneDnnLinear>();
    return typed;
  }();
  return found ? &*found : nullptr;
}

// Whether a product in fp32 is given to oneDNN where torch would give it to MKL.
static bool avoids_mkl(const at::Tensor& x, const at::Tensor& weight) {
  static const bool holds_back = mkl_holds_back();
  return holds_back && x.scalar_type() == at::kFloat && weight.is_contiguous() && x.numel() > 0 &&
         weight.numel() > 0 && at::globalContext().userEnabledMkldnn() && one_dnn_linear() != nullptr;
}

// `x` beside its storage, which outlives the product: oneDNN asks for memory to write to, and what a cache has handed
// out (kv_buffer.h) would get a copy of all of that memory.
static at::Tensor only_read(const at::Tensor& x) {
  if (!c10::impl::cow::is_cow_data_ptr(x.storage().data_ptr())) return x;
  return at::from_blob(const_cast<void*>(x.const_data_ptr()), x.sizes(), x.strides(), x.options());
}

static at::Tensor matrix_linear(const at::Tensor& x, const at::Tensor& weight,
                                const std::optional<at::Tensor>& bias) {
  if (!avoids_mkl(x, weight)) return at::linear(x, weight, bias);
  // It reads a bias as if its elements were adjacent.
  std::optional<at::Tensor> adjacent;
  if (bias.has_value()) adjacent = bias->contiguous();
  return one_dnn_linear()->call(x.contiguous(), weight, adjacent, "none",
                                c10::List<std::optional<at::Scalar>>(), "");
}

// Number of rows, weight's sizes, dtype and bias: what oneDNN makes code for.
using Product = std::array<int64_t, 4>;

static Product product_of(int64_t rows, const at::Tensor& weight, bool has_bias) {
  return {rows, weight.size(0), weight.size(1),
          2 * static_cast<int64_t>(weight.scalar_type()) + has_bias + 1};
}

static uint64_t hash_of(const Product& product) {
  uint64_t hash = 0;
  for (const int64_t each : product) hash = (hash + static_cast<uint64_t>(each)) * 0x9e3779b97f4a7c15u;
  return hash;
}

// oneDNN makes code for each number of rows, 0.5 MB and 0.4 ms a product, and keeps that of the last 1,024 products: a
// server whose prompts have all lengths would fill them all. So only the first kExactProducts of a process have their own
// number of rows; those that come later have it rounded up to four significant bits: 8 numbers are left of each doubling, and
// each row has the same bits. Times of [33 to 1000, 1024 to 3072] products with the copy of x, over those of the exact number,
// two threads of a Zen 5: 0.9 to 1.1, 1.03 in the median in bf16; 0.9 to 1.15 and 0.99 in fp32.
constexpr int kExactProducts = 128;

static int64_t rounded_rows(int64_t rows) {
  int64_t granule = 1;
  while (granule * 16 < rows) granule *= 2;
  return (rows + granule - 1) / granule * granule;
}

// Whether a product by `hash` is among the first of this process. Two that share a bit count as one.
static bool is_exact_product(uint64_t hash) {
  constexpr size_t kWords = 128;
  static std::array<std::atomic<uint64_t>, kWords> known{};
  static std::atomic<int> count{0};
  std::atomic<uint64_t>& word = known[(hash >> 38) % kWords];
  const uint64_t bit = uint64_t{1} << (hash >> 32 & 63);
  if (word.load(std::memory_order_relaxed) & bit) return true;
  if (count.load(std::memory_order_relaxed) >= kExactProducts) return false;
  if (!(word.fetch_or(bit, std::memory_order_relaxed) & bit)) count.fetch_add(1, std::memory_order_relaxed);
  return true;
}

static at::Tensor with_rows(const at::Tensor& matrix, int64_t rows) {
  if (matrix.size(0) == rows) return matrix;
  at::Tensor larger = empty_cpu({rows, matrix.size(1)}, matrix.scalar_type());
  larger.narrow(0, 0, matrix.size(0)).copy_(matrix);
  larger.narrow(0, matrix.size(0), rows - matrix.size(0)).zero_();
  return larger;
}

// Memory that torch's product may need beside its tensors: oneDNN makes code for each new shape (2.3 MiB at most for
// rows of 1 to 513 and sizes of 64 to 3072), and without room for it crashes or never again makes that product.
constexpr int64_t kLibraryBytes = 32 << 20;

// Asks for the memory that torch's product may need, unless nothing limits it and this thread has made a product of these
// sizes lately, whose code torch then has: to ask takes some ten microseconds, as long as a small product.
static void require_memory_of(const Product& product) {
  static thread_local std::array<Product, 256> made{};
  Product& place = made[(hash_of(product) >> 32) % made.size()];
  if (place == product && is_memory_unlimited()) return;
  place = {};
  require_memory("linear", kLibraryBytes);
  place = product;
}

at::Tensor torch_linear(const at::Tensor& x, const at::Tensor& weight,
                        const std::optional<at::Tensor>& bias) {
  // The dtype is decided: autocast must not change it here, and autograd has nothing to record.
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  c10::DimVector sizes(x.sizes());
  sizes.back() = weight.size(0);
  // As a matrix: with more dims that are no matrix in memory, at::linear rounds the product of 16-bit values
  // before it adds the bias.
  const at::Tensor matrix = only_read(x).reshape({-1, weight.size(1)});
  const int64_t rows = matrix.size(0);
  Product product = product_of(rows, weight, bias.has_value());
  const bool is_mkl = x.scalar_type() == at::kFloat && !avoids_mkl(x, weight);
  if (!is_mkl && !is_exact_product(hash_of(product))) product[0] = rounded_rows(rows);
  require_memory_of(product);
  require_threads();
  try {
    return matrix_linear(with_rows(matrix, product[0]), weight, bias)
        .narrow(0, 0, rows)
        .reshape(sizes)
        .contiguous();
  } catch (const c10::Error&) {
    throw;
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception&) {
    // Where memory once was short while it made the code for a product, oneDNN goes on refusing that product, or, in
    // this thread, all that need code.
    return own_linear(matrix, weight.contiguous(), bias).reshape(sizes);
  }
}

}  // namespace liteboost
