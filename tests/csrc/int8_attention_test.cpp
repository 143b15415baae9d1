#include "int8_attention/int8_attention.h"

#include "loops.h"
#include "testing.h"

namespace testing {
namespace {

using namespace liteboost;

struct Shape {
  int heads, kv_heads, q_len, kv_len, dim, value_dim;
};

// The scale behind `cols` integers, at any alignment.
float scale_of(const int8_t* row, int cols) {
  float scale;
  memcpy(&scale, row + cols, sizeof(scale));
  return scale;
}

// Rows of `cols` values, `stride` apart, as integers; each integer is the nearest.
template <typename T>
void fill_rows(Array<int8_t>& rows, int count, int cols, std::mt19937& random) {
  const int stride = cols + 3;
  Array<T> x((count - 1) * stride + cols);
  x.fill(random);
  LB_ISA::quantize_kv_kernels.quantize(dtype_of<T>(), {x.data(), stride, cols, rows.data()}, 0, count);
  for (int row = 0; row < count; ++row) {
    const int8_t* integers = rows.data() + row * (cols + 4);
    const double scale = scale_of(integers, cols);
    for (int c = 0; c < cols; ++c) {
      const double want = x[row * stride + c];
      check(std::fabs(integers[c] * scale - want) <= 0.50001 * scale, "quantize_kv", row, c,
            integers[c] * scale, want);
    }
  }
  check(rows.intact() && x.intact(), "quantize_kv margin", count, cols, 0, 0);
}

template <typename T>
void test_shape(const Shape& s, bool direct, int splits) {
  std::mt19937 random(static_cast<unsigned>(s.q_len + s.kv_len + s.dim + s.value_dim));
  const int stride = s.dim + 4, value_stride = s.value_dim + 4;
  Array<T> query(s.heads * s.q_len * s.dim), out(s.q_len * s.heads * s.value_dim);
  query.fill(random);
  Array<int8_t> key(s.kv_heads * s.kv_len * stride), value(s.kv_heads * s.kv_len * value_stride);
  fill_rows<T>(key, s.kv_heads * s.kv_len, s.dim, random);
  fill_rows<T>(value, s.kv_heads * s.kv_len, s.value_dim, random);

  AttentionArgs args{};
  args.query = query.data();
  args.key = key.data();
  args.value = value.data();
  args.output = out.data();
  args.query_strides[1] = s.q_len * s.dim;
  args.query_strides[2] = s.dim;
  args.key_strides[1] = s.kv_len * stride;
  args.key_strides[2] = stride;
  args.value_strides[1] = s.kv_len * value_stride;
  args.value_strides[2] = value_stride;
  args.batch = 1;
  args.num_heads = s.heads;
  args.num_kv_heads = s.kv_heads;
  args.q_len = s.q_len;
  args.kv_len = s.kv_len;
  args.head_dim = s.dim;
  args.value_dim = s.value_dim;
  args.scaling = 0.25f;
  args.is_causal = true;
  args.dtype = dtype_of<T>();
  args.quantize_kv = true;
  args.task_queries = s.q_len;
  args.task_heads = s.heads / s.kv_heads;
  args.kv_splits = splits;
  args.direct = direct;

  const auto& kernels = LB_ISA::attention_kernels;
  Array<float> scratch(static_cast<int64_t>(kernels.scratch_bytes(args) / sizeof(float)));
  Array<float> partials(s.kv_heads * splits * args.task_heads * s.q_len * (s.value_dim + 2));
  args.partials = partials.data();
  for (int task = 0; task < s.kv_heads * splits; ++task) kernels.run(args, task, scratch.data());
  for (int tile = 0; splits > 1 && tile < s.kv_heads; ++tile) kernels.merge(args, tile);

  std::vector<double> weights(static_cast<size_t>(s.kv_len));
  for (int row = 0; row < s.q_len * s.heads; ++row) {
    const int i = row / s.heads, head = row % s.heads, kv_head = head / (s.heads / s.kv_heads);
    double total = 0;
    for (int j = 0; j < s.kv_len; ++j) {
      const int8_t* integers = key.data() + (kv_head * s.kv_len + j) * stride;
      double dot = 0;
      for (int c = 0; c < s.dim; ++c) dot += query[(head * s.q_len + i) * s.dim + c] * integers[c];
      const bool seen = j <= i + s.kv_len - s.q_len;
      weights[static_cast<size_t>(j)] = seen ? std::exp(0.25 * dot * scale_of(integers, s.dim)) : 0.0;
      total += weights[static_cast<size_t>(j)];
    }
    for (int c = 0; c < s.value_dim; ++c) {
      double want = 0, size = 0;
      for (int j = 0; j < s.kv_len && total > 0; ++j) {
        const int8_t* integers = value.data() + (kv_head * s.kv_len + j) * value_stride;
        const double part =
            weights[static_cast<size_t>(j)] / total * integers[c] * scale_of(integers, s.value_dim);
        want += part;
        size += std::fabs(part);
      }
      const double bound = unit<T>() * std::fabs(want) + (unit<T>() + 64 * 0x1p-24) * size + 1e-7;
      const double got = out[row * s.value_dim + c];
      check(std::fabs(got - want) <= bound, "int8_attention", row, c, got, want);
    }
  }
  check(out.intact() && scratch.intact() && partials.intact(), "int8_attention margin", s.dim, s.kv_len, 0,
        0);
}

template <typename T>
void test_type() {
  for (int length = 1; length <= kMaxLength; ++length) {
    for (const bool direct : {true, false}) {
      test_shape<T>({2, 1, 2, 5, length, kMaxLength + 1 - length}, direct, 1);
      test_shape<T>({2, 1, 2, length + 1, 7, 5}, direct, 2);
    }
    test_shape<T>({2, 2, length, length + 3, 5, 6}, false, 1);
  }
  for (const bool direct : {true, false}) test_shape<T>({4, 2, 3, 600, 9, 17}, direct, 3);
}

}  // namespace

void test_int8_attention() {
  test_type<float>();
  test_type<bf16>();
  test_type<f16>();
}

}  // namespace testing
