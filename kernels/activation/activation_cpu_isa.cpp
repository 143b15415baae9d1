#include "activation/activation.h"
#include "common/vec_math.h"
#include "common/vec_pairs.h"

namespace liteboost {
namespace LB_ISA {
namespace {

template <typename T, Activation kind>
LB_INLINE VF activate(VF g, [[maybe_unused]] VF alpha) {
  if constexpr (kind == Activation::silu) {
    return g / (1.0f + exp(-(alpha * g)));
  } else if constexpr (kind == Activation::gelu) {
    if constexpr (sizeof(T) == 2) return g * normal_cdf_16bit(g);
    return g * normal_cdf(g);
  } else if constexpr (kind == Activation::gelu_tanh) {
    // g / 2 * (1 + tanh(z)) is g * sigmoid(2z), which does not cancel where tanh(z) is near -1.
    const VF cubic = fma(splat(0.044715f) * g * g, g, g);
    return g / (1.0f + exp(cubic * splat(-1.5957691216057308f)));
  } else if constexpr (kind == Activation::sigmoid) {
    return 1.0f / (1.0f + exp(-g));
  } else {
    const VF positive = max(g, VF{});
    if constexpr (kind == Activation::relu2) return positive * positive;
    return positive;
  }
}

// How the gate and up elements of one position lie in memory.
enum class Layout {
  adjacent,  // each tensor with step 1
  pairs,     // one tensor: gate, up, gate, up, ...
  any        // arbitrary steps, element by element
};

template <typename T>
LB_INLINE VF gather(const T* p, int64_t step, int n) {
  T lanes[kLanes] = {};
  for (int i = 0; i < n; ++i) lanes[i] = p[i * step];
  return load(lanes);
}

template <typename T, Layout layout>
LB_INLINE VPair load_both(const T* gate, const T* up, const GatedActivationArgs& args) {
  if constexpr (layout == Layout::adjacent) return {load(gate), load(up)};
  if constexpr (layout == Layout::pairs) return load_pairs(gate);
  return {gather(gate, args.gate_step, kLanes), gather(up, args.up_step, kLanes)};
}

template <typename T, Activation kind, Layout layout, bool plain>
void row(const GatedActivationArgs& args, const T* gate, const T* up, T* out, int64_t count) {
  const VF alpha = splat(args.alpha), limit = splat(args.limit), offset = splat(args.up_offset);
  const auto compute = [&](VPair in) __attribute__((always_inline)) {
    if constexpr (plain) return activate<T, kind>(in.even, alpha) * in.odd;
    const VF g = min(in.even, limit);
    const VF u = max(min(in.odd, limit), -limit);
    return activate<T, kind>(g, alpha) * (u + offset);
  };
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const VPair in = load_both<T, layout>(gate + i * args.gate_step, up + i * args.up_step, args);
    store(out + i, compute(in));
  }
  if (i < count) {
    const int n = static_cast<int>(count - i);
    const VPair in = {gather(gate + i * args.gate_step, args.gate_step, n),
                      gather(up + i * args.up_step, args.up_step, n)};
    store(out + i, compute(in), n);
  }
}

template <typename T, Activation kind, Layout layout, bool plain>
void rows(const GatedActivationArgs& args, int64_t begin, int64_t end) {
  while (begin < end) {
    const int64_t index = begin / args.cols, col = begin % args.cols;
    const int64_t count = args.cols - col < end - begin ? args.cols - col : end - begin;
    row<T, kind, layout, plain>(
        args, static_cast<const T*>(args.gate) + index * args.gate_stride + col * args.gate_step,
        static_cast<const T*>(args.up) + index * args.up_stride + col * args.up_step,
        static_cast<T*>(args.out) + begin, count);
    begin += count;
  }
}

template <typename T, Activation kind>
void by_layout(const GatedActivationArgs& args, int64_t begin, int64_t end) {
  const T* gate = static_cast<const T*>(args.gate);
  const bool plain = isinf(args.limit) && args.up_offset == 0.0f;
  if (args.gate_step == 1 && args.up_step == 1) {
    return plain ? rows<T, kind, Layout::adjacent, true>(args, begin, end)
                 : rows<T, kind, Layout::adjacent, false>(args, begin, end);
  }
  if (args.gate_step == 2 && args.up_step == 2 && args.up == gate + 1 && args.gate_stride == args.up_stride) {
    return rows<T, kind, Layout::pairs, false>(args, begin, end);
  }
  rows<T, kind, Layout::any, false>(args, begin, end);
}

template <typename T, Activation kind>
void by_layout(const ActivationArgs& args, int64_t begin, int64_t end) {
  const VF alpha = splat(args.alpha);
  while (begin < end) {
    const int64_t index = begin / args.cols, col = begin % args.cols;
    const int64_t count = args.cols - col < end - begin ? args.cols - col : end - begin;
    const T* x = static_cast<const T*>(args.x) + index * args.stride + col;
    T* out = static_cast<T*>(args.out) + begin;
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) store(out + i, activate<T, kind>(load(x + i), alpha));
    if (i < count) {
      const int n = static_cast<int>(count - i);
      store(out + i, activate<T, kind>(load(x + i, n), alpha), n);
    }
    begin += count;
  }
}

template <typename T, typename Args>
void by_activation(const Args& args, int64_t begin, int64_t end) {
  switch (args.activation) {
    case Activation::silu:
      return by_layout<T, Activation::silu>(args, begin, end);
    case Activation::gelu:
      return by_layout<T, Activation::gelu>(args, begin, end);
    case Activation::gelu_tanh:
      return by_layout<T, Activation::gelu_tanh>(args, begin, end);
    case Activation::relu:
      return by_layout<T, Activation::relu>(args, begin, end);
    case Activation::relu2:
      return by_layout<T, Activation::relu2>(args, begin, end);
    case Activation::sigmoid:
      return by_layout<T, Activation::sigmoid>(args, begin, end);
  }
}

void activation(const ActivationArgs& args, int64_t begin, int64_t end) {
  LB_DISPATCH_DTYPE(args.dtype, T, by_activation<T>(args, begin, end));
}

void gated_activation(const GatedActivationArgs& args, int64_t begin, int64_t end) {
  LB_DISPATCH_DTYPE(args.dtype, T, by_activation<T>(args, begin, end));
}

}  // namespace

extern const ActivationKernels activation_kernels = {activation, gated_activation};

}  // namespace LB_ISA
}  // namespace liteboost
