#include "quantized_linear/quantized_linear.h"

#include "loops.h"
#include "testing.h"

namespace testing {
namespace {

using namespace liteboost;

// What a tile holds of output i, column j.
struct Layout {
  int bits, n, k, groups;
  bool with_zeros;
  int tiles() const { return (n + 15) / 16; }
  int steps() const { return (k + 31) / 32 * 4; }
  int bytes() const { return tiles() * steps() * 128 * bits / 8; }
  int scale(int i, int j) const { return (i / 16 * groups + j / (k / groups)) * 16 + i % 16; }
  // The integer, less what stands for zero.
  int integer(const uint8_t* data, const uint8_t* zeros, int i, int j) const {
    const uint8_t* tile = data + i / 16 * steps() * 128 * bits / 8;
    if (bits == 8) return static_cast<int8_t>(tile[j / 4 * 64 + i % 16 * 4 + j % 4]);
    // 32 bits of a row: words i and i + 1 of its pack, whose nibble q is column 8 * q + i.
    const int word = j % 8, nibble = j % 32 / 8;
    const uint8_t* four = tile + (j / 32 * 4 + word / 2) * 64 + i % 16 * 4;
    const int q = four[word % 2 * 2 + nibble / 2] >> (4 * (nibble % 2)) & 15;
    return q - (with_zeros ? zeros[scale(i, j)] : 8);
  }
};

// Integers, scales and zero points of a weight, in memory that ends at a guard page.
struct Weight {
  Array<float> scales;
  Array<bf16> bytes, zeros;
  Weight(const Layout& layout, std::mt19937& random)
      : scales(layout.tiles() * layout.groups * 16),
        bytes(layout.bytes() / 2),
        zeros(layout.tiles() * layout.groups * 8) {
    scales.fill(random);
    for (int i = 0; i < layout.bytes(); ++i) data()[i] = static_cast<uint8_t>(random());
    for (int i = 0; i < layout.tiles() * layout.groups * 16; ++i)
      zero_points()[i] = static_cast<uint8_t>(random() % 17);
  }
  uint8_t* data() { return reinterpret_cast<uint8_t*>(bytes.data()); }
  uint8_t* zero_points() { return reinterpret_cast<uint8_t*>(zeros.data()); }
  QuantizedTiles tiles(const Layout& layout, bool rounds_x = false) {
    return {data(),      scales.data(), layout.with_zeros ? zero_points() : nullptr,
            layout.n,    layout.k,      layout.groups,
            layout.bits, DType::f32,    rounds_x};
  }
};

// What x has: any numbers; some that are far below others of their 32 columns, which then need a third limb; or the one
// of a bf16's mantissas that is too large for three limbs of its power of two.
enum class Values { any, spread, halved };

template <typename T>
void test_shape(int bits, int rows, int n, int k, int groups, bool with_zeros, bool with_bias,
                Values values = Values::any) {
  std::mt19937 random(static_cast<unsigned>(rows + n + k + groups));
  const Layout layout = {bits, n, k, groups, with_zeros};
  const int tiles = layout.tiles();
  Array<T> x(rows * k), bias(n), out(rows * n), whole(n * k);
  x.fill(random);
  for (int i = 0; i < rows * k && values != Values::any; ++i) {
    const double own = x[i];
    if (values == Values::spread) {
      set(x.data()[i], std::ldexp(own, -static_cast<int>(random() % 20)));
    } else {
      set(x.data()[i], i % 5 == 0 ? 0x1.fep0 : own * 0.1);
    }
  }
  bias.fill(random);
  Weight weight(layout, random);
  const Array<float>& scales = weight.scales;
  const uint8_t *data = weight.data(), *zero_points = weight.zero_points();

  QuantizedLinearArgs args{};
  args.weight = weight.tiles(layout);
  const auto& kernels = LB_ISA::quantized_linear_kernels;
  const DType dtype = dtype_of<T>();
  const int64_t size = kernels.packed_bytes(dtype, args.weight, rows);
  std::vector<char> buffer(static_cast<size_t>(size) + 128, 0x5a);
  char* packed = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(buffer.data()) + 63) / 64 * 64);
  kernels.pack(dtype, args.weight, x.data(), rows, packed);
  check(packed[size] == 0x5a, "quantized_linear packed", rows, k, packed[size], 0x5a);
  args.packed_x = packed;
  args.bias = with_bias ? bias.data() : nullptr;
  args.out = out.data();
  args.rows = rows;
  args.out_stride = n;
  // In two ranges, as two threads would.
  kernels.run(dtype, args, 0, tiles / 2);
  kernels.run(dtype, args, tiles / 2, tiles);
  for (int tile = 0; tile < tiles; ++tile) {
    kernels.unpack(dtype, args.weight, tile, whole.data() + tile * 16 * k);
  }

