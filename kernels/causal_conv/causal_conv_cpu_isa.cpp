#include "causal_conv/causal_conv.h"
#include "common/vec_math.h"

namespace liteboost {
namespace LB_ISA {
namespace {

// Channels of a block stand side by side in the scratch, a row for each token.
constexpr int kChannels = 64;
// Tokens taken at once: with as many channels, what fits a first cache.
constexpr int kTokens = 64;

template <typename T>
LB_INLINE float element(const T* p) {
  return load(p, 1)[0];
}

// Where lanes are taken apart and put together: a vector's worth of the scratch, because AddressSanitizer's stack for
// local arrays is not aligned as GCC 12 takes it to be (gcc.gnu.org/PR110027).
constexpr int kLaneFloats = kLanes;

// out[t][c] = in[t * token + c * channel] for `tokens` tokens and `count` channels; vectors along what is adjacent.
template <typename T>
void read(const T* in, int64_t channel, int64_t token, int64_t tokens, int64_t count, float* lanes,
          float* out) {
  if (channel == 1) {
    for (int64_t t = 0; t < tokens; ++t) {
      for_lanes(count, [&](int64_t c, auto n) __attribute__((always_inline)) {
        store(out + t * kChannels + c, load(in + t * token + c, n), n);
      });
    }
    return;
  }
  for (int64_t c = 0; c < count; ++c) {
    const T* row = in + c * channel;
    if (token == 1) {
      for_lanes(tokens, [&](int64_t t, auto n) __attribute__((always_inline)) {
        store(lanes, load(row + t, n));
        const int64_t rest = tokens - t < kLanes ? tokens - t : kLanes;
        for (int64_t l = 0; l < rest; ++l) out[(t + l) * kChannels + c] = lanes[l];
      });
    } else {
      for (int64_t t = 0; t < tokens; ++t) out[t * kChannels + c] = element(row + t * token);
    }
  }
}

// The reverse, into channels `stride` apart whose tokens are adjacent.
template <typename T>
void write(const float* in, int64_t tokens, int64_t count, float* lanes, T* out, int64_t stride) {
  if (stride == 1) {  // one token
    for_lanes(count,
              [&](int64_t c, auto n) __attribute__((always_inline)) { store(out + c, load(in + c, n), n); });
    return;
  }
  for (int64_t c = 0; c < count; ++c) {
    for_lanes(tokens, [&](int64_t t, auto n) __attribute__((always_inline)) {
      const int64_t rest = tokens - t < kLanes ? tokens - t : kLanes;
      for (int64_t l = 0; l < rest; ++l) lanes[l] = in[(t + l) * kChannels + c];
      store(out + c * stride + t, load(lanes, n), n);
    });
  }
}

// Rows of `count` channels: out[t] = act(bias + sum of weight[j] in[t + j]), in place of in[t].
template <bool silu>
void convolve(const float* weight, const float* bias, int64_t taps, int64_t tokens, int64_t count,
              float* rows) {
  for (int64_t t = 0; t < tokens; ++t) {
    float* row = rows + t * kChannels;
    for_lanes(count, [&](int64_t c, auto n) __attribute__((always_inline)) {
      VF sum = load(bias + c, n);
      for (int64_t j = 0; j < taps; ++j) {
        sum = fma(load(weight + j * kChannels + c, n), load(row + j * kChannels + c, n), sum);
      }
      if constexpr (silu) sum = sum / (1.0f + exp(-sum));
      store(row + c, sum, n);
    });
  }
}

// The last columns of state and x together, as they are.
template <typename T>
void keep(const CausalConvArgs& args, const T* x, T* state, int64_t count) {
  const CausalConvStrides &from = args.x_strides, &to = args.state_strides;
  for (int64_t c = 0; c < count; ++c) {
    T* row = state + c * to.channel;
    const T* next = x + c * from.channel;
    for (int64_t i = 0; i < args.state_length; ++i) {
      const int64_t at = i + args.tokens;
      row[i * to.token] =
          at < args.state_length ? row[at * to.token] : next[(at - args.state_length) * from.token];
    }
  }
}

// Channels [first, first + count) of one sequence.
template <typename T>
void run_block(const CausalConvArgs& args, int64_t batch, int64_t first, int64_t count, float* scratch) {
  const int64_t before = args.taps - 1;
  float* weight = scratch;
  float* bias = weight + args.taps * kChannels;
  float* rows = bias + kChannels;
  float* kept = rows + (before + kTokens) * kChannels;
  float* lanes = kept + before * kChannels;

  const T* weights = static_cast<const T*>(args.weight) + first * args.weight_stride;
  read(weights, args.weight_stride, args.tap_stride, args.taps, count, lanes, weight);
  if (args.bias) {
    read(static_cast<const T*>(args.bias) + first * args.bias_stride, args.bias_stride, 0, 1, count, lanes,
         bias);
  } else {
    memset(bias, 0, sizeof(float) * kChannels);
  }
  const T* x = static_cast<const T*>(args.x) + batch * args.x_strides.batch + first * args.x_strides.channel;
  T* state = static_cast<T*>(args.state);
  if (state) {
    state += batch * args.state_strides.batch + first * args.state_strides.channel;
    read(state + (args.state_length - before) * args.state_strides.token, args.state_strides.channel,
         args.state_strides.token, before, count, lanes, rows);
  } else {
    memset(rows, 0, sizeof(float) * before * kChannels);
  }
  T* out = static_cast<T*>(args.out) + (batch * args.channels + first) * args.tokens;
  for (int64_t token = 0; token < args.tokens; token += kTokens) {
    const int64_t tokens = args.tokens - token < kTokens ? args.tokens - token : kTokens;
    read(x + token * args.x_strides.token, args.x_strides.channel, args.x_strides.token, tokens, count, lanes,
         rows + before * kChannels);
    // The results stand in place of what they are made of; the next tokens need the last of it.
    memcpy(kept, rows + tokens * kChannels, sizeof(float) * before * kChannels);
    if (args.silu) {
      convolve<true>(weight, bias, args.taps, tokens, count, rows);
    } else {
      convolve<false>(weight, bias, args.taps, tokens, count, rows);
    }
    write(rows, tokens, count, lanes, out + token, args.tokens);
    memcpy(rows, kept, sizeof(float) * before * kChannels);
  }
  if (state) keep(args, x, state, count);
}

int64_t blocks_a_sequence(const CausalConvArgs& args) { return (args.channels + kChannels - 1) / kChannels; }

int64_t blocks(const CausalConvArgs& args) { return args.batch * blocks_a_sequence(args); }

int64_t scratch_floats(const CausalConvArgs& args) {
  return (args.taps + 1 + kTokens + 2 * (args.taps - 1)) * kChannels + kLaneFloats;
}

void run_any(const CausalConvArgs& args, float* scratch, int64_t begin, int64_t end) {
  const int64_t in_sequence = blocks_a_sequence(args);
  for (int64_t at = begin; at < end; ++at) {
    const int64_t first = at % in_sequence * kChannels;
    const int64_t count = args.channels - first < kChannels ? args.channels - first : kChannels;
    LB_DISPATCH_DTYPE(args.dtype, T, run_block<T>(args, at / in_sequence, first, count, scratch));
  }
}

}  // namespace

extern const CausalConvKernels causal_conv_kernels;
const CausalConvKernels causal_conv_kernels = {scratch_floats, blocks, run_any};

}  // namespace LB_ISA
}  // namespace liteboost
