#include "quantized_linear/quantized_linear.h"

#include "loops.h"
#include "testing.h"

namespace testing {
namespace {

using namespace liteboost;

// The integer in a column, less what stands for zero.
int integer(const QuantizedWeight& weight, int64_t row, int64_t column) {
  if (weight.bits == 8) return static_cast<const int8_t*>(weight.data)[row * weight.k + column];
  const uint8_t* pack =
      static_cast<const uint8_t*>(weight.data) + (row * weight.k + column / kPack * kPack) / 2;
  const int64_t word = column % 8, nibble = column % kPack / 8;
  const int q = pack[2 * word + nibble / 2] >> (4 * (nibble % 2)) & 15;
  const int64_t group = row * weight.groups + column / (weight.k / weight.groups);
  return q - (weight.zero_points ? weight.zero_points[group] : 8);
}

template <typename T>
void test_shape(int bits, int rows, int n, int k, int groups, bool with_zeros, bool with_bias) {
  std::mt19937 random(static_cast<unsigned>(rows + n + k + groups));
  Array<T> x(rows * k), bias(n), out(rows * n), whole(n * k);
  Array<float> scales(n * groups);
  Array<bf16> bytes(n * k * bits / 16 + 1), zeros(n * groups / 2 + 1);  // as memory that ends at a guard page
  x.fill(random);
  bias.fill(random);
  scales.fill(random);
  // The last byte of the weight is the last before the page, or one before it.
  uint8_t* data = reinterpret_cast<uint8_t*>(bytes.data()) + (n * k * bits / 16 + 1) * 2 - n * k * bits / 8;
  uint8_t* zero_points = reinterpret_cast<uint8_t*>(zeros.data()) + (n * groups / 2 + 1) * 2 - n * groups;
  for (int i = 0; i < n * k * bits / 8; ++i) data[i] = static_cast<uint8_t>(random());
  for (int i = 0; i < n * groups; ++i) zero_points[i] = static_cast<uint8_t>(random() % 17);

  QuantizedLinearArgs args{};
  args.weight = {data, scales.data(), with_zeros ? zero_points : nullptr, n, k, groups, bits, DType::f32};
  const auto& kernels = LB_ISA::quantized_linear_kernels;
  const DType dtype = dtype_of<T>();
  const int64_t size = kernels.packed_bytes(dtype, bits, rows, k);
  std::vector<char> buffer(static_cast<size_t>(size) + 128, 0x5a);
  char* packed = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(buffer.data()) + 63) / 64 * 64);
  kernels.pack(dtype, bits, x.data(), rows, k, packed);
  check(packed[size] == 0x5a, "quantized_linear packed", rows, k, packed[size], 0x5a);
  args.packed_x = packed;
  args.bias = with_bias ? bias.data() : nullptr;
  args.out = out.data();
  args.rows = rows;
  // In two ranges, as two threads would.
  kernels.run(dtype, args, 0, n / 2);
  kernels.run(dtype, args, n / 2, n);
  kernels.unpack(dtype, args.weight, 0, n, whole.data());

  for (int i = 0; i < n; ++i) {
    for (int row = 0; row < rows; ++row) {
      double want = with_bias ? bias[i] : 0.0, scale = std::fabs(want);
      for (int j = 0; j < k; ++j) {
        const double s = scales[i * groups + j / (k / groups)];
        want += x[row * k + j] * s * integer(args.weight, i, j);
        // What is summed before the zero point is taken off.
        scale +=
            std::fabs(x[row * k + j] * s) * (std::abs(integer(args.weight, i, j)) + (with_zeros ? 16 : 0));
      }
      check_close<T>("quantized_linear", row * n + i, k, out[row * n + i], want, scale);
    }
    for (int j = 0; j < k; ++j) {
      const double want = scales[i * groups + j / (k / groups)] * integer(args.weight, i, j);
      check_close<T>("unpack", i, j, whole[i * k + j], want, std::fabs(want));
    }
  }
  check(out.intact() && whole.intact(), "quantized_linear margin", n, k, 0, 0);
}

template <typename T>
void test_type() {
  for (int k = 1; k <= 2 * kMaxLength; ++k) {
    for (const int rows : {1, 3}) test_shape<T>(8, rows, 7, k, 1, false, k % 2 == 0);
  }
  for (int packs = 1; packs <= 9; ++packs) {
    for (const int rows : {1, 3, 6}) {
      test_shape<T>(4, rows, 7, 32 * packs, packs, packs % 2 == 0, packs % 3 == 0);
      test_shape<T>(4, rows, 7, 64 * packs, packs, packs % 2 == 1, packs % 3 == 0);
    }
  }
  for (int rows = 1; rows <= kQuantizedChunk; ++rows) {
    test_shape<T>(8, rows, 66, 70, 1, false, true);
    test_shape<T>(4, rows, 66, 96, 3, true, true);
  }
  // Beyond what is summed in one go.
  for (const int rows : {1, 5, 16}) {
    test_shape<T>(8, rows, 6, 8192 + 77, 1, false, true);
    test_shape<T>(4, rows, 6, 8192 + 96, 259, true, true);
  }
}

}  // namespace

void test_quantized_linear() {
  test_type<float>();
  test_type<bf16>();
  test_type<f16>();
}

}  // namespace testing
