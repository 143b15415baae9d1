#include "attention/attention.h"

#include "loops.h"
#include "testing.h"

namespace testing {
namespace {

using namespace liteboost;

struct Shape {
  int heads, kv_heads, q_len, kv_len, dim, value_dim;
};

// What a task may be: keys read in place or packed, walked whole or in parts that are merged.
struct Way {
  bool direct;
  int queries, heads, splits;
  int page_rows = 0;  // 0: keys lie one after the other
};

// Which row of memory the key at each position lies in: all pages but the last, which may be cut short, reversed.
struct Pages {
  std::vector<int64_t> table;
  int rows;

  Pages(int page_rows, int kv_len) : rows(page_rows) {
    const int last = page_rows > 0 ? (kv_len - 1) / page_rows : 0;
    for (int page = 0; page < last; ++page) table.push_back(last - 1 - page);
    table.push_back(last);
  }
  int row(int j) const {
    return rows == 0 ? j : static_cast<int>(table[static_cast<size_t>(j / rows)]) * rows + j % rows;
  }
};

// A NaN in the first query, all of whose logits it makes NaN, or in the first key.
enum class Spoiled { nothing, query, key };

template <typename T>
void test_shape(const Shape& s, const Way& way, bool causal, bool masked,
                Spoiled spoiled = Spoiled::nothing) {
  std::mt19937 random(static_cast<unsigned>(s.q_len + s.kv_len + s.dim + s.value_dim));
  // Rows apart, so that they differ in alignment; each head and row of the last array ends at the guard page.
  const int stride = s.dim + 3, value_stride = s.value_dim + 1;
  Array<T> query(s.heads * s.q_len * s.dim), key((s.kv_heads * s.kv_len - 1) * stride + s.dim),
      value((s.kv_heads * s.kv_len - 1) * value_stride + s.value_dim), out(s.q_len * s.heads * s.value_dim);
  for (Array<T>* array : {&query, &key, &value}) array->fill(random);
  const Pages pages(way.page_rows, s.kv_len);
  if (spoiled == Spoiled::query) set(query.data()[s.dim - 1], NAN);
  if (spoiled == Spoiled::key) set(key.data()[pages.row(0) * stride], NAN);
  Array<uint8_t> mask(s.q_len * s.kv_len);
  for (int i = 0; i < s.q_len * s.kv_len; ++i) mask.data()[i] = random() % 3 != 0;
  // One a query; heads are neighbours in memory, as a projection leaves them.
  Array<float> sinks(s.q_len * s.heads);
  sinks.fill(random);

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
  if (way.page_rows > 0) {
    args.pages = pages.table.data();
    args.page_rows = way.page_rows;
    args.key_page_stride = way.page_rows * stride;
    args.value_page_stride = way.page_rows * value_stride;
  }
  if (masked) {
    args.mask = mask.data();
    args.mask_type = AttentionMask::boolean;
    args.mask_strides[2] = s.kv_len;
    args.mask_strides[3] = 1;
    args.sinks = sinks.data();
    args.sink_strides[1] = 1;
    args.sink_strides[2] = s.heads;
  }
  args.batch = 1;
  args.num_heads = s.heads;
  args.num_kv_heads = s.kv_heads;
  args.q_len = s.q_len;
  args.kv_len = s.kv_len;
  args.head_dim = s.dim;
  args.value_dim = s.value_dim;
  args.scaling = 0.25f;
  args.is_causal = causal;
  args.dtype = dtype_of<T>();
  args.task_queries = way.queries;
  args.task_heads = way.heads;
  args.kv_splits = way.splits;
  args.direct = way.direct;

  const int group = s.heads / s.kv_heads;
  const int tiles =
      s.kv_heads * ((group + way.heads - 1) / way.heads) * ((s.q_len + way.queries - 1) / way.queries);
  const auto& kernels = LB_ISA::attention_kernels;
  // Exactly what the loops ask for, up to the guard page.
  Array<float> scratch(static_cast<int64_t>(kernels.scratch_bytes(args) / sizeof(float)));
  Array<float> partials(tiles * way.splits * way.heads * way.queries * (s.value_dim + 2));
  args.partials = partials.data();
  for (int task = 0; task < tiles * way.splits; ++task) kernels.run(args, task, scratch.data());
  for (int tile = 0; way.splits > 1 && tile < tiles; ++tile) kernels.merge(args, tile);

  std::vector<double> weights(static_cast<size_t>(s.kv_len));
  for (int row = 0; row < s.q_len * s.heads; ++row) {
    const int i = row / s.heads, head = row % s.heads, kv_head = head / group;
    double total = 0;
    bool sees_any = false;
    for (int j = 0; j < s.kv_len; ++j) {
      double dot = 0;
      for (int c = 0; c < s.dim; ++c) {
        dot +=
            query[(head * s.q_len + i) * s.dim + c] * key[(kv_head * s.kv_len + pages.row(j)) * stride + c];
      }
      const bool in_reach = !causal || j <= i + s.kv_len - s.q_len;
      const bool shown = !masked || mask.data()[i * s.kv_len + j] != 0;
      sees_any = sees_any || (in_reach && shown);
      weights[static_cast<size_t>(j)] = in_reach ? std::exp(0.25 * dot - (shown ? 0.0 : INFINITY)) : 0.0;
      total += weights[static_cast<size_t>(j)];
    }
    // Not total > 0, which a NaN is not.
    const bool sees_none = total == 0;
    if (masked && !sees_none) total += std::exp(static_cast<double>(sinks[row]));
    for (int c = 0; c < s.value_dim; ++c) {
      double want = 0, scale = 0;
      for (int j = 0; j < s.kv_len && !sees_none; ++j) {
        const double part = weights[static_cast<size_t>(j)] / total *
                            value[(kv_head * s.kv_len + pages.row(j)) * value_stride + c];
        want += part;
        scale += std::fabs(part);
      }
      // Probabilities may be rounded to bf16 too; fp32 dot products carry their error into the exponential.
      const double bound = unit<T>() * std::fabs(want) + (unit<T>() + 64 * 0x1p-24) * scale + 1e-7;
      const double got = out[row * s.value_dim + c];
      // A key that no row of a task sees is left out.
      const bool is_left_out = spoiled == Spoiled::key && !sees_any && got == 0;
      const bool right = std::isnan(want) ? std::isnan(got) || is_left_out : std::fabs(got - want) <= bound;
      check(right, "attention", row, c, got, want);
    }
  }
  check(out.intact() && scratch.intact() && partials.intact(), "attention margin", s.dim, s.kv_len, 0, 0);
}

template <typename T>
void test_type() {
  const Way ways[] = {{true, 2, 2, 1}, {true, 2, 1, 3}, {false, 2, 2, 1}, {false, 1, 2, 2}};
  for (int length = 1; length <= kMaxLength; ++length) {
    for (const Way& way : ways) {
      test_shape<T>({2, 1, 2, 5, length, kMaxLength + 1 - length}, way, false, false);
      test_shape<T>({2, 1, 2, length, 7, 5}, way, true, length % 2 == 0);
      test_shape<T>({2, 1, 2, length, 7, 5}, way, true, length % 2 == 0, Spoiled::query);
      test_shape<T>({2, 1, 3, length, 7, 5}, way, true, length % 2 == 0, Spoiled::key);
    }
    test_shape<T>({2, 1, length, length + 3, 5, 6}, {false, 16, 1, 1}, true, length % 2 == 0);
    test_shape<T>({2, 2, length, 20, 5, 6}, {false, 100, 1, 2}, true, false);
  }
  // Several blocks of keys, and dimensions whose products are summed in parts.
  test_shape<T>({4, 2, 3, 600, 9, 17}, {false, 3, 2, 1}, true, true);
  test_shape<T>({4, 2, 3, 600, 9, 17}, {true, 3, 2, 1}, true, true);
  test_shape<T>({1, 1, 9, 40, 300, 260}, {false, 9, 1, 1}, false, false);
  // Pages that end within a vector and at its end, in blocks of one and of several.
  for (const int rows : {1, 3, 16, 48, 100, 256}) {
    for (const bool direct : {true, false}) {
      test_shape<T>({4, 2, 3, 600, 9, 17}, {direct, 3, 2, 1, rows}, true, true);
      test_shape<T>({2, 1, 2, 333, 16, 5}, {direct, 2, 2, 3, rows}, true, false);
      test_shape<T>({2, 1, 5, 7, 5, 6}, {direct, 4, 1, 1, rows}, true, false);
    }
  }
}

}  // namespace

void test_attention() {
  test_type<float>();
  test_type<bf16>();
  test_type<f16>();
}

}  // namespace testing