  for (int i = 0; i < n; ++i) {
    for (int row = 0; row < rows; ++row) {
      double want = with_bias ? bias[i] : 0.0, scale = std::fabs(want);
      for (int j = 0; j < k; ++j) {
        const double s = scales[layout.scale(i, j)];
        const int integer = layout.integer(data, zero_points, i, j);
        want += x[row * k + j] * s * integer;
        // What is summed before the zero point is taken off.
        scale += std::fabs(x[row * k + j] * s) * (std::abs(integer) + (with_zeros ? 16 : 0));
      }
      check_close<T>("quantized_linear", row * n + i, k, out[row * n + i], want, scale);
    }
    for (int j = 0; j < k; ++j) {
      const double want = scales[layout.scale(i, j)] * layout.integer(data, zero_points, i, j);
      check_close<T>("unpack", i, j, whole[i * k + j], want, std::fabs(want));
    }
  }
  check(out.intact() && whole.intact(), "quantized_linear margin", n, k, 0, 0);
}

// What 32 columns of x are rounded to: integers times a unit.
template <typename T>
float round_pack(const Array<T>& x, int first, int (&integers)[32]) {
  float largest = 0x1p-100f;
  for (int j = 0; j < 32; ++j) largest = std::fmax(largest, std::fabs(static_cast<float>(x[first + j])));
  const float factor = 127.0f / largest;
  for (int j = 0; j < 32; ++j)
    integers[j] = static_cast<int>(std::nearbyint(static_cast<float>(x[first + j]) * factor));
  return largest / 127.0f;
}

// Rows that are rounded to 8 bits, packed in two parts where there are several chunks.
template <typename T>
void test_rounded(int rows, int n, int k, int groups, bool with_zeros, bool with_bias) {
  std::mt19937 random(static_cast<unsigned>(rows + n + k + groups));
  const Layout layout = {4, n, k, groups, with_zeros};
  const int tiles = layout.tiles();
  Array<T> x(rows * k), bias(n), out(rows * n);
  x.fill(random);
  bias.fill(random);
  Weight weight(layout, random);
  const Array<float>& scales = weight.scales;
  const uint8_t *data = weight.data(), *zero_points = weight.zero_points();
  QuantizedLinearArgs args{};
  args.weight = weight.tiles(layout, true);
  const auto& kernels = LB_ISA::quantized_linear_kernels;
  const DType dtype = dtype_of<T>();
  const int64_t size = kernels.packed_bytes(dtype, args.weight, rows);
  std::vector<char> buffer(static_cast<size_t>(size) + 128, 0x5a);
  char* packed = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(buffer.data()) + 63) / 64 * 64);
  const int64_t chunks = kernels.chunks(dtype, args.weight, rows);
  kernels.pack_chunks(dtype, args.weight, x.data(), rows, chunks / 2, chunks, packed);
  kernels.pack_chunks(dtype, args.weight, x.data(), rows, 0, chunks / 2, packed);
  check(packed[size] == 0x5a, "quantized_linear packed", rows, k, packed[size], 0x5a);
  args.packed_x = packed;
  args.bias = with_bias ? bias.data() : nullptr;
  args.out = out.data();
  args.rows = rows;
  args.out_stride = n;
  kernels.run(dtype, args, 0, tiles);
  for (int row = 0; row < rows; ++row) {
    std::vector<double> want(static_cast<size_t>(n)), scale(static_cast<size_t>(n));
    for (int first = 0; first < k; first += 32) {
      int integers[32];
      const double unit = round_pack(x, row * k + first, integers);
      for (int i = 0; i < n; ++i) {
        double sum = 0;
        for (int j = 0; j < 32; ++j) sum += integers[j] * layout.integer(data, zero_points, i, first + j);
        const double product = sum * unit * scales[layout.scale(i, first)];
        want[static_cast<size_t>(i)] += product;
        scale[static_cast<size_t>(i)] += std::fabs(product);
      }
    }
    for (int i = 0; i < n; ++i) {
      const double added = with_bias ? static_cast<double>(bias[i]) : 0.0;
      const size_t at = static_cast<size_t>(i);
      check_close<T>("rounded", row * n + i, k, out[row * n + i], want[at] + added,
                     scale[at] + std::fabs(added));
    }
  }
  check(out.intact(), "rounded margin", n, k, 0, 0);
}

