#include "quantize_weight/quantize_weight.h"

#include <algorithm>

#include "loops.h"
#include "testing.h"

namespace testing {
namespace {

using namespace liteboost;

// The squared error of `weights` by a scale and a zero point, each rounded to the integer that is nearest.
double error_of(const std::vector<double>& weights, double scale, double low, double high) {
  double error = 0;
  for (const double w : weights) {
    const double q = std::fmin(std::fmax(std::nearbyint(w / scale), low), high);
    error += (w - q * scale) * (w - q * scale);
  }
  return error;
}

// Integers are those nearest by the scale that was found, and no plain scale has less of an error.
template <typename T>
void check_group(const char* name, const std::vector<double>& weights, const std::vector<double>& integers,
                 double scale, double low, double high, double plain) {
  const int count = static_cast<int>(weights.size());
  double error = 0;
  for (int i = 0; i < count; ++i) {
    const double want = std::fmin(std::fmax(weights[i] / scale, low), high);
    // Quotients are rounded to fp32 before they are rounded to integers.
    check(std::fabs(integers[i] - want) <= 0.5 + 1e-4, name, count, i, integers[i], want);
    error += std::pow(weights[i] - integers[i] * scale, 2);
  }
  const double most = error_of(weights, plain, low, high);
  check(error <= most * 1.001 + 1e-12, name, count, -1, error, most);
}

template <typename T>
void one_w8(int cols, DType scale_dtype) {
  std::mt19937 random(static_cast<unsigned>(cols));
  constexpr int kRows = 3;
  const int stride = cols + 1;
  Array<T> weight(kRows * stride);
  Array<float> scales(kRows);
  Array<int8_t> integers(kRows * cols);
  weight.fill(random, 0.05);
  for (int i = 0; i < cols; ++i) set(weight.data()[stride + i], 0.0);
  if (cols > 1) set(weight.data()[2 * stride + cols - 1], INFINITY);
  QuantizeWeightArgs args{};
  args.weight = weight.data();
  args.integers = integers.data();
  args.scales = scales.data();
  args.cols = args.group_size = cols;
  args.stride = stride;
  args.symmetric = true;
  args.dtype = dtype_of<T>();
  args.scale_dtype = scale_dtype;
  LB_ISA::quantize_weight_kernels.w8(args, 0, 1);
  LB_ISA::quantize_weight_kernels.w8(args, 1, kRows);
  std::vector<double> weights(cols), found(cols);
  double largest = 0;
  for (int i = 0; i < cols; ++i) {
    weights[i] = weight[i];
    found[i] = integers.data()[i];
    largest = std::fmax(largest, std::fabs(weights[i]));
    check(integers.data()[cols + i] == 0, "quantize_w8 zeros", cols, i, integers.data()[cols + i], 0);
  }
  check_group<T>("quantize_w8", weights, found, scales[0], -127, 127, largest / 127);
  check(scales[1] == 1, "quantize_w8 scale of zeros", cols, 1, scales[1], 1);
  if (cols > 1) {
    check(std::isnan(scales[2]), "quantize_w8 scale of infinity", cols, 2, scales[2], NAN);
    for (int i = 0; i < cols; ++i) {
      const int q = integers.data()[2 * cols + i];
      check(q == 0, "quantize_w8 infinity", cols, i, q, 0);
    }
  }
  check(integers.intact() && scales.intact(), "quantize_w8 margin", cols, 0, 0, 0);
}

template <typename T>
void one_w4(int group, int groups, bool symmetric) {
  std::mt19937 random(static_cast<unsigned>(group + groups));
  constexpr int kRows = 2;
  const int cols = group * groups, stride = cols + 3;
  Array<T> weight(kRows * stride);
  Array<float> scales(kRows * groups);
  Array<uint8_t> packed(kRows * cols / 2), zeros(kRows * groups);
  weight.fill(random, 0.05);
  set(weight.data()[stride + cols - 1], NAN);  // the last group
  QuantizeWeightArgs args{};
  args.weight = weight.data();
  args.integers = packed.data();
  args.scales = scales.data();
  args.zero_points = zeros.data();
  args.cols = cols;
  args.group_size = group;
  args.stride = stride;
  args.symmetric = symmetric;
  args.dtype = dtype_of<T>();
  args.scale_dtype = DType::f32;
  LB_ISA::quantize_weight_kernels.w4(args, 0, 1);
  LB_ISA::quantize_weight_kernels.w4(args, 1, kRows);
  for (int at = 0; at < kRows * groups; ++at) {
    const int zero = zeros.data()[at];
    std::vector<double> weights(group), found(group);
    double least = 0, largest = 0;
    for (int i = 0; i < group; ++i) {
      weights[i] = weight[at / groups * stride + at % groups * group + i];
      // Nibble j of word i of 32 columns is column 8 * j + i.
      const uint8_t* words = packed.data() + at * group / 2 + i / 32 * 16;
      const int word = words[2 * (i % 8)] | words[2 * (i % 8) + 1] << 8;
      found[i] = (word >> 4 * (i % 32 / 8) & 15) - zero;
      least = std::fmin(least, weights[i]);
      largest = std::fmax(largest, weights[i]);
    }
    if (symmetric) check(zero == 8, "quantize_w4 zero point", group, at, zero, 8);
    if (at == kRows * groups - 1) {
      check(std::isnan(scales[at]), "quantize_w4 scale of NaN", group, at, scales[at], NAN);
      for (const double q : found) check(q == 0, "quantize_w4 NaN", group, at, q, 0);
      continue;
    }
    const double plain = symmetric ? std::fmax(-least, largest) / 7 : (largest - least) / 15;
    check_group<T>("quantize_w4", weights, found, scales[at], -zero, 15 - zero, plain);
  }
  check(packed.intact() && scales.intact() && zeros.intact(), "quantize_w4 margin", group, 0, 0, 0);
}

template <typename T>
void one_type() {
  for (int cols = 1; cols <= kMaxLength; ++cols) one_w8<T>(cols, DType::f32);
  one_w8<T>(17000, DType::f32);  // more than are summed at once
  for (const int group : {32, 64, 96, 128}) {
    for (const int groups : {1, 3}) {
      one_w4<T>(group, groups, true);
      one_w4<T>(group, groups, false);
    }
  }
}

}  // namespace

void test_quantize_weight() {
  one_type<float>();
  one_type<bf16>();
  one_type<f16>();
}

}  // namespace testing
