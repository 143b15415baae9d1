#include "common/vec_pairs.h"
#include "rope/rope.h"

namespace liteboost {
namespace LB_ISA {
namespace {

// One table row in fp32, the entries of the first and of the second channel of each pair apart: [2][pairs].
// Widened once a position and used by every head.
template <typename T>
LB_INLINE void widen_table(const T* row, float* out, int64_t pairs, RopeLayout layout, bool half_table) {
  float* second = out + pairs;
  if (half_table) {
    for_lanes(pairs, [&](int64_t i, auto n) {
      const VF v = load(row + i, n);
      store(out + i, v, n);
      store(second + i, v, n);
    });
  } else if (layout != RopeLayout::interleaved) {  // as the results lie: the halves are apart already
    for_lanes(2 * pairs, [&](int64_t i, auto n) { store(out + i, load(row + i, n), n); });
  } else {
    for_lanes(pairs, [&](int64_t i, auto n) {
      const VPair v = load_pairs(row + 2 * i, n);
      store(out + i, v.even, n);
      store(second + i, v.odd, n);
    });
  }
}

template <typename T, RopeLayout layout>
LB_INLINE void rotate(const T* x, T* out, const float* cos, const float* sin, int64_t pairs) {
  for_lanes(pairs, [&](int64_t i, auto n) {
    const VF c1 = load(cos + i, n), c2 = load(cos + pairs + i, n);
    const VF s1 = load(sin + i, n), s2 = load(sin + pairs + i, n);
    if constexpr (layout == RopeLayout::half) {
      const VF x1 = load(x + i, n), x2 = load(x + pairs + i, n);
      store(out + i, x1 * c1 - x2 * s1, n);
      store(out + pairs + i, x2 * c2 + x1 * s2, n);
    } else {
      const VPair v = load_pairs(x + 2 * i, n);
      const VPair turned = {v.even * c1 - v.odd * s1, v.odd * c2 + v.even * s2};
      if constexpr (layout == RopeLayout::interleaved) {
        store_pairs(out + 2 * i, turned, n);
      } else {
        store(out + i, turned.even, n);
        store(out + pairs + i, turned.odd, n);
      }
    }
  });
}

template <typename T, RopeLayout layout>
LB_INLINE void rotate_heads(const RopeArgs& args, const RopeTensor& tensor, const float* cos,
                            const float* sin, int64_t batch, int64_t position) {
  const T* x =
      static_cast<const T*>(tensor.data) + batch * tensor.batch_stride + position * tensor.seq_stride;
  T* out = static_cast<T*>(tensor.out) + batch * tensor.out_batch_stride + position * tensor.out_seq_stride;
  const int64_t rest = args.head_dim - args.rotary_dim;
  for (int64_t head = 0; head < tensor.heads; ++head) {
    rotate<T, layout>(x, out, cos, sin, args.rotary_dim / 2);
    if (rest > 0) memcpy(out + args.rotary_dim, x + args.rotary_dim, rest * sizeof(T));
    x += tensor.head_stride;
    out += tensor.out_head_stride;
  }
}

template <typename T, typename W, RopeLayout layout>
void rope_positions(const RopeArgs& args, float* scratch, int64_t begin, int64_t end) {
  const int64_t pairs = args.rotary_dim / 2;
  float* cos = scratch;
  float* sin = scratch + args.rotary_dim;
  for (int64_t index = begin; index < end; ++index) {
    const int64_t batch = index / args.seq_len, position = index % args.seq_len;
    const W* cos_row =
        static_cast<const W*>(args.cos) + batch * args.cos_batch_stride + position * args.cos_seq_stride;
    const W* sin_row =
        static_cast<const W*>(args.sin) + batch * args.sin_batch_stride + position * args.sin_seq_stride;
    widen_table(cos_row, cos, pairs, layout, args.half_tables);
    widen_table(sin_row, sin, pairs, layout, args.half_tables);
    rotate_heads<T, layout>(args, args.q, cos, sin, batch, position);
    rotate_heads<T, layout>(args, args.k, cos, sin, batch, position);
  }
}

template <typename T, typename W>
void by_layout(const RopeArgs& args, float* scratch, int64_t begin, int64_t end) {
  switch (args.layout) {
    case RopeLayout::half:
      return rope_positions<T, W, RopeLayout::half>(args, scratch, begin, end);
    case RopeLayout::interleaved:
      return rope_positions<T, W, RopeLayout::interleaved>(args, scratch, begin, end);
    case RopeLayout::deinterleave:
      return rope_positions<T, W, RopeLayout::deinterleave>(args, scratch, begin, end);
  }
}

void rope(const RopeArgs& args, float* scratch, int64_t begin, int64_t end) {
  LB_DISPATCH_DTYPE(args.dtype, T,
                    args.table_dtype == DType::f32 ? by_layout<T, float>(args, scratch, begin, end)
                                                   : by_layout<T, T>(args, scratch, begin, end));
}

}  // namespace

extern const RopeKernels rope_kernels = {rope};

}  // namespace LB_ISA
}  // namespace liteboost
