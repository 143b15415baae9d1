#include "int8_linear/int8_linear.h"

#include <algorithm>

#include "loops.h"
#include "testing.h"

namespace testing {
namespace {

using namespace liteboost;

// Sums, scales and roundings as int8_linear.h has them, from the integers that x has been rounded to.
template <typename T>
void test_shape(int rows, int n, int k, bool with_bias) {
  std::mt19937 random(static_cast<unsigned>(rows + n + k));
  Array<T> x(rows * k), bias(n), out(rows * n);
  Array<float> scales(n);
  Array<bf16> bytes(n * k / 2 + 1);  // as memory that ends at a guard page
  x.fill(random);
  bias.fill(random);
  scales.fill(random);
  int8_t* weight = reinterpret_cast<int8_t*>(bytes.data()) + (n * k / 2 + 1) * 2 - n * k;
  for (int i = 0; i < n * k; ++i) weight[i] = static_cast<int8_t>(random());

  const auto& kernels = LB_ISA::int8_linear_kernels;
  const int64_t words = kernels.words(k);
  const auto aligned = [](std::vector<char>& memory) {
    return reinterpret_cast<int32_t*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
  };
  std::vector<char> word_memory(static_cast<size_t>(rows * words * 4) + 64);
  const int64_t panels = (n + kernels.panel_columns - 1) / kernels.panel_columns;
  const int64_t panel_words = words * kernels.panel_columns;
  std::vector<char> panel_memory(static_cast<size_t>(panels * panel_words * 4) + 64);
  std::vector<float> row_scales(static_cast<size_t>(rows));
  std::vector<int32_t> row_offsets(static_cast<size_t>(rows));
  Int8LinearArgs args{};
  args.x = x.data();
  args.weight = weight;
  args.scales = scales.data();
  args.bias = with_bias ? bias.data() : nullptr;
  args.out = out.data();
  args.words = aligned(word_memory);
  args.row_scales = row_scales.data();
  args.row_offsets = row_offsets.data();
  args.rows = rows;
  args.n = n;
  args.k = k;
  kernels.quantize(dtype_of<T>(), args, 0, rows);

  const auto check_all = [&](const char* name) {
    for (int row = 0; row < rows; ++row) {
      float largest = 0;
      for (int j = 0; j < k; ++j) {  // not fmax: GCC 12 for aarch64 fails on it (internal error)
        const float magnitude = std::fabs(static_cast<float>(x[row * k + j]));
        if (magnitude > largest) largest = magnitude;
      }
      const float factor = 127.0f / largest;
      for (int i = 0; i < n; ++i) {
        int64_t sum = 0;
        for (int j = 0; j < k; ++j) {
          sum += weight[i * k + j] *
                 static_cast<int64_t>(std::nearbyint(static_cast<float>(x[row * k + j]) * factor));
        }
        const double product = static_cast<double>(sum) * scales[i] * (largest / 127.0f);
        const double b = with_bias ? bias[i] : 0.0;
        check_close<T>(name, row * n + i, k, out[row * n + i], product + b,
                       std::fabs(product) + std::fabs(b));
      }
    }
  };
  // In two ranges, as two threads would.
  const auto run_few = [&] {
    const int64_t half = n / 2 / 16 * 16;
    out.fill(random);
    kernels.few(dtype_of<T>(), args, 0, half);
    kernels.few(dtype_of<T>(), args, half, n);
  };
  run_few();
  check_all("int8_linear few");
  if (rows <= kernels.most_packed_rows) {
    std::vector<char> packed_memory(static_cast<size_t>(kernels.some_words(rows, k) * 4) + 64);
    args.packed = aligned(packed_memory);
    kernels.pack_some(args, args.packed);
    run_few();
    check_all("int8_linear packed");
  }
  // Two panels at a time, and of many rows two ranges, as two threads would.
  if (rows >= kernels.least_rows) {
    const int64_t half = rows >= 2 * kernels.least_rows ? rows / 2 : rows;
    out.fill(random);
    for (int64_t first = 0; first < panels; first += 2) {
      const Int8Panels some = {first, std::min<int64_t>(2, panels - first),
                               aligned(panel_memory) + first * panel_words};
      for (int64_t i = 0; i < some.count; ++i)
        kernels.pack(args, first + i, aligned(panel_memory) + (first + i) * panel_words);
      kernels.panels(dtype_of<T>(), args, some, 0, half);
      if (half < rows) kernels.panels(dtype_of<T>(), args, some, half, rows);
    }
    check_all("int8_linear panels");
  }
  check(out.intact(), "int8_linear margin", n, k, 0, 0);
}

template <typename T>
void test_type() {
  for (int k = 1; k <= 2 * kMaxLength; ++k) {
    for (const int rows : {1, 3, 7}) test_shape<T>(rows, 7, k, k % 2 == 0);
  }
  for (int rows = 1; rows <= 36; ++rows) test_shape<T>(rows, 70, 70, rows % 2 == 0);
  test_shape<T>(13, 129, 1000, true);
  test_shape<T>(70, 325, 1100, false);
  for (const int rows : {47, 64, 65, 113}) test_shape<T>(rows, 83, 200, true);
}

}  // namespace

void test_int8_linear() {
  test_type<float>();
  test_type<bf16>();
  test_type<f16>();
}

}  // namespace testing
