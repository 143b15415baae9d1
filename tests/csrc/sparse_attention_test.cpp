// Attention over chosen blocks of keys: the loops of attention with lists of blocks.
#include "attention/attention.h"
#include "loops.h"
#include "testing.h"

namespace testing {
namespace {

using namespace liteboost;

struct Shape {
  int heads, kv_heads, q_len, kv_len, dim, query_block, key_block;
  bool shared, direct, causal;
};

int blocks_in(int length, int block) { return (length + block - 1) / block; }

template <typename T>
void test_shape(const Shape& s) {
  std::mt19937 random(static_cast<unsigned>(s.q_len * 7 + s.kv_len + s.dim));
  Array<T> query(s.heads * s.q_len * s.dim), key(s.kv_heads * s.kv_len * s.dim),
      value(s.kv_heads * s.kv_len * s.dim), out(s.q_len * s.heads * s.dim);
  for (Array<T>* array : {&query, &key, &value}) array->fill(random);
  const int group = s.heads / s.kv_heads, choosing = s.shared ? s.kv_heads : s.heads;
  const int query_blocks = blocks_in(s.q_len, s.query_block), most = blocks_in(s.kv_len, s.key_block);
  std::vector<int64_t> lists, counts;
  for (int row = 0; row < query_blocks * choosing; ++row) {
    std::vector<int64_t> list;
    for (int j = 0; j < most; ++j) {
      if (random() % 2 == 0) list.push_back(j);
    }
    counts.push_back(static_cast<int64_t>(list.size()));
    list.resize(static_cast<size_t>(most), -1);
    lists.insert(lists.end(), list.begin(), list.end());
  }

  AttentionArgs args{};
  args.query = query.data();
  args.key = key.data();
  args.value = value.data();
  args.output = out.data();
  args.query_strides[1] = s.q_len * s.dim;
  args.key_strides[1] = args.value_strides[1] = s.kv_len * s.dim;
  args.query_strides[2] = args.key_strides[2] = args.value_strides[2] = s.dim;
  args.selected = lists.data();
  args.selected_counts = counts.data();
  args.selected_heads = choosing;
  args.most_selected = most;
  args.block_keys = s.key_block;
  args.batch = 1;
  args.num_heads = s.heads;
  args.num_kv_heads = s.kv_heads;
  args.q_len = s.q_len;
  args.kv_len = s.kv_len;
  args.head_dim = args.value_dim = s.dim;
  args.scaling = 0.25f;
  args.is_causal = s.causal;
  args.dtype = dtype_of<T>();
  args.task_queries = s.query_block;
  args.task_heads = s.shared ? group : 1;
  args.kv_splits = 1;
  args.direct = s.direct;
  const auto& kernels = LB_ISA::attention_kernels;
  // Exactly what the loops ask for, up to the guard page.
  Array<float> scratch(static_cast<int64_t>(kernels.scratch_bytes(args) / sizeof(float)));
  for (int task = 0; task < query_blocks * choosing; ++task) kernels.run(args, task, scratch.data());

  std::vector<double> weights(static_cast<size_t>(s.kv_len));
  for (int row = 0; row < s.q_len * s.heads; ++row) {
    const int i = row / s.heads, head = row % s.heads, kv_head = head / group;
    const int list = i / s.query_block * choosing + (s.shared ? kv_head : head);
    std::fill(weights.begin(), weights.end(), 0.0);
    double total = 0;
    for (int n = 0; n < counts[static_cast<size_t>(list)]; ++n) {
      const int first = static_cast<int>(lists[static_cast<size_t>(list * most + n)]) * s.key_block;
      for (int j = first; j < std::min(first + s.key_block, s.kv_len); ++j) {
        if (s.causal && j > i + s.kv_len - s.q_len) break;
        double dot = 0;
        for (int c = 0; c < s.dim; ++c) {
          dot += query[(head * s.q_len + i) * s.dim + c] * key[(kv_head * s.kv_len + j) * s.dim + c];
        }
        weights[static_cast<size_t>(j)] = std::exp(0.25 * dot);
        total += weights[static_cast<size_t>(j)];
      }
    }
    for (int c = 0; c < s.dim; ++c) {
      double want = 0, scale = 0;
      for (int j = 0; j < s.kv_len && total > 0; ++j) {
        const double part =
            weights[static_cast<size_t>(j)] / total * value[(kv_head * s.kv_len + j) * s.dim + c];
        want += part;
        scale += std::fabs(part);
      }
      // As attention's.
      const double bound = unit<T>() * std::fabs(want) + (unit<T>() + 64 * 0x1p-24) * scale + 1e-7;
      const double got = out[row * s.dim + c];
      check(std::fabs(got - want) <= bound, "sparse attention", row, c, got, want);
    }
  }
  check(out.intact() && scratch.intact(), "sparse attention margin", s.dim, s.kv_len, 0, 0);
}

template <typename T>
void test_type() {
  for (const bool causal : {false, true}) {
    for (const bool shared : {false, true}) {
      for (int length = 1; length <= kMaxLength; length += 3) {
        test_shape<T>({4, 2, length, length + 5, 9, 16, 7, shared, false, causal});
        test_shape<T>({4, 2, 7, length, 17, 3, 16, shared, true, causal});
      }
      // Neighbouring blocks that make several blocks of the loops, and a last one that is cut short.
      test_shape<T>({2, 1, 40, 900, 16, 32, 128, shared, false, causal});
      test_shape<T>({2, 1, 10, 900, 16, 4, 100, shared, true, causal});
    }
  }
}

}  // namespace

void test_sparse_attention() {
  test_type<float>();
  test_type<bf16>();
  test_type<f16>();
}

}  // namespace testing