template <typename T>
void test_rounded_rows() {
  for (int rows = 1; rows <= 20; ++rows) test_rounded<T>(rows, 35, 96, 3, rows % 2 == 0, rows % 3 == 0);
  for (int packs = 1; packs <= 9; ++packs) {
    test_rounded<T>(1, 7, 64 * packs, packs, packs % 2 == 0, true);
    test_rounded<T>(5, 19, 32 * packs, 1, packs % 2 == 1, false);
  }
  for (const int rows : {32, 33, 49, 70}) test_rounded<T>(rows, 17, 128, 2, rows % 2 == 0, true);
}

// Many rows of bf16, `part` steps of the columns at a time, where there are loops for them.
void test_matrix(int bits, int rows, int n, int k, int groups, bool with_zeros, bool with_bias, int part) {
  const auto& kernels = LB_ISA::quantized_linear_kernels;
  const MatrixKernels& matrix = kernels.matrix;
  if (matrix.run == nullptr) return;
  std::mt19937 random(static_cast<unsigned>(rows + n + k + groups));
  const Layout layout = {bits, n, k, groups, with_zeros};
  const int tiles = layout.tiles(), steps = layout.steps(), chunks = (rows + kMatrixRows - 1) / kMatrixRows;
  Array<bf16> x(rows * k), bias(n), out(rows * n), whole(n * k);
  x.fill(random);
  bias.fill(random);
  Weight weight(layout, random);
  const Array<float>& scales = weight.scales;
  const uint8_t *data = weight.data(), *zero_points = weight.zero_points();
  const QuantizedTiles packed_weight = weight.tiles(layout);
  for (int tile = 0; tile < tiles; ++tile) {
    kernels.unpack(DType::bf16, packed_weight, tile, whole.data() + tile * 16 * k);
  }

  Array<bf16> packed(chunks * steps * 8 * static_cast<int>(kMatrixRows));
  Array<bf16> pairs(part * 8 * static_cast<int>(kMatrixTiles) * 16);
  Array<float> sums(chunks * static_cast<int>(kMatrixRows * kMatrixTiles) * 16);
  MatrixArgs args{};
  args.chunk_bytes = steps * 16 * kMatrixRows;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const int row = chunk * static_cast<int>(kMatrixRows);
    const int64_t count = rows - row < kMatrixRows ? rows - row : kMatrixRows;
    char* to = reinterpret_cast<char*>(packed.data()) + chunk * args.chunk_bytes;
    matrix.pack(x.data() + row * k, count, k, steps * 4, to);
  }
  args.weight = pairs.data();
  args.sums = sums.data();
  args.rows = rows;
  args.out_stride = n;
  for (int first = 0; first < tiles; first += kMatrixTiles) {
    float factors[kMatrixTiles * kTile] = {};
    args.scales = factors;
    args.bias = with_bias ? bias.data() + first * 16 : nullptr;
    args.out = out.data() + first * 16;
    args.outputs = n - first * 16 < kMatrixTiles * kTile ? n - first * 16 : kMatrixTiles * kTile;
    for (int begin = 0; begin < steps; begin += part) {
      const int end = begin + part < steps ? begin + part : steps;
      for (int tile = first; tile < tiles && tile < first + kMatrixTiles; ++tile) {
        char* to = reinterpret_cast<char*>(pairs.data()) + (tile - first) * 64;
        matrix.unpack(packed_weight, tile, begin, end, to, factors + (tile - first) * 16);
      }
      args.packed_x = reinterpret_cast<char*>(packed.data()) + begin * 16 * kMatrixRows;
      args.pairs = (end - begin) * 4;
      args.is_first = begin == 0;
      args.is_last = end == steps;
      matrix.run(args);
    }
  }
  for (int i = 0; i < n; ++i) {
    for (int row = 0; row < rows; ++row) {
      double want = with_bias ? bias[i] : 0.0, scale = std::fabs(want);
      for (int j = 0; j < k; ++j) {
        // Rounded where there are groups.
        const double exact = scales[layout.scale(i, j)] * layout.integer(data, zero_points, i, j);
        const double product = x[row * k + j] * (groups > 1 ? whole[i * k + j] : exact);
        want += product;
        scale += std::fabs(product);
      }
      check_close<bf16>("quantized matrix", row * n + i, k, out[row * n + i], want, scale);
    }
  }
  check(out.intact() && packed.intact() && pairs.intact() && sums.intact(), "matrix margin", n, k, 0, 0);
}

