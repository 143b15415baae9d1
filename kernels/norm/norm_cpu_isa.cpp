#include "common/vec_math.h"
#include "norm/norm.h"

namespace liteboost {
namespace LB_ISA {
namespace {

LB_INLINE float rsqrt_of_mean(float sum, int64_t count, float eps) {
  return 1.0f / __builtin_sqrtf(sum / static_cast<float>(count) + eps);
}

template <typename T>
LB_INLINE float sum_of_squares(const T* x, int64_t cols) {
  return sum_lanes(cols, [&](int64_t i, auto n) {
    const VF v = load(x + i, n);
    return v * v;
  });
}

// sum = x + residual, rounded; returns its sum of squares.
template <typename T>
LB_INLINE float add_residual(const T* x, const T* residual, T* sum, int64_t cols) {
  return sum_lanes(cols, [&](int64_t i, auto n) {
    const VF v = round_to<T>(load(x + i, n) + load(residual + i, n));
    store(sum + i, v, n);
    return v * v;
  });
}

// out = round_P((offset + weight) * round_T(x * r)); P is W, which is T or float.
template <typename T, typename W>
LB_INLINE void scale_early(const T* x, const W* weight, W* out, int64_t cols, float rstd,
                           float weight_offset) {
  const VF r = splat(rstd), offset = splat(weight_offset);
  if (weight_offset == 0.0f) {
    for_lanes(cols, [&](int64_t i, auto n) {
      store(out + i, load(weight + i, n) * round_to<T>(load(x + i, n) * r), n);
    });
  } else {
    for_lanes(cols, [&](int64_t i, auto n) {
      store(out + i, round_to<W>(offset + load(weight + i, n)) * round_to<T>(load(x + i, n) * r), n);
    });
  }
}

// out = round_T(x * r * (offset + weight))
template <typename T, typename W>
LB_INLINE void scale_late(const T* x, const W* weight, T* out, int64_t cols, float rstd,
                          float weight_offset) {
  const VF r = splat(rstd), offset = splat(weight_offset);
  for_lanes(cols, [&](int64_t i, auto n) {
    store(out + i, load(x + i, n) * r * (offset + load(weight + i, n)), n);
  });
}

template <typename T>
LB_INLINE void scale(const T* x, T* out, int64_t cols, float rstd) {
  const VF r = splat(rstd);
  for_lanes(cols, [&](int64_t i, auto n) { store(out + i, load(x + i, n) * r, n); });
}

template <typename T, typename W>
void rms_norm_rows(const RmsNormArgs& args, int64_t begin, int64_t end) {
  const int64_t cols = args.cols;
  for (int64_t row = begin; row < end; ++row) {
    const W* weight = static_cast<const W*>(args.weight);
    if (args.weight_rows > 1) weight += row % args.weight_rows * cols;
    const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
    float squares;
    if (args.residual == nullptr) {
      squares = sum_of_squares(x, cols);
    } else {
      T* sum = static_cast<T*>(args.sum) + row * cols;
      squares = add_residual(x, static_cast<const T*>(args.residual) + row * args.residual_stride, sum, cols);
      x = sum;
    }
    const float rstd = rsqrt_of_mean(squares, cols, args.eps);
    if (weight == nullptr) {
      scale(x, static_cast<T*>(args.out) + row * cols, cols, rstd);
    } else if (args.late) {
      scale_late(x, weight, static_cast<T*>(args.out) + row * cols, cols, rstd, args.weight_offset);
    } else {
      scale_early(x, weight, static_cast<W*>(args.out) + row * cols, cols, rstd, args.weight_offset);
    }
  }
}

template <typename T>
void inverse_rms_rows(const InverseRmsArgs& args, int64_t begin, int64_t end) {
  T* out = static_cast<T*>(args.out);
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
    store(out + row, splat(rsqrt_of_mean(sum_of_squares(x, args.cols), args.cols, args.eps)), 1);
  }
}

LB_INLINE VF gate_of(VF gate, NormGate activation) {
  const VF s = sigmoid(gate);
  return activation == NormGate::silu ? gate * s : s;
}

template <typename T, typename W>
LB_INLINE void gate_after(const GatedRmsNormArgs& args, const T* x, const T* gate, T* out) {
  const W* weight = static_cast<const W*>(args.weight);
  const VF r = splat(rsqrt_of_mean(sum_of_squares(x, args.cols), args.cols, args.eps));
  for_lanes(args.cols, [&](int64_t i, auto n) {
    const VF scaled = load(x + i, n) * r;
    const VF w = load(weight + i, n);
    const VF y = args.late ? scaled * w : round_to<W>(w * round_to<T>(scaled));
    store(out + i, y * gate_of(load(gate + i, n), args.activation), n);
  });
}

// h = x * act(gate) goes through `h`, a row of fp32, so that act is computed once.
template <typename T, typename W>
LB_INLINE void gate_before(const GatedRmsNormArgs& args, const T* x, const T* gate, float* h, int64_t row) {
  for (int64_t group = 0; group < args.cols; group += args.group_size) {
    const int64_t size = args.group_size;
    const float squares = sum_lanes(size, [&](int64_t i, auto n) {
      const VF v = load(x + group + i, n) * gate_of(load(gate + group + i, n), args.activation);
      store(h + i, v, n);
      return v * v;
    });
    const float rstd = rsqrt_of_mean(squares, size, args.eps);
    const W* weight = static_cast<const W*>(args.weight) + group;
    const VF r = splat(rstd);
    if (args.late) {
      T* out = static_cast<T*>(args.out) + row * args.cols + group;
      for_lanes(size,
                [&](int64_t i, auto n) { store(out + i, load(h + i, n) * r * load(weight + i, n), n); });
    } else {
      W* out = static_cast<W*>(args.out) + row * args.cols + group;
      for_lanes(size, [&](int64_t i, auto n) {
        store(out + i, load(weight + i, n) * round_to<T>(load(h + i, n) * r), n);
      });
    }
  }
}

template <typename T, typename W>
void gated_rms_norm_rows(const GatedRmsNormArgs& args, float* scratch, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
    const T* gate = static_cast<const T*>(args.gate) + row * args.gate_stride;
    if (args.gate_first) {
      gate_before<T, W>(args, x, gate, scratch, row);
    } else {
      gate_after<T, W>(args, x, gate, static_cast<T*>(args.out) + row * args.cols);
    }
  }
}

template <typename T, typename W>
void layer_norm_rows(const LayerNormArgs& args, int64_t begin, int64_t end) {
  const int64_t cols = args.cols;
  const W* weight = static_cast<const W*>(args.weight);
  const W* bias = static_cast<const W*>(args.bias);
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
    T* out = static_cast<T*>(args.out) + row * cols;
    const float total = sum_lanes(cols, [&](int64_t i, auto n) { return load(x + i, n); });
    const VF mean = splat(total / static_cast<float>(cols));
    // From the differences, not from the mean of squares, which cancels where the mean is large.
    const float squares = sum_lanes(cols, [&](int64_t i, auto n) {
      const VF d = first(load(x + i, n) - mean, n);
      return d * d;
    });
    const VF r = splat(rsqrt_of_mean(squares, cols, args.eps));
    if (weight != nullptr && bias != nullptr) {
      for_lanes(cols, [&](int64_t i, auto n) {
        store(out + i, fma((load(x + i, n) - mean) * r, load(weight + i, n), load(bias + i, n)), n);
      });
    } else {
      for_lanes(cols, [&](int64_t i, auto n) {
        VF v = (load(x + i, n) - mean) * r;
        if (weight != nullptr) v *= load(weight + i, n);
        if (bias != nullptr) v += load(bias + i, n);
        store(out + i, v, n);
      });
    }
  }
}

