// What the programs here share: 16-bit formats in plain arithmetic, arrays that end at a guard page, checks.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "common/dtype.h"

namespace testing {

using liteboost::bf16;
using liteboost::DType;
using liteboost::f16;

// `x` rounded to nearest even with `mantissa` fraction bits and smallest normal exponent `minimum`; overflow
// goes to infinity from `overflow` on.
inline double round_to(double x, int mantissa, int minimum, double overflow) {
  if (x == 0.0 || !std::isfinite(x)) return x;
  const int exponent = std::fmax(std::ilogb(x), minimum);
  const double rounded = std::ldexp(std::nearbyint(std::ldexp(x, mantissa - exponent)), exponent - mantissa);
  return std::fabs(rounded) >= overflow ? std::copysign(INFINITY, x) : rounded;
}

inline float value_of(float x) { return x; }
inline float value_of(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}
inline float value_of(f16 x) {
  const int exponent = (x.bits >> 10) & 31, fraction = x.bits & 1023;
  const double magnitude = exponent == 31  ? (fraction != 0 ? NAN : INFINITY)
                           : exponent == 0 ? std::ldexp(fraction, -24)
                                           : std::ldexp(1024 + fraction, exponent - 25);
  return static_cast<float>((x.bits & 0x8000) != 0 ? -magnitude : magnitude);
}

template <typename T>
double rounded(double x);
template <>
inline double rounded<float>(double x) {
  return static_cast<float>(x);
}
template <>
inline double rounded<bf16>(double x) {
  return round_to(x, 7, -126, std::ldexp(1.0, 128));
}
template <>
inline double rounded<f16>(double x) {
  return round_to(x, 10, -14, 65520.0);
}

// The element nearest to x.
inline void set(float& element, double x) { element = static_cast<float>(x); }
inline void set(bf16& element, double x) {
  const float value = static_cast<float>(rounded<bf16>(x));
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  element.bits = static_cast<uint16_t>(bits >> 16);
}
inline void set(f16& element, double x) {
  const double value = std::fabs(rounded<f16>(x));
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  uint16_t magnitude = std::isnan(x) ? 0x7e00 : 0x7c00;
  if (value < std::ldexp(1.0, -14)) {
    magnitude = static_cast<uint16_t>(std::ldexp(value, 24));
  } else if (value < 65520.0) {
    const int exponent = std::ilogb(value);
    magnitude = static_cast<uint16_t>(((exponent + 15) << 10) + (std::ldexp(value, 10 - exponent) - 1024));
  }
  element.bits = sign | magnitude;
}

// What one rounding to the format may change, relatively.
template <typename T>
constexpr double unit();
template <>
constexpr double unit<float>() {
  return 0x1p-24;
}
template <>
constexpr double unit<bf16>() {
  return 0x1p-8;
}
template <>
constexpr double unit<f16>() {
  return 0x1p-11;
}

template <typename T>
constexpr DType dtype_of();
template <>
constexpr DType dtype_of<float>() {
  return DType::f32;
}
template <>
constexpr DType dtype_of<bf16>() {
  return DType::bf16;
}
template <>
constexpr DType dtype_of<f16>() {
  return DType::f16;
}

// `size` elements whose last one ends at a page that may not be touched, with NaN before the first. As the
// length varies, so does the alignment.
template <typename T>
class Array {
 public:
  explicit Array(int64_t size) : size_(size) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t pages = (static_cast<size_t>(size) * sizeof(T) + kMargin + page - 1) / page;
    bytes_ = (pages + 1) * page;
    memory_ =
        static_cast<char*>(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (memory_ == MAP_FAILED || mprotect(memory_ + pages * page, page, PROT_NONE) != 0) abort();
    memset(memory_, 0xff, pages * page);
    data_ = reinterpret_cast<T*>(memory_ + pages * page) - size;
  }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  ~Array() { munmap(memory_, bytes_); }

  T* data() { return data_; }
  double operator[](int64_t i) const { return value_of(data_[i]); }
  void fill(std::mt19937& random, double scale = 1.0) {
    std::normal_distribution<double> normal(0.0, scale);
    for (int64_t i = 0; i < size_; ++i) set(data_[i], normal(random));
  }
  // Whether what precedes the first element is as it was.
  bool intact() const {
    const unsigned char* margin = reinterpret_cast<const unsigned char*>(data_) - kMargin;
    for (size_t i = 0; i < kMargin; ++i) {
      if (margin[i] != 0xff) return false;
    }
    return true;
  }

 private:
  static constexpr size_t kMargin = 256;
  int64_t size_;
  size_t bytes_;
  char* memory_;
  T* data_;
};

// Counts failures and prints the first few.
inline int failures = 0;
inline int64_t checks = 0;

inline void check(bool ok, const char* what, int64_t a, int64_t b, double got, double want) {
  ++checks;
  if (ok) return;
  if (++failures <= 20) {
    fprintf(stderr, "FAILED %s at (%lld, %lld): got %.9g, want %.9g\n", what, static_cast<long long>(a),
            static_cast<long long>(b), got, want);
  }
}

// `got` within one rounding to T per unit of `roundings`, and fp32 noise relative to `scale`.
template <typename T>
void check_close(const char* what, int64_t a, int64_t b, double got, double want, double scale,
                 double roundings = 1.0) {
  const double tiny = sizeof(T) == 2 && unit<T>() == unit<f16>() ? 0x1p-24 : 1e-36;
  const double bound =
      1.01 * roundings * unit<T>() * std::fabs(want) + 16 * 0x1p-24 * scale + roundings * tiny;
  check(std::fabs(got - want) <= bound, what, a, b, got, want);
}

// Exit status of a program.
inline int report(const char* program) {
  printf("%s: %lld checks, %d failures\n", program, static_cast<long long>(checks), failures);
  return failures == 0 && checks > 0 ? 0 : 1;
}

}  // namespace testing