void test_matrices() {
  for (int k = 1; k <= 70; ++k) test_matrix(8, 7, 37, k, 1, false, k % 2 == 0, 4);
  for (const int rows : {1, 5, 6, 13}) {
    for (const int n : {1, 16, 63, 64, 130}) {
      test_matrix(8, rows, n, 96, 1, false, true, 12);
      test_matrix(8, rows, n, 96, 3, false, false, 4);
      test_matrix(4, rows, n, 96, 3, rows % 2 == 0, true, 8);
      test_matrix(4, rows, n, 64, 1, rows % 2 == 1, false, 8);
    }
  }
}

// Many rows by panels of floats, where there are loops for them.
template <typename T>
void test_gemm(int bits, int rows, int n, int k, int groups, bool with_zeros, bool with_bias, int together) {
  const QuantizedGemmKernels& gemm = LB_ISA::quantized_linear_kernels.gemm;
  if (gemm.run == nullptr) return;
  std::mt19937 random(static_cast<unsigned>(rows + n + k + groups));
  const Layout layout = {bits, n, k, groups, with_zeros};
  Array<T> x(rows * k), bias(n), out(rows * n);
  x.fill(random);
  bias.fill(random);
  Array<float> widened(rows * k);
  for (int i = 0; i < rows * k; ++i) widened.data()[i] = static_cast<float>(x[i]);
  Weight weight(layout, random);
  const int64_t count = gemm.scratch(k, together);
  std::vector<float> buffer(static_cast<size_t>(count) + 32, 7.0f);
  float* scratch = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(buffer.data()) + 63) / 64 * 64);

  QuantizedLinearArgs args{};
  args.weight = weight.tiles(layout);
  args.bias = with_bias ? bias.data() : nullptr;
  args.out = out.data();
  args.rows = rows;
  // Several panels at a time, and rows in two ranges.
  const int panels = (layout.tiles() + static_cast<int>(kPanelTiles) - 1) / static_cast<int>(kPanelTiles);
  for (int panel = 0; panel < panels; panel += together) {
    const int end = panel + together < panels ? panel + together : panels;
    gemm.run(dtype_of<T>(), args, widened.data(), panel, end, 0, rows / 3, scratch);
    gemm.run(dtype_of<T>(), args, widened.data(), panel, end, rows / 3, rows, scratch);
  }
  for (int i = 0; i < 16; ++i)
    check(scratch[count + i] == 7.0f, "quantized gemm scratch", rows, k, scratch[count + i], 7);
  for (int i = 0; i < n; ++i) {
    for (int row = 0; row < rows; ++row) {
      double want = with_bias ? bias[i] : 0.0, scale = std::fabs(want);
      for (int j = 0; j < k; ++j) {
        const double product = x[row * k + j] * weight.scales[layout.scale(i, j)] *
                               layout.integer(weight.data(), weight.zero_points(), i, j);
        want += product;
        scale += std::fabs(product);
      }
      check_close<T>("quantized gemm", row * n + i, k, out[row * n + i], want, scale);
    }
  }
  check(out.intact(), "quantized gemm margin", n, k, 0, 0);
}

