#include <cstring>

#include "linear/linear.h"

#include "loops.h"
#include "testing.h"

namespace testing {
namespace {

using namespace liteboost;

// out[rows, n] against x times weight, whose rows lie `stride` apart, in double.
template <typename T>
void check_product(const char* what, const Array<T>& x, const Array<T>& weight, int stride,
                   const Array<T>* bias, const Array<T>& out, int rows, int n, int k) {
  for (int row = 0; row < rows; ++row) {
    for (int i = 0; i < n; ++i) {
      double want = bias != nullptr ? (*bias)[i] : 0.0, scale = std::fabs(want);
      for (int j = 0; j < k; ++j) {
        const double product = x[row * k + j] * weight[i * stride + j];
        want += product;
        scale += std::fabs(product);
      }
      check_close<T>(what, row * n + i, k, out[row * n + i], want, scale);
    }
  }
}

template <typename T>
void test_shape(int rows, int n, int k, bool with_bias, Order order = Order::fastest) {
  std::mt19937 random(static_cast<unsigned>(rows + n + k));
  const int stride = k + 3;  // rows apart, so that rows differ in alignment
  Array<T> x(rows * k), weight((n - 1) * stride + k), bias(n), out(rows * n);
  for (Array<T>* array : {&x, &weight, &bias}) array->fill(random);
  const auto& kernels = LB_ISA::linear_kernels;
  const DType dtype = dtype_of<T>();
  // The one buffer that is the loops' own: aligned, and of exactly the size they ask for.
  const int64_t bytes = kernels.packed_bytes(dtype, rows, k, order);
  std::vector<char> buffer(static_cast<size_t>(bytes) + 128, 0x5a);
  char* packed = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(buffer.data()) + 63) / 64 * 64);
  kernels.pack(dtype, x.data(), rows, k, order, packed);
  check(packed[bytes] == 0x5a, "linear packed", rows, k, packed[bytes], 0x5a);

  LinearArgs args{};
  args.packed_x = packed;
  args.weight = weight.data();
  args.bias = with_bias ? bias.data() : nullptr;
  args.out = out.data();
  args.rows = rows;
  args.n = n;
  args.k = k;
  args.weight_stride = stride;
  args.order = order;
  // In two ranges, as two threads would.
  kernels.run(dtype, args, 0, n / 2);
  kernels.run(dtype, args, n / 2, n);

  check_product<T>("linear", x, weight, stride, with_bias ? &bias : nullptr, out, rows, n, k);
  check(out.intact(), "linear margin", n, k, 0, 0);
}

// Of many rows, where such products have loops of their own.
template <typename T>
void test_gemm(int rows, int n, int k, bool with_bias, int together, Order order = Order::fastest) {
  const auto& kernels = LB_ISA::linear_kernels;
  const DType dtype = dtype_of<T>();
  const int columns = static_cast<int>(kernels.gemm_columns(dtype, 64, k, order));
  if (columns == 0) return;
  const bool is_each = order == Order::of_one_row;
  std::mt19937 random(static_cast<unsigned>(rows + n + k));
  const int stride = k + 3;
  Array<T> x(rows * k), weight((n - 1) * stride + k), bias(n), out(rows * n);
  for (Array<T>* array : {&x, &weight, &bias}) array->fill(random);
  Array<float> widened(rows * k);
  for (int i = 0; i < rows * k; ++i) widened.data()[i] = static_cast<float>(x[i]);
  const int64_t row_floats = is_each ? kernels.gemm_row_floats(dtype, k) : 0;
  std::vector<float> packed(static_cast<size_t>(rows * row_floats) + 16, 7.0f);
  if (is_each) kernels.gemm_pack_rows(dtype, x.data(), rows, k, packed.data());
  for (int i = 0; i < 16; ++i)
    check(packed[static_cast<size_t>(rows * row_floats + i)] == 7.0f, "gemm packed rows", rows, k, 0, 7);
  const int64_t count = kernels.gemm_scratch(dtype, k, together, order);
  std::vector<float> buffer(static_cast<size_t>(count) + 32, 7.0f);
  float* scratch = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(buffer.data()) + 63) / 64 * 64);

  GemmArgs args{};
  args.x = is_each               ? static_cast<const void*>(packed.data())
           : kernels.gemm_widens ? static_cast<const void*>(widened.data())
                                 : x.data();
  args.order = order;
  args.weight = weight.data();
  args.bias = with_bias ? bias.data() : nullptr;
  args.out = out.data();
  args.rows = rows;
  args.n = n;
  args.k = k;
  args.weight_stride = stride;
  // Several panels at a time, and rows in two ranges.
  const int panels = (n + columns - 1) / columns;
  for (int panel = 0; panel < panels; panel += together) {
    const int end = panel + together < panels ? panel + together : panels;
    kernels.gemm(dtype, args, panel, end, 0, rows / 3, scratch);
    kernels.gemm(dtype, args, panel, end, rows / 3, rows, scratch);
  }
  for (int i = 0; i < 16; ++i)
    check(scratch[count + i] == 7.0f, "gemm scratch", rows, k, scratch[count + i], 7);
  check_product<T>("gemm", x, weight, stride, with_bias ? &bias : nullptr, out, rows, n, k);
  check(out.intact(), "gemm margin", n, k, 0, 0);
  if (!is_each) return;
  // The very bits of a row by itself.
  Array<T> alone(n);
  std::vector<char> one(static_cast<size_t>(kernels.packed_bytes(dtype, 1, k, order)) + 64);
  LinearArgs single{};
  single.packed_x = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(one.data()) + 63) / 64 * 64);
  single.weight = weight.data();
  single.bias = args.bias;
  single.out = alone.data();
  single.rows = 1;
  single.n = n;
  single.k = k;
  single.weight_stride = stride;
  for (int row = 0; row < rows; ++row) {
    kernels.pack(dtype, x.data() + row * k, 1, k, Order::fastest, single.packed_x);
    kernels.run(dtype, single, 0, n);
    check(memcmp(alone.data(), out.data() + row * n, sizeof(T) * static_cast<size_t>(n)) == 0,
          "gemm of one row", row, k, 0, 0);
  }
}

