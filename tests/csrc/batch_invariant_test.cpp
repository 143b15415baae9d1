#include "batch_invariant/batch_invariant.h"

#include <algorithm>

#include "loops.h"
#include "testing.h"

namespace testing {
namespace {

using namespace liteboost;

template <typename T>
void one_product(int rows, int k, int columns, bool outputs_side_by_side, bool has_add) {
  std::mt19937 random(static_cast<unsigned>(rows * 10000 + k * 100 + columns));
  constexpr int kBatch = 2;
  Array<T> x(kBatch * rows * k), y(kBatch * k * columns), add(columns), out(kBatch * rows * columns);
  x.fill(random, 2.0);
  y.fill(random, 1.0);
  add.fill(random, 1.0);
  BatchedProductArgs args{};
  args.x = x.data();
  args.y = y.data();
  args.add = has_add ? add.data() : nullptr;
  args.out = out.data();
  args.rows = rows;
  args.columns = columns;
  args.k = k;
  args.x_batch_stride = rows * k;
  args.x_row_stride = k;
  args.y_batch_stride = k * columns;
  args.y_row_step = outputs_side_by_side ? columns : 1;
  args.y_column_step = outputs_side_by_side ? 1 : k;
  args.add_strides[2] = 1;
  args.alpha = has_add ? -0.5 : 1.0;
  args.beta = has_add ? 2.0 : 0.0;
  args.dtype = dtype_of<T>();
  const int64_t tasks = kBatch * ((columns + kProductColumns - 1) / kProductColumns);
  LB_ISA::batch_invariant_kernels.product(args, 0, tasks / 2);
  LB_ISA::batch_invariant_kernels.product(args, tasks / 2, tasks);
  for (int row = 0; row < kBatch * rows; ++row) {
    for (int j = 0; j < columns; ++j) {
      double want = has_add ? args.beta * add[j] : 0.0;
      for (int i = 0; i < k; ++i) {
        want += args.alpha * x[row * k + i] *
                y[row / rows * args.y_batch_stride + i * args.y_row_step + j * args.y_column_step];
      }
      // Sums in double: two roundings and no more.
      check_close<T>("batched product", k, j, out[row * columns + j], want, 0.0);
    }
  }
  check(out.intact(), "batched product margin", rows, k, columns, 0);
}

template <typename T>
void one_softmax(int columns, int hidden) {
  std::mt19937 random(static_cast<unsigned>(columns * 100 + hidden));
  constexpr int kRows = 3;
  const int all = columns + hidden;
  Array<T> x(kRows * columns), out(kRows * columns), padded(kRows * all), padded_out(kRows * all);
  x.fill(random, 3.0);
  for (int row = 0; row < kRows; ++row) {
    for (int i = 0; i < all; ++i) {
      const bool is_seen = i >= hidden / 2 && i < hidden / 2 + columns;
      set(padded.data()[row * all + i], is_seen ? x[row * columns + i - hidden / 2] : -INFINITY);
    }
  }
  LB_ISA::batch_invariant_kernels.softmax({x.data(), out.data(), columns, dtype_of<T>()}, 0, 1);
  LB_ISA::batch_invariant_kernels.softmax({x.data(), out.data(), columns, dtype_of<T>()}, 1, kRows);
  LB_ISA::batch_invariant_kernels.softmax({padded.data(), padded_out.data(), all, dtype_of<T>()}, 0, kRows);
  for (int row = 0; row < kRows; ++row) {
    double largest = -INFINITY, total = 0.0;
    for (int i = 0; i < columns; ++i) largest = std::max(largest, x[row * columns + i]);
    for (int i = 0; i < columns; ++i) total += std::exp(x[row * columns + i] - largest);
    for (int i = 0; i < columns; ++i) {
      const double below = largest - x[row * columns + i];
      const double want = std::exp(-below) / total;
      // The difference is rounded to fp32 before its exponential.
      check_close<T>("softmax", columns, i, out[row * columns + i], want, want * (1.0 + below));
      check(out[row * columns + i] == padded_out[row * all + hidden / 2 + i],
            "softmax beside hidden elements", columns, hidden, row, i);
    }
  }
  check(out.intact() && padded_out.intact(), "softmax margin", columns, hidden, 0, 0);
}

template <typename T>
void all_sizes() {
  for (const int columns : {1, 5, 16, 40, 64, 131}) {
    for (int k = 1; k <= 70; k += 3) {
      for (const bool side_by_side : {false, true}) {
        for (const int rows : {1, 3, 6}) one_product<T>(rows, k, columns, side_by_side, k % 2 == 0);
      }
    }
    one_product<T>(5, 600, columns, false, false);
    one_product<T>(5, 600, columns, true, true);
  }
  for (int columns = 1; columns <= kMaxLength; ++columns) {
    for (const int hidden : {0, 1, 37}) one_softmax<T>(columns, hidden);
  }
}

}  // namespace

void test_batch_invariant() {
  all_sizes<float>();
  all_sizes<bf16>();
  all_sizes<f16>();
}

}  // namespace testing
