// The loops of head_linear; compiled once an instruction set.
#include "head_linear/head_linear.h"

#include "common/vec.h"

namespace liteboost {
namespace LB_ISA {
namespace {

// Vectors of outputs that are summed at once where outputs lie side by side, and the inputs widened for them.
constexpr int64_t kVectors = 4;
constexpr int64_t kInputs = 256;

// Outputs [begin, end) of one row, each the sum over inputs that lie side by side.
template <typename T>
void dots(const HeadLinearArgs& a, const T* x, const T* weight, T* out, int64_t begin, int64_t end) {
  for (int64_t o = begin; o < end; ++o) {
    const T* row = weight + o * a.output_step;
    const float found =
        sum_lanes(a.inputs, [&](int64_t i, auto n) { return load(x + i, n) * load(row + i, n); });
    store(out + o, splat(found), 1);
  }
}

// The same where outputs lie side by side: one input after the other is added to a few vectors of them.
template <typename T>
void sums(const HeadLinearArgs& a, const T* x, const T* weight, T* out, int64_t begin, int64_t end) {
  float inputs[kInputs];
  for (int64_t o = begin; o < end; o += kVectors * kLanes) {
    const int64_t left = end - o < kVectors * kLanes ? end - o : kVectors * kLanes;
    VF sum[kVectors] = {};
    for (int64_t first = 0; first < a.inputs; first += kInputs) {
      const int64_t count = a.inputs - first < kInputs ? a.inputs - first : kInputs;
      for_lanes(count, [&](int64_t i, auto n) { store(inputs + i, load(x + first + i, n), n); });
      for (int64_t i = 0; i < count; ++i) {
        const T* row = weight + (first + i) * a.input_step + o;
        const VF each = splat(inputs[i]);
        if (left == kVectors * kLanes) {
          for (int64_t v = 0; v < kVectors; ++v) sum[v] = fma(each, load(row + v * kLanes), sum[v]);
        } else {
          for_lanes(left, [&](int64_t at, auto n) {
            VF& part = sum[at / kLanes];
            part = fma(each, load(row + at, n), part);
          });
        }
      }
    }
    for_lanes(left, [&](int64_t at, auto n) { store(out + o + at, sum[at / kLanes], n); });
  }
}

template <typename T>
void multiplied(const HeadLinearArgs& a, int64_t begin, int64_t end) {
  // So many outputs of a head that their weights stay in the cache from row to row.
  constexpr int64_t kOutputs = 64;
  for (int64_t at = begin, count; at < end; at += count) {
    const int64_t head = at / a.outputs, first = at % a.outputs;
    count = a.outputs - first < end - at ? a.outputs - first : end - at;
    if (count > kOutputs) count = kOutputs;
    const T* weight = static_cast<const T*>(a.weight) + head * a.weight_stride;
    for (int64_t row = 0; row < a.batch * a.rows; ++row) {
      const int64_t b = row / a.rows, r = row % a.rows;
      const T* x =
          static_cast<const T*>(a.x) + b * a.x_strides[0] + head * a.x_strides[1] + r * a.x_strides[2];
      T* out = static_cast<T*>(a.out) + ((b * a.heads + head) * a.rows + r) * a.outputs;
      (a.input_step == 1 ? dots<T> : sums<T>)(a, x, weight, out, first, first + count);
    }
  }
}

void run(const HeadLinearArgs& args, int64_t begin, int64_t end) {
  LB_DISPATCH_DTYPE(args.dtype, T, multiplied<T>(args, begin, end));
}

}  // namespace

extern const HeadLinearKernels head_linear_kernels = {run};

}  // namespace LB_ISA
}  // namespace liteboost
