// vec.h, vec_math.h and vec_pairs.h: every 16-bit value, every tail, and the accuracy of the functions.
#include "common/vec.h"

#include "common/vec_math.h"
#include "common/vec_pairs.h"
#include "testing.h"

namespace {

using namespace testing;
namespace isa = liteboost::LB_ISA;
using isa::kLanes;
using isa::VF;

float from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

bool same(double a, double b) {
  return a == b ? std::signbit(a) == std::signbit(b) : std::isnan(a) && std::isnan(b);
}

template <typename T>
void test_widening(const char* name) {
  for (uint32_t first = 0; first < 65536; first += kLanes) {
    T in[kLanes];
    float out[kLanes];
    for (int i = 0; i < kLanes; ++i) in[i].bits = static_cast<uint16_t>(first + i);
    isa::store(out, isa::load(in));
    for (int i = 0; i < kLanes; ++i)
      check(same(out[i], value_of(in[i])), name, first + i, 0, out[i], value_of(in[i]));
  }
}

// Halfway cases and their neighbours around every value of the format, and a sample of everything else.
template <typename T>
void test_narrowing(const char* name) {
  std::vector<float> inputs = {
      0.0f,          -0.0f,    INFINITY, -INFINITY, NAN,   -NAN,   from_bits(0x7f800001u),
      from_bits(1u), 65519.9f, 65520.0f, 65536.0f,  1e30f, 3.4e38f};
  for (uint32_t half = 0; half < 65536; half += 3) {
    T element;
    element.bits = static_cast<uint16_t>(half);
    const float value = value_of(element);
    if (!std::isfinite(value)) continue;
    element.bits = static_cast<uint16_t>(half + 1);
    const float between = static_cast<float>((static_cast<double>(value) + value_of(element)) / 2);
    for (const float x : {value, between, std::nextafterf(between, 0.0f), std::nextafterf(between, 1e38f)}) {
      inputs.push_back(x);
    }
  }
  for (uint64_t bits = 0; bits < 0x100000000u; bits += 65521)
    inputs.push_back(from_bits(static_cast<uint32_t>(bits)));
  while (inputs.size() % kLanes != 0) inputs.push_back(1.0f);
  for (size_t first = 0; first < inputs.size(); first += kLanes) {
    T out[kLanes];
    float widened[kLanes];
    const VF in = isa::load(&inputs[first]);
    isa::store(out, in);
    isa::store(widened, isa::round_to<T>(in));
    for (int i = 0; i < kLanes; ++i) {
      const double want = rounded<T>(inputs[first + i]);
      check(same(value_of(out[i]), want), name, first + i, 0, value_of(out[i]), want);
      check(same(widened[i], want), "round_to", first + i, 0, widened[i], want);
    }
  }
}

template <typename T>
void test_tails(const char* name) {
  std::mt19937 random(1);
  for (int n = 0; n < kLanes; ++n) {
    Array<T> in(n), out(n), pairs_in(2 * n), pairs_out(2 * n);
    in.fill(random);
    pairs_in.fill(random);
    const VF v = isa::load(in.data(), n);
    isa::store(out.data(), v, n);
    for (int i = 0; i < n; ++i) check(out[i] == in[i], name, n, i, out[i], in[i]);
    for (int i = n; i < kLanes; ++i) check(v[i] == 0.0f, name, n, i, v[i], 0.0);
    const VF kept = isa::first(isa::splat(1.0f), n);
    for (int i = 0; i < kLanes; ++i) check(kept[i] == (i < n), "first", n, i, kept[i], i < n);
    const isa::VPair pairs = isa::load_pairs(pairs_in.data(), n);
    isa::store_pairs(pairs_out.data(), pairs, n);
    for (int i = 0; i < n; ++i)
      check(pairs.odd[i] == pairs_in[2 * i + 1], "pairs", n, i, pairs.odd[i], pairs_in[2 * i + 1]);
    for (int i = 0; i < 2 * n; ++i)
      check(pairs_out[i] == pairs_in[i], "pairs", n, i, pairs_out[i], pairs_in[i]);
    check(out.intact() && pairs_out.intact(), "margin", n, 0, 0, 0);
  }
  Array<T> in(2 * kLanes), out(2 * kLanes);
  in.fill(random);
  const isa::VPair pairs = isa::load_pairs(in.data());
  isa::store_pairs(out.data(), pairs);
  for (int i = 0; i < 2 * kLanes; ++i) {
    const float lane = i % 2 == 0 ? pairs.even[i / 2] : pairs.odd[i / 2];
    check(lane == in[i] && out[i] == in[i], "whole pairs", i, 0, lane, in[i]);
  }
}

void test_lanes() {
  float values[kLanes];
  double sum = 0.0;
  for (int i = 0; i < kLanes; ++i) sum += values[i] = static_cast<float>((i * 7) % kLanes);
  const VF v = isa::load(values);
  check(isa::sum(v) == sum, "sum", 0, 0, isa::sum(v), sum);
  check(isa::hmax(v) == kLanes - 1, "hmax", 0, 0, isa::hmax(v), kLanes - 1);
  const VF nan = isa::splat(NAN), one = isa::splat(1.0f);
  check(std::isnan(isa::min(nan, one)[0]) && std::isnan(isa::max(nan, one)[0]), "NaN first", 0, 0, 0, 0);
  check(isa::min(one, nan)[0] == 1.0f && isa::max(one, nan)[0] == 1.0f, "NaN second", 0, 0, 0, 0);
  check(isa::copysign(one, -nan)[0] * isa::abs(-one)[0] == (std::signbit(-NAN) ? -1.0f : 1.0f), "sign", 0, 0,
        0, 0);
  check(isa::sqrt(isa::splat(2.0f))[0] == std::sqrt(2.0f), "sqrt", 0, 0, 0, 0);
}

// The largest error of `f` against `exact`, in units in the last place, over a sample of all floats in
// [low, high] of both signs.
template <typename F, typename Exact>
void test_accuracy(const char* name, double allowed, float low, float high, const F& f, const Exact& exact) {
  double worst = 0.0;
  float worst_at = 0.0f;
  std::vector<float> inputs;
  for (uint64_t bits = 0; bits < 0x100000000u; bits += 9973) {
    const float x = from_bits(static_cast<uint32_t>(bits));
    if (x >= low && x <= high) inputs.push_back(x);
  }
  for (int i = 0; i < 100000; ++i) inputs.push_back(low + (high - low) * static_cast<float>(i) / 100000.0f);
  while (inputs.size() % kLanes != 0) inputs.push_back(low);
  for (size_t first = 0; first < inputs.size(); first += kLanes) {
    const VF result = f(isa::load(&inputs[first]));
    for (int i = 0; i < kLanes; ++i) {
      const double want = exact(static_cast<double>(inputs[first + i]));
      const int exponent = std::fmax(want == 0.0 ? -126 : std::ilogb(want), -126);
      const double error = std::fabs(result[i] - want) / std::ldexp(1.0, exponent - 23);
      if (!(error <= worst)) {
        worst = error;
        worst_at = inputs[first + i];
      }
    }
  }
  printf("%s: %.2f ulp, at %.9g\n", name, worst, static_cast<double>(worst_at));
  check(worst <= allowed, name, 0, 0, worst, allowed);
}

void test_functions() {
  const auto cdf = [](double x) { return std::erfc(-x / std::sqrt(2.0)) / 2; };
  const auto one = [](auto f) { return [f](VF v) { return f(v); }; };
  test_accuracy("exp", 1.6, -87.0f, 88.7f, one([](VF v) { return isa::exp(v); }),
                [](double x) { return std::exp(x); });
  test_accuracy("exp of denormals", 1.6, -104.0f, -87.0f, one([](VF v) { return isa::exp(v); }),
                [](double x) { return std::exp(x); });
  test_accuracy("tanh", 2.5, -20.0f, 20.0f, one([](VF v) { return isa::tanh(v); }),
                [](double x) { return std::tanh(x); });
  test_accuracy("sigmoid", 2.6, -87.0f, 88.0f, one([](VF v) { return isa::sigmoid(v); }),
                [](double x) { return 1 / (1 + std::exp(-x)); });
  test_accuracy("normal_cdf", 5.0, -12.9f, 14.0f, one([](VF v) { return isa::normal_cdf(v); }), cdf);
  test_accuracy("normal_cdf_16bit", 5e-5 * 0x1p23, -12.9f, 14.0f,
                one([](VF v) { return isa::normal_cdf_16bit(v); }), cdf);

  const float ends[] = {-INFINITY, -1e30f, -200.0f, 200.0f, 1e30f, INFINITY};
  for (const float x : ends) {
    const VF v = isa::splat(x);
    const bool up = x > 0;
    check(isa::exp(v)[0] == (up ? INFINITY : 0.0f), "exp at its ends", 0, 0, isa::exp(v)[0], x);
    check(isa::tanh(v)[0] == (up ? 1.0f : -1.0f), "tanh at its ends", 0, 0, isa::tanh(v)[0], x);
    check(isa::sigmoid(v)[0] == (up ? 1.0f : 0.0f), "sigmoid at its ends", 0, 0, isa::sigmoid(v)[0], x);
    check(std::fabs(isa::normal_cdf(v)[0] - up) < 1e-37, "normal_cdf at its ends", 0, 0,
          isa::normal_cdf(v)[0], x);
    check(std::fabs(isa::normal_cdf_16bit(v)[0] - up) < 1e-37, "normal_cdf_16bit at its ends", 0, 0, 0, x);
  }
  const VF nan = isa::splat(NAN);
  for (const VF v :
       {isa::exp(nan), isa::tanh(nan), isa::sigmoid(nan), isa::normal_cdf(nan), isa::normal_cdf_16bit(nan)}) {
    check(std::isnan(v[0]), "NaN", 0, 0, v[0], NAN);
  }
}

}  // namespace

int main() {
  test_widening<bf16>("bf16 to float");
  test_widening<f16>("f16 to float");
  test_narrowing<bf16>("float to bf16");
  test_narrowing<f16>("float to f16");
  test_tails<float>("float tails");
  test_tails<bf16>("bf16 tails");
  test_tails<f16>("f16 tails");
  test_lanes();
  test_functions();
  return report("vec_test");
}
