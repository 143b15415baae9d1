#include "causal_conv/causal_conv.h"

#include "loops.h"
#include "testing.h"

namespace testing {
namespace {

using namespace liteboost;

template <typename T>
void test_size(int channels, int tokens, int taps, int length, bool tokens_adjacent, bool silu) {
  constexpr int kBatch = 2;
  std::mt19937 random(static_cast<unsigned>(100 * channels + tokens));
  Array<T> x(kBatch * channels * tokens), weight(channels * taps), bias(channels);
  Array<T> state(kBatch * channels * length), out(kBatch * channels * tokens);
  for (Array<T>* each : {&x, &weight, &bias, &state}) each->fill(random);
  std::vector<double> before;
  for (int i = 0; i < kBatch * channels * length; ++i) before.push_back(state[i]);

  CausalConvArgs args{};
  args.x = x.data();
  args.weight = weight.data();
  args.bias = silu ? bias.data() : nullptr;
  args.state = length > 0 ? state.data() : nullptr;
  args.out = out.data();
  args.x_strides = tokens_adjacent ? CausalConvStrides{static_cast<int64_t>(channels) * tokens, tokens, 1}
                                   : CausalConvStrides{static_cast<int64_t>(channels) * tokens, 1, channels};
  args.state_strides = {static_cast<int64_t>(channels) * length, length, 1};
  args.weight_stride = taps;
  args.tap_stride = args.bias_stride = 1;
  args.batch = kBatch;
  args.channels = channels;
  args.tokens = tokens;
  args.taps = taps;
  args.state_length = length;
  args.dtype = dtype_of<T>();
  args.silu = silu;
  Array<float> scratch(LB_ISA::causal_conv_kernels.scratch_floats(args));
  LB_ISA::causal_conv_kernels.run(args, scratch.data(), 0, LB_ISA::causal_conv_kernels.blocks(args));

  for (int b = 0; b < kBatch; ++b) {
    for (int c = 0; c < channels; ++c) {
      const int row = b * channels + c;
      // Column `at` of state and x together.
      const auto column = [&](int at) {
        if (at < 0) return 0.0;
        if (at < length) return before[static_cast<size_t>(row * length + at)];
        at -= length;
        return x[tokens_adjacent ? row * tokens + at : (b * tokens + at) * channels + c];
      };
      for (int t = 0; t < tokens; ++t) {
        double want = silu ? bias[c] : 0.0, scale = std::fabs(want);
        for (int j = 0; j < taps; ++j) {
          const double term = weight[c * taps + j] * column(length + t - taps + 1 + j);
          want += term;
          scale += std::fabs(term);
        }
        if (silu) want /= 1.0 + std::exp(-want);
        check_close<T>("causal conv", c, t, out[row * tokens + t], want, 2.0 * scale);
      }
      for (int i = 0; i < length; ++i) {
        const double got = state[row * length + i], want = column(tokens + i);
        check(got == want, "causal conv state", c, i, got, want);
      }
    }
  }
  check(out.intact() && state.intact() && scratch.intact(), "causal conv margin", channels, tokens, 0, 0);
}

template <typename T>
void test_type() {
  for (int channels = 1; channels <= kMaxLength; channels += 5) {
    test_size<T>(channels, 1, 4, 4, true, true);
    test_size<T>(channels, 5, 3, 2, false, false);
    test_size<T>(channels, 4, 4, 0, channels % 2 == 0, true);
  }
  for (int tokens = 1; tokens <= 140; tokens += 9) {
    test_size<T>(3, tokens, 4, 4, true, true);
    test_size<T>(3, tokens, 7, 0, true, false);
    test_size<T>(66, tokens, 1, 1, false, true);
  }
}

}  // namespace

void test_causal_conv() {
  test_type<float>();
  test_type<bf16>();
  test_type<f16>();
}

}  // namespace testing