template <typename T>
void test_gemms() {
  // Not where most of a strip would be empty.
  const auto columns = LB_ISA::linear_kernels.gemm_columns;
  for (const Order order : {Order::fastest, Order::of_one_row}) {
    const int64_t whole = columns(dtype_of<T>(), 64, 1024, order);
    for (const int64_t n : {1, 2, 8})
      check(columns(dtype_of<T>(), n, 1024, order) == 0, "gemm_columns of few outputs", n, 1024, 1, 0);
    for (const int64_t n : {64, 128, 1000})
      check(columns(dtype_of<T>(), n, 1024, order) == whole, "gemm_columns of many outputs", n, 1024, 0, 1);
  }
  // Tiles are of up to 6 rows, words of up to 2 elements, panels of 64 columns.
  for (int k = 1; k <= 2 * kMaxLength; ++k) test_gemm<T>(7, 19, k, k % 3 == 0, 1);
  for (int rows = 1; rows <= 20; ++rows) test_gemm<T>(rows, 66, 38, rows % 2 == 0, 1);
  for (int n = 1; n <= 70; ++n) test_gemm<T>(5, n, 10, true, 2);
  // Chunks of 192 rows, blocks of 128 words.
  for (const int rows : {191, 193, 400}) test_gemm<T>(rows, 140, 258, true, 2);
  for (const int k : {254, 256, 514, 1030}) test_gemm<T>(13, 200, k, false, 3);
  // In the order of one row tiles are of up to 3 rows. Of K: whole turns of all sums, steps behind them, a part of one.
  for (int k = 510; k <= 660; ++k) test_gemm<T>(5, 19, k, k % 3 == 0, 1, Order::of_one_row);
  for (int rows = 1; rows <= 10; ++rows) test_gemm<T>(rows, 66, 512, true, 2, Order::of_one_row);
  for (const int rows : {191, 193, 400}) test_gemm<T>(rows, 140, 520, true, 2, Order::of_one_row);
  // Blocks of several pairs of chains, of one, and of one that is longer than a block.
  for (const int k : {2048, 4100, 9000}) test_gemm<T>(4, 70, k, false, 3, Order::of_one_row);
}

template <typename T>
void test_type() {
  // Steps are of up to 32 elements and unrolled by 4.
  for (int k = 0; k <= 2 * kMaxLength; ++k) {
    for (const int rows : {1, 3, 4, 6}) test_shape<T>(rows, 7, k, k % 2 == 0);
    for (const int rows : {2, 3, 4, 5}) test_shape<T>(rows, 7, k, k % 2 == 0, Order::of_one_row);
  }
  // Beyond the length at which a sum is split, which many rows make shorter.
  for (const int k : {2047, 2048, 4109}) {
    for (const int rows : {1, 2, 3, 5, 9, 10, 15, 16, 32}) test_shape<T>(rows, 70, k, true);
  }
  for (int n = 1; n <= 70; ++n) {
    for (const int rows : {1, 2, 7}) test_shape<T>(rows, n, 9, true);
  }
  const int most = static_cast<int>(LB_ISA::linear_kernels.most_rows(dtype_of<T>(), Order::fastest));
  check(most >= kLinearRows, "linear most rows", most, 0, most, kLinearRows);
  for (int rows = 1; rows <= (most < 100 ? most : 100); ++rows) {
    test_shape<T>(rows, 66, 37, true);
    if (rows <= kLinearRows) test_shape<T>(rows, 66, 37, true, Order::of_one_row);
  }
  // Weights of a few whole tiles and a part of one, and K in several blocks.
  for (const int rows : {22, 33, 48, 80, 97, 250, 256}) {
    if (rows > most) continue;
    for (const int n : {15, 48, 70}) test_shape<T>(rows, n, 1030, n == 48);
  }
}

}  // namespace

void test_linear() {
  test_type<float>();
  test_type<bf16>();
  test_type<f16>();
  test_gemms<float>();
  test_gemms<bf16>();
}

}  // namespace testing
