#include "rope/rope.h"

#include "loops.h"
#include "testing.h"

namespace testing {
namespace {

using namespace liteboost;

constexpr int kBatch = 2, kHeads = 2, kPositions = 2;

// As [B, S, H, D] for the input and [B, H, S, D] for the output.
template <typename T>
RopeTensor tensor(Array<T>& in, Array<T>& out, int dim) {
  RopeTensor result{};
  result.data = in.data();
  result.out = out.data();
  result.heads = kHeads;
  result.batch_stride = kPositions * kHeads * dim;
  result.seq_stride = kHeads * dim;
  result.head_stride = dim;
  result.out_batch_stride = kHeads * kPositions * dim;
  result.out_seq_stride = dim;
  result.out_head_stride = kPositions * dim;
  return result;
}

template <typename T, typename W>
void test_dim(int pairs, int rest, RopeLayout layout, bool half_tables) {
  std::mt19937 random(static_cast<unsigned>(pairs));
  const int rotary = 2 * pairs, dim = rotary + rest, width = half_tables ? pairs : rotary;
  const int count = kBatch * kHeads * kPositions * dim;
  Array<T> q(count), k(count), q_out(count), k_out(count);
  Array<W> cos(kPositions * width), sin(kPositions * width);
  for (Array<T>* array : {&q, &k}) array->fill(random);
  for (Array<W>* array : {&cos, &sin}) array->fill(random);
  std::vector<float> scratch(static_cast<size_t>(2 * rotary) + 1);
  RopeArgs args{};
  args.q = tensor(q, q_out, dim);
  args.k = tensor(k, k_out, dim);
  args.cos = cos.data();
  args.sin = sin.data();
  args.seq_len = kPositions;
  args.head_dim = dim;
  args.rotary_dim = rotary;
  args.cos_seq_stride = args.sin_seq_stride = width;
  args.dtype = dtype_of<T>();
  args.table_dtype = dtype_of<W>();
  args.layout = layout;
  args.half_tables = half_tables;
  LB_ISA::rope_kernels.rope(args, scratch.data(), 0, kBatch * kPositions);

  // Where the pairs are read, where they are written; tables lie like the results.
  const bool pairs_adjacent = layout != RopeLayout::half, adjacent_out = layout == RopeLayout::interleaved;
  for (int at = 0; at < kBatch * kHeads * kPositions; ++at) {
    const int batch = at / (kHeads * kPositions), head = at / kPositions % kHeads, position = at % kPositions;
    const int from = ((batch * kPositions + position) * kHeads + head) * dim;
    for (int i = 0; i < dim; ++i) {
      const double got = q_out[at * dim + i];
      if (i >= rotary) {
        check(got == q[from + i], "rope rest", dim, i, got, q[from + i]);
        continue;
      }
      const bool second = adjacent_out ? i % 2 == 1 : i >= pairs;
      const int pair = adjacent_out ? i / 2 : i % pairs;
      const int self = from + (pairs_adjacent ? 2 * pair + second : pair + second * pairs);
      const int other = from + (pairs_adjacent ? 2 * pair + !second : pair + !second * pairs);
      const int entry = position * width + (half_tables ? pair : i);
      const double a = q[self] * cos[entry], b = q[other] * sin[entry];
      const double want = second ? a + b : a - b;
      check_close<T>("rope", dim, i, got, want, std::fabs(a) + std::fabs(b));
      const double key = k[self] * cos[entry] + (second ? 1 : -1) * (k[other] * sin[entry]);
      check_close<T>("rope key", dim, i, k_out[at * dim + i], key, std::fabs(key) + 4.0);
    }
  }
  check(q_out.intact() && k_out.intact(), "rope margin", dim, 0, 0, 0);
}

template <typename T, typename W>
void test_types() {
  for (int pairs = 0; pairs <= 35; ++pairs) {
    for (const RopeLayout layout : {RopeLayout::half, RopeLayout::interleaved, RopeLayout::deinterleave}) {
      test_dim<T, W>(pairs, 0, layout, false);
      test_dim<T, W>(pairs, 3, layout, true);
    }
  }
}

}  // namespace

void test_rope() {
  test_types<float, float>();
  test_types<bf16, bf16>();
  test_types<bf16, float>();
  test_types<f16, f16>();
  test_types<f16, float>();
}

}  // namespace testing
