#include "delta_rule/delta_rule.h"

#include "loops.h"
#include "testing.h"

namespace testing {
namespace {

using namespace liteboost;

constexpr int kKHeads = 2, kVHeads = 4;

// How query, key and value lie: tokens behind one another, or the tokens of each channel.
enum class Lie { tokens, channels };

DeltaRuleStrides strides(Lie lie, int tokens, int heads, int dim) {
  if (lie == Lie::tokens) return {0, heads * dim, dim, 1};
  return {0, 1, static_cast<int64_t>(dim) * tokens, tokens};
}

int64_t place(const DeltaRuleStrides& s, int token, int head, int i) {
  return token * s.token + head * s.head + i * s.dim;
}

template <typename T>
void test_size(int tokens, int k_dim, int v_dim, Lie lie, bool normalize, bool from_zeros) {
  std::mt19937 random(static_cast<unsigned>(1000 * tokens + 31 * k_dim + v_dim));
  Array<T> query(tokens * kKHeads * k_dim), key(tokens * kKHeads * k_dim), value(tokens * kVHeads * v_dim);
  Array<T> beta(tokens * kVHeads), out(tokens * kVHeads * v_dim);
  Array<float> g(tokens * kVHeads), from(kVHeads * k_dim * v_dim), state(kVHeads * k_dim * v_dim);
  query.fill(random);
  key.fill(random, 1.0 / std::sqrt(k_dim));
  value.fill(random);
  std::uniform_real_distribution<double> rate(0.0, 1.0);
  for (int i = 0; i < tokens * kVHeads; ++i) {
    set(beta.data()[i], rate(random));
    set(g.data()[i], -2.0 * rate(random));
  }
  from.fill(random);

  DeltaRuleArgs args{};
  args.query = query.data();
  args.key = key.data();
  args.value = value.data();
  args.g = g.data();
  args.beta = beta.data();
  args.out = out.data();
  args.state_from = from_zeros ? nullptr : from.data();
  args.state = state.data();
  args.query_strides = args.key_strides = strides(lie, tokens, kKHeads, k_dim);
  args.value_strides = strides(lie, tokens, kVHeads, v_dim);
  args.g_strides = args.beta_strides = {0, kVHeads, 1, 1};
  args.tokens = tokens;
  args.k_heads = kKHeads;
  args.v_heads = kVHeads;
  args.k_dim = k_dim;
  args.v_dim = v_dim;
  args.dtype = args.beta_dtype = dtype_of<T>();
  args.g_dtype = DType::f32;
  args.scaling = 0.25f;
  args.normalize = normalize;
  Array<float> scratch(LB_ISA::delta_rule_kernels.scratch_floats(args));
  LB_ISA::delta_rule_kernels.run(args, scratch.data(), 0, kVHeads);

  const auto inverse_length = [&](const Array<T>& x, const DeltaRuleStrides& s, int token, int head) {
    double squares = 1e-6;
    for (int i = 0; i < k_dim; ++i) squares += x[place(s, token, head, i)] * x[place(s, token, head, i)];
    return normalize ? 1.0 / std::sqrt(squares) : 1.0;
  };
  for (int head = 0; head < kVHeads; ++head) {
    const int k_head = head / (kVHeads / kKHeads);
    std::vector<double> s(static_cast<size_t>(k_dim * v_dim));
    for (size_t i = 0; i < s.size(); ++i) {
      s[i] = from_zeros ? 0.0 : from[head * k_dim * v_dim + static_cast<int>(i)];
    }
    double largest = 1.0;
    for (int token = 0; token < tokens; ++token) {
      const double q_factor = 0.25 * inverse_length(query, args.query_strides, token, k_head);
      const double k_factor = inverse_length(key, args.key_strides, token, k_head);
      const double decay = std::exp(g[token * kVHeads + head]), step = beta[token * kVHeads + head];
      for (double& each : s) each *= decay;
      for (int c = 0; c < v_dim; ++c) {
        const auto k = [&](int r) { return k_factor * key[place(args.key_strides, token, k_head, r)]; };
        double known = 0.0, want = 0.0, scale = 0.0;
        for (int r = 0; r < k_dim; ++r) known += s[static_cast<size_t>(r * v_dim + c)] * k(r);
        const double delta = step * (value[place(args.value_strides, token, head, c)] - known);
        for (int r = 0; r < k_dim; ++r) {
          double& cell = s[static_cast<size_t>(r * v_dim + c)];
          cell += k(r) * delta;
          largest = std::fmax(largest, std::fabs(cell));
          const double term = cell * q_factor * query[place(args.query_strides, token, k_head, r)];
          want += term;
          scale += std::fabs(term);
        }
        check_close<T>("delta rule", 100 * tokens + token, c, out[(token * kVHeads + head) * v_dim + c], want,
                       8.0 * (1 + token) * (scale + largest));
      }
    }
    for (int i = 0; i < k_dim * v_dim; ++i) {
      check_close<float>("delta rule state", tokens, i, state[head * k_dim * v_dim + i],
                         s[static_cast<size_t>(i)], 8.0 * (1 + tokens) * largest);
    }
  }
  check(out.intact() && state.intact() && scratch.intact(), "delta rule margin", tokens, k_dim, v_dim, 0);
}

template <typename T>
void test_type() {
  for (int dim = 1; dim <= kMaxLength; dim += 3) {
    test_size<T>(1, 5, dim, Lie::tokens, true, dim % 2 == 0);
    test_size<T>(5, dim, 3, Lie::tokens, dim % 2 == 0, false);
    test_size<T>(9, 7, dim, Lie::channels, true, false);
  }
  for (int tokens = 0; tokens <= 20; ++tokens) {
    test_size<T>(tokens, 6, 21, Lie::tokens, false, tokens % 2 == 0);
    test_size<T>(tokens, 6, 21, Lie::channels, true, tokens % 2 == 1);
  }
}

}  // namespace

void test_delta_rule() {
  test_type<float>();
  test_type<bf16>();
  test_type<f16>();
}

}  // namespace testing