void rms_norm(const RmsNormArgs& args, int64_t begin, int64_t end) {
  LB_DISPATCH_DTYPE(args.dtype, T,
                    args.weight_dtype == DType::f32 ? rms_norm_rows<T, float>(args, begin, end)
                                                    : rms_norm_rows<T, T>(args, begin, end));
}

void inverse_rms(const InverseRmsArgs& args, int64_t begin, int64_t end) {
  LB_DISPATCH_DTYPE(args.dtype, T, inverse_rms_rows<T>(args, begin, end));
}

void gated_rms_norm(const GatedRmsNormArgs& args, float* scratch, int64_t begin, int64_t end) {
  LB_DISPATCH_DTYPE(args.dtype, T,
                    args.weight_dtype == DType::f32 ? gated_rms_norm_rows<T, float>(args, scratch, begin, end)
                                                    : gated_rms_norm_rows<T, T>(args, scratch, begin, end));
}

void layer_norm(const LayerNormArgs& args, int64_t begin, int64_t end) {
  LB_DISPATCH_DTYPE(args.dtype, T,
                    args.weight_dtype == DType::f32 ? layer_norm_rows<T, float>(args, begin, end)
                                                    : layer_norm_rows<T, T>(args, begin, end));
}

}  // namespace

extern const NormKernels norm_kernels = {rms_norm, inverse_rms, gated_rms_norm, layer_norm};

}  // namespace LB_ISA
}  // namespace liteboost
