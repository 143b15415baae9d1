#include "experts/experts.h"

#include "loops.h"
#include "testing.h"

namespace testing {
namespace {

using namespace liteboost;

template <typename T>
void test_columns(int rows, int count, int k, bool with_bias) {
  std::mt19937 random(static_cast<unsigned>(rows + count + k));
  const int stride = count + 3;  // rows of weight apart, so that they differ in alignment
  Array<float> x(rows * k);
  Array<T> weight(k ? (k - 1) * stride + count : 0), bias(count), out(rows * count);
  x.fill(random);
  weight.fill(random);
  bias.fill(random);
  ColumnsArgs args{};
  args.x = x.data();
  args.weight = weight.data();
  args.bias = with_bias ? bias.data() : nullptr;
  args.out = out.data();
  args.rows = rows;
  args.count = count;
  args.k = k;
  args.weight_stride = stride;
  LB_ISA::experts_kernels.columns(dtype_of<T>(), args);

  for (int row = 0; row < rows; ++row) {
    for (int i = 0; i < count; ++i) {
      double want = with_bias ? bias[i] : 0.0, scale = std::fabs(want);
      for (int j = 0; j < k; ++j) {
        const double product = x[row * k + j] * weight[j * stride + i];
        want += product;
        scale += std::fabs(product);
      }
      check_close<T>("columns", row * count + i, k, out[row * count + i], want, scale);
    }
  }
  check(out.intact(), "columns margin", count, k, 0, 0);
}

template <typename T>
void test_combine(int tokens, int slots, int n) {
  std::mt19937 random(static_cast<unsigned>(tokens + slots + n));
  Array<T> y(tokens * slots * n), out(tokens * n);
  Array<float> scores(tokens * slots);
  y.fill(random);
  scores.fill(random);
  CombineArgs args{};
  args.y = y.data();
  args.scores = scores.data();
  args.out = out.data();
  args.slots = slots;
  args.n = n;
  // In two ranges that cut a token, as two threads would.
  const int middle = tokens * n / 2 + 1 < tokens * n ? tokens * n / 2 + 1 : 0;
  LB_ISA::experts_kernels.combine(dtype_of<T>(), args, 0, middle);
  LB_ISA::experts_kernels.combine(dtype_of<T>(), args, middle, tokens * n);

  for (int token = 0; token < tokens; ++token) {
    for (int i = 0; i < n; ++i) {
      double want = 0.0, scale = 0.0;
      for (int slot = 0; slot < slots; ++slot) {
        const double product = y[(token * slots + slot) * n + i] * scores[token * slots + slot];
        want += product;
        scale += std::fabs(product);
      }
      check_close<T>("combine", token * n + i, slots, out[token * n + i], want, scale);
    }
  }
  check(out.intact(), "combine margin", n, slots, 0, 0);
}

template <typename T>
void test_to_float(int count) {
  std::mt19937 random(static_cast<unsigned>(count));
  Array<T> x(count);
  Array<float> out(count);
  x.fill(random);
  LB_ISA::experts_kernels.to_float(dtype_of<T>(), x.data(), count, out.data());
  for (int i = 0; i < count; ++i) check(out[i] == x[i], "to_float", i, count, out[i], x[i]);
  check(out.intact(), "to_float margin", count, 0, 0, 0);
}

template <typename T>
void test_type() {
  for (int count = 0; count <= kMaxLength; ++count) {
    for (const int rows : {1, 3, 4, 6}) test_columns<T>(rows, count, 19, count % 2 == 0);
    test_combine<T>(3, 2, count);
    test_to_float<T>(count);
  }
  // Whole blocks of K, and what is left of them.
  for (const int k : {0, 1, 7, 8, 63, 64, 65, 150, 1037}) test_columns<T>(5, 37, k, true);
  for (int rows = 1; rows <= kColumnsRows; ++rows) test_columns<T>(rows, kColumns, 70, true);
  for (const int slots : {0, 1, 8}) test_combine<T>(2, slots, 33);
}

}  // namespace

void test_experts() {
  test_type<float>();
  test_type<bf16>();
  test_type<f16>();
}

}  // namespace testing
