#include "activation/activation.h"

#include "loops.h"
#include "testing.h"

namespace testing {
namespace {

using namespace liteboost;

double activate(double g, Activation activation, double alpha) {
  switch (activation) {
    case Activation::silu:
      return g / (1 + std::exp(-alpha * g));
    case Activation::gelu:
      return g * std::erfc(-g / std::sqrt(2.0)) / 2;
    case Activation::gelu_tanh:
      return g / (1 + std::exp(-2 * 0.7978845608028654 * (g + 0.044715 * g * g * g)));
    case Activation::relu:
      return g > 0 ? g : 0;
    case Activation::relu2:
      return g > 0 ? g * g : 0;
    case Activation::sigmoid:
      return 1 / (1 + std::exp(-g));
  }
  return NAN;
}

enum class Layout { apart, halves, pairs, strided };

template <typename T>
void test_layout(int cols, Activation activation, Layout layout, bool clamped) {
  std::mt19937 random(static_cast<unsigned>(cols));
  constexpr int kRows = 3;
  // One allocation for both, laid out as asked; `apart` has the rows of `up` after all rows of `gate`.
  const int step = layout == Layout::pairs ? 2 : layout == Layout::strided ? 3 : 1;
  const int stride = layout == Layout::apart ? cols : step == 1 ? 2 * cols : step * cols;
  const int offset = layout == Layout::apart ? kRows * cols : layout == Layout::halves ? cols : 1;
  Array<T> both(step == 3 ? 3 * kRows * cols : 2 * kRows * cols), out(kRows * cols);
  both.fill(random, 2.0);
  GatedActivationArgs args{};
  args.gate = both.data();
  args.up = both.data() + offset;
  args.out = out.data();
  args.cols = cols;
  args.gate_stride = args.up_stride = stride;
  args.gate_step = args.up_step = step;
  args.alpha = activation == Activation::silu && clamped ? 1.702f : 1.0f;
  args.limit = clamped ? 1.5f : INFINITY;
  args.up_offset = clamped ? 1.0f : 0.0f;
  args.dtype = dtype_of<T>();
  args.activation = activation;
  // In two ranges that meet in the middle of a row.
  const int split = kRows * cols / 2;
  LB_ISA::activation_kernels.gated_activation(args, 0, split);
  LB_ISA::activation_kernels.gated_activation(args, split, kRows * cols);
  for (int at = 0; at < kRows * cols; ++at) {
    const int from = at / cols * stride + at % cols * step;
    const double limit = args.limit;
    const double g = std::fmin(both[from], limit);
    const double u =
        std::fmax(std::fmin(both[from + offset], limit), -limit) + static_cast<double>(args.up_offset);
    const double want = activate(g, activation, args.alpha) * u;
    // The exponential of a rounded argument; 16-bit gelu allows itself 5e-5.
    const double noise = (4 + std::fabs(g * g * g)) * (sizeof(T) == 2 ? 50 : 1);
    check_close<T>("gated_activation", cols, at, out[at], want, std::fabs(want) * noise);
  }
  check(out.intact(), "gated_activation margin", cols, 0, 0, 0);
}

template <typename T>
void test_alone(int cols, Activation activation) {
  std::mt19937 random(static_cast<unsigned>(cols));
  constexpr int kRows = 3;
  const int stride = cols + 1;
  Array<T> x(kRows * stride), out(kRows * cols);
  x.fill(random, 2.0);
  ActivationArgs args{};
  args.x = x.data();
  args.out = out.data();
  args.cols = cols;
  args.stride = stride;
  args.alpha = activation == Activation::silu ? 1.702f : 1.0f;
  args.dtype = dtype_of<T>();
  args.activation = activation;
  const int split = kRows * cols / 2;
  LB_ISA::activation_kernels.activation(args, 0, split);
  LB_ISA::activation_kernels.activation(args, split, kRows * cols);
  for (int at = 0; at < kRows * cols; ++at) {
    const double g = x[at / cols * stride + at % cols];
    const double want = activate(g, activation, args.alpha);
    const double noise = (4 + std::fabs(g * g * g)) * (sizeof(T) == 2 ? 50 : 1);
    check_close<T>("activation", cols, at, out[at], want, std::fabs(want) * noise);
  }
  check(out.intact(), "activation margin", cols, 0, 0, 0);
}

template <typename T>
void test_type() {
  for (int cols = 1; cols <= 35; ++cols) {
    for (const Activation activation : {Activation::silu, Activation::gelu, Activation::gelu_tanh,
                                        Activation::relu, Activation::relu2, Activation::sigmoid}) {
      test_alone<T>(cols, activation);
      for (const Layout layout : {Layout::apart, Layout::halves, Layout::pairs, Layout::strided}) {
        for (const bool clamped : {false, true}) test_layout<T>(cols, activation, layout, clamped);
      }
    }
  }
}

}  // namespace

void test_activation() {
  test_type<float>();
  test_type<bf16>();
  test_type<f16>();
}

}  // namespace testing
