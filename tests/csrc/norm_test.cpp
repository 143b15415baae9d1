#include "norm/norm.h"

#include "loops.h"
#include "testing.h"

namespace testing {
namespace {

using namespace liteboost;

constexpr float kEps = 1e-5f;
constexpr int kRows = 2;

double gate_of(double x, NormGate activation) {
  const double s = 1 / (1 + std::exp(-x));
  return activation == NormGate::silu ? x * s : s;
}

// The scale of check_close's noise where a row was first rounded to T and then multiplied by w: one rounding to
// T, relative, and of the denormals of f16, absolute.
template <typename T>
double rounded_scale(double want, double w) {
  return std::fabs(want) * (1 + unit<T>() / 0x1p-24 / 15) + std::fabs(w) / 16;
}

// 1 / sqrt of the mean square of f(i) over [0, count).
template <typename F>
double rstd(int count, const F& f) {
  double squares = 0.0;
  for (int i = 0; i < count; ++i) squares += f(i) * f(i);
  return 1 / std::sqrt(squares / count + static_cast<double>(kEps));
}

template <typename T, typename W>
void test_rms_norm(int cols, bool add, bool late, float offset) {
  std::mt19937 random(static_cast<unsigned>(cols));
  const int stride = cols + 3;  // rows apart, so that rows differ in alignment
  Array<T> x(stride + cols), residual(stride + cols), sum(kRows * cols);
  Array<W> weight(cols), out_wide(kRows * cols);
  Array<T> out_narrow(kRows * cols);
  x.fill(random);
  residual.fill(random);
  weight.fill(random);
  RmsNormArgs args{};
  args.x = x.data();
  args.residual = add ? residual.data() : nullptr;
  args.weight = weight.data();
  args.out = late ? static_cast<void*>(out_narrow.data()) : out_wide.data();
  args.sum = sum.data();
  args.cols = cols;
  args.x_stride = args.residual_stride = stride;
  args.eps = kEps;
  args.weight_offset = offset;
  args.dtype = dtype_of<T>();
  args.weight_dtype = dtype_of<W>();
  args.late = late;
  LB_ISA::norm_kernels.rms_norm(args, 0, kRows);
  for (int row = 0; row < kRows; ++row) {
    const auto input = [&](int i) {
      const double value = x[row * stride + i];
      return add ? rounded<T>(value + residual[row * stride + i]) : value;
    };
    const double r = rstd(cols, input);
    for (int i = 0; i < cols; ++i) {
      const double w = offset + weight[i];
      if (add)
        check(sum[row * cols + i] == input(i), "add_rms_norm sum", cols, i, sum[row * cols + i], input(i));
      if (late) {
        check_close<T>("rms_norm late", cols, i, out_narrow[row * cols + i], input(i) * r * w,
                       std::fabs(input(i) * r * w));
      } else {
        // Rounded twice, or three times with an offset, the first time to T.
        const double want = input(i) * r * w, scale = rounded_scale<T>(want, w);
        check_close<W>("rms_norm", cols, i, out_wide[row * cols + i], want, scale,
                       offset == 0.0f ? 2.0 : 3.0);
      }
    }
  }
  check(sum.intact() && out_narrow.intact() && out_wide.intact(), "rms_norm margin", cols, 0, 0, 0);
}

// Rows whose weight is that of their group, and the factor of every row alone.
template <typename T, typename W>
void test_groups(int cols) {
  std::mt19937 random(static_cast<unsigned>(cols));
  constexpr int kGroups = 2, rows = kGroups * kRows;
  Array<T> x(rows * cols), factor(rows);
  Array<W> weight(kGroups * cols), out(rows * cols);
  x.fill(random);
  weight.fill(random);
  RmsNormArgs args{};
  args.x = x.data();
  args.weight = weight.data();
  args.out = out.data();
  args.cols = args.x_stride = cols;
  args.weight_rows = kGroups;
  args.eps = kEps;
  args.dtype = dtype_of<T>();
  args.weight_dtype = dtype_of<W>();
  LB_ISA::norm_kernels.rms_norm(args, 1, rows);  // from the second row on, as another thread would
  InverseRmsArgs inverse{x.data(), factor.data(), cols, cols, kEps, dtype_of<T>()};
  LB_ISA::norm_kernels.inverse_rms(inverse, 0, rows);
  for (int row = 0; row < rows; ++row) {
    const double r = rstd(cols, [&](int i) -> double { return x[row * cols + i]; });
    if (cols > 0) check_close<T>("inverse_rms", cols, row, factor[row], r, r);
    for (int i = 0; i < cols && row > 0; ++i) {
      const double w = weight[row % kGroups * cols + i], want = x[row * cols + i] * r * w;
      check_close<W>("rms_norm groups", cols, i, out[row * cols + i], want, rounded_scale<T>(want, w), 2.0);
    }
  }
  check(out.intact() && factor.intact(), "groups margin", cols, 0, 0, 0);
}

template <typename T, typename W>
void test_gated(int cols, int group, bool gate_first, bool late, NormGate activation) {
  std::mt19937 random(static_cast<unsigned>(cols));
  Array<T> x(kRows * cols), gate(kRows * cols), out_narrow(kRows * cols);
  Array<W> weight(cols), out_wide(kRows * cols);
  std::vector<float> scratch(static_cast<size_t>(cols) + 1);
  x.fill(random);
  gate.fill(random);
  weight.fill(random);
  const bool wide = gate_first && !late;
  GatedRmsNormArgs args{};
  args.x = x.data();
  args.gate = gate.data();
  args.weight = weight.data();
  args.out = wide ? static_cast<void*>(out_wide.data()) : out_narrow.data();
  args.cols = args.x_stride = args.gate_stride = cols;
  args.group_size = group;
  args.eps = kEps;
  args.dtype = dtype_of<T>();
  args.weight_dtype = dtype_of<W>();
  args.activation = activation;
  args.gate_first = gate_first;
  args.late = late;
  LB_ISA::norm_kernels.gated_rms_norm(args, scratch.data(), 0, kRows);
  for (int at = 0; at < kRows * cols; ++at) {
    const int start = at - at % group, col = at % cols;
    const auto input = [&](int i) { return gate_first ? x[i] * gate_of(gate[i], activation) : x[i]; };
    const double r = rstd(group, [&](int i) { return input(start + i); });
    const double want = input(at) * r * weight[col] * (gate_first ? 1.0 : gate_of(gate[at], activation));
    const double scale = rounded_scale<T>(want, weight[col]);
    if (wide) {
      check_close<W>("gated_rms_norm", cols, at, out_wide[at], want, scale, 2.0);
    } else {
      check_close<T>("gated_rms_norm", cols, at, out_narrow[at], want, scale, 3.0);
    }
  }
  check(out_narrow.intact() && out_wide.intact(), "gated_rms_norm margin", cols, 0, 0, 0);
}

template <typename T, typename W>
void test_layer_norm(int cols, bool with_weight, bool with_bias) {
  std::mt19937 random(static_cast<unsigned>(cols));
  Array<T> x(kRows * cols), out(kRows * cols);
  Array<W> weight(cols), bias(cols);
  x.fill(random);
  weight.fill(random);
  bias.fill(random);
  LayerNormArgs args{};
  args.x = x.data();
  args.weight = with_weight ? weight.data() : nullptr;
  args.bias = with_bias ? bias.data() : nullptr;
  args.out = out.data();
  args.cols = args.x_stride = cols;
  args.eps = kEps;
  args.dtype = dtype_of<T>();
  args.weight_dtype = dtype_of<W>();
  LB_ISA::norm_kernels.layer_norm(args, 0, kRows);
  for (int row = 0; row < kRows; ++row) {
    double mean = 0.0;
    for (int i = 0; i < cols; ++i) mean += x[row * cols + i] / cols;
    const double r = rstd(cols, [&](int i) { return x[row * cols + i] - mean; });
    for (int i = 0; i < cols; ++i) {
      const double w = with_weight ? weight[i] : 1.0, b = with_bias ? bias[i] : 0.0;
      const double want = (x[row * cols + i] - mean) * r * w + b;
      const double scale =
          (std::fabs(x[row * cols + i]) + std::fabs(mean) + 1) * r * std::fabs(w) + std::fabs(b);
      // A row of one has no spread, and its difference to the mean is rounding alone.
      if (cols > 1) check_close<T>("layer_norm", cols, i, out[row * cols + i], want, scale);
    }
  }
  check(out.intact(), "layer_norm margin", cols, 0, 0, 0);
}

template <typename T, typename W>
void test_types() {
  for (int cols = 0; cols <= kMaxLength; ++cols) {
    for (const bool add : {false, true}) {
      test_rms_norm<T, W>(cols, add, false, 0.0f);
      test_rms_norm<T, W>(cols, add, false, 1.0f);
      test_rms_norm<T, W>(cols, add, true, 1.0f);
    }
    test_groups<T, W>(cols);
    test_layer_norm<T, W>(cols, true, true);
    test_layer_norm<T, W>(cols, false, true);
    test_layer_norm<T, W>(cols, true, false);
    if (cols == 0) continue;
    for (const bool late : {false, true}) {
      test_gated<T, W>(cols, cols, false, late, NormGate::silu);
      test_gated<T, W>(cols, cols, true, late, NormGate::sigmoid);
      if (cols % 3 == 0) test_gated<T, W>(cols, cols / 3, true, late, NormGate::silu);
    }
  }
}

}  // namespace

void test_norm() {
  test_types<float, float>();
  test_types<bf16, bf16>();
  test_types<bf16, float>();
  test_types<f16, f16>();
  test_types<f16, float>();
}

}  // namespace testing