template <typename T>
void test_gemms() {
  for (int k = 1; k <= 70; ++k) test_gemm<T>(8, 7, 37, k, 1, false, k % 2 == 0, 1);
  for (const int rows : {1, 6, 13, 193}) {
    for (const int n : {1, 16, 63, 64, 130}) {
      test_gemm<T>(8, rows, n, 96, 1, false, true, 2);
      test_gemm<T>(8, rows, n, 96, 3, false, false, 1);
      test_gemm<T>(4, rows, n, 96, 3, rows % 2 == 0, true, 3);
      test_gemm<T>(4, rows, n, 64, 1, rows % 2 == 1, false, 1);
    }
  }
  for (const int k : {256, 288, 1056}) test_gemm<T>(4, 9, 70, k, k / 32, true, true, 2);
}

// Several registers of rows, several of blocks of columns, and more rows than sums are kept for (quantized_amx.h).
template <typename T>
void test_many_rows() {
  for (const int rows : {16, 17, 32, 33, 48, 49, 64, 65, 81}) {
    test_shape<T>(8, rows, 19, 201, 1, false, rows % 2 == 0);
    test_shape<T>(4, rows, 19, 384, 3, rows % 2 == 0, true);
  }
  for (const int rows : {4, 20, 40}) {
    test_shape<T>(8, rows, 5, 1161, 1, false, true);
    test_shape<T>(4, rows, 5, 1280, 2, true, false);
    test_shape<T>(4, rows, 5, 1280, 40, true, true);
  }
  test_shape<T>(8, 260, 17, 40, 1, false, true);
  test_shape<T>(4, 300, 17, 64, 2, true, true);
}

template <typename T>
void test_type() {
  for (int k = 1; k <= 2 * kMaxLength; ++k) {
    for (const int rows : {1, 2, 3, 4}) test_shape<T>(8, rows, 7, k, 1, false, k % 2 == 0);
  }
  for (int packs = 1; packs <= 9; ++packs) {
    for (const int rows : {1, 3, 6}) {
      test_shape<T>(4, rows, 7, 32 * packs, packs, packs % 2 == 0, packs % 3 == 0);
      test_shape<T>(4, rows, 7, 64 * packs, packs, packs % 2 == 1, packs % 3 == 0);
    }
  }
  test_many_rows<T>();
  test_rounded_rows<T>();
  for (int rows = 1; rows <= 20; ++rows) {  // every form of the loops, and more than one chunk
    test_shape<T>(8, rows, 35, 70, 1, false, true);
    test_shape<T>(4, rows, 35, 96, 3, true, true);
    test_shape<T>(8, rows, 33, 64, 2, false, false);
  }
  for (const Values values : {Values::spread, Values::halved}) {
    for (const int rows : {1, 2, 3, 5}) {
      test_shape<T>(8, rows, 19, 77, 1, false, true, values);
      test_shape<T>(4, rows, 19, 96, 3, true, true, values);
    }
  }
  test_shape<T>(4, 70, 35, 96, 3, true, true);
  // Beyond what is converted in one go.
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
  test_matrices();
  test_gemms<float>();
  test_gemms<bf16>();
  test_gemms<f16>();
}

}  // namespace testing
