#include "runner/sha256.h"

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace liteboost::runner {
namespace {

using State = std::array<uint32_t, 8>;

alignas(16) constexpr std::array<uint32_t, 64> kRounds = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

void add_block_plainly(State& state, const unsigned char* block) {
  std::array<uint32_t, 64> words;
  for (size_t at = 0; at < 16; ++at) {
    const unsigned char* from = block + 4 * at;
    words[at] = uint32_t{from[0]} << 24 | uint32_t{from[1]} << 16 | uint32_t{from[2]} << 8 | from[3];
  }
  for (size_t at = 16; at < 64; ++at) {
    const uint32_t a = words[at - 15], b = words[at - 2];
    const uint32_t first = std::rotr(a, 7) ^ std::rotr(a, 18) ^ (a >> 3);
    const uint32_t second = std::rotr(b, 17) ^ std::rotr(b, 19) ^ (b >> 10);
    words[at] = words[at - 16] + first + words[at - 7] + second;
  }
  auto [a, b, c, d, e, f, g, h] = state;
  for (size_t at = 0; at < 64; ++at) {
    const uint32_t chosen = (e & f) ^ (~e & g), most = (a & b) ^ (a & c) ^ (b & c);
    const uint32_t first =
        h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) + chosen + kRounds[at] + words[at];
    const uint32_t second = (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + most;
    h = g, g = f, f = e, e = d + first, d = c, c = b, b = a, a = first + second;
  }
  const State added = {a, b, c, d, e, f, g, h};
  for (size_t at = 0; at < 8; ++at) state[at] += added[at];
}

#if defined(__x86_64__)

bool has_instructions() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (b & bit_SHA) != 0 &&
         __builtin_cpu_supports("sse4.1");
}

// The same by the processor's instructions for it, several times as fast: words a, b, e, f and c, d, g, h in one
// register each, four rounds at a time.
__attribute__((target("sha,sse4.1"))) void add_block_at_once(State& state, const unsigned char* block) {
  const __m128i bytes = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  auto* words = reinterpret_cast<__m128i*>(state.data());
  const __m128i low = _mm_shuffle_epi32(_mm_loadu_si128(words), 0xB1);
  const __m128i high = _mm_shuffle_epi32(_mm_loadu_si128(words + 1), 0x1B);
  const __m128i first = _mm_alignr_epi8(low, high, 8), second = _mm_blend_epi16(high, low, 0xF0);
  __m128i abef = first, cdgh = second, w[4];
  for (size_t at = 0; at < 16; ++at) {
    __m128i& next = w[at % 4];
    const __m128i former = w[(at + 3) % 4];
    if (at < 4) {
      next = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(block) + at), bytes);
    } else {
      const __m128i sum = _mm_add_epi32(_mm_sha256msg1_epu32(next, w[(at + 1) % 4]),
                                        _mm_alignr_epi8(former, w[(at + 2) % 4], 4));
      next = _mm_sha256msg2_epu32(sum, former);
    }
    const __m128i round =
        _mm_add_epi32(next, _mm_load_si128(reinterpret_cast<const __m128i*>(kRounds.data()) + at));
    cdgh = _mm_sha256rnds2_epu32(cdgh, abef, round);
    abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(round, 0x0E));
  }
  const __m128i feba = _mm_shuffle_epi32(_mm_add_epi32(abef, first), 0x1B);
  const __m128i dchg = _mm_shuffle_epi32(_mm_add_epi32(cdgh, second), 0xB1);
  _mm_storeu_si128(words, _mm_blend_epi16(feba, dchg, 0xF0));
  _mm_storeu_si128(words + 1, _mm_alignr_epi8(dchg, feba, 8));
}

#endif

void add_block(State& state, const unsigned char* block) {
#if defined(__x86_64__)
  static const bool is_fast = has_instructions();
  if (is_fast) return add_block_at_once(state, block);
#endif
  add_block_plainly(state, block);
}

}  // namespace

std::string sha256(const void* bytes, size_t count) {
  State state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  const auto* from = static_cast<const unsigned char*>(bytes);
  const size_t whole = count / 64 * 64, rest = count - whole;
  for (size_t at = 0; at < whole; at += 64) add_block(state, from + at);
  // The last bytes, a one, zeros, and how many bits there are.
  std::array<unsigned char, 128> tail{};
  if (rest > 0) std::memcpy(tail.data(), from + whole, rest);
  tail[rest] = 0x80;
  const size_t size = rest < 56 ? 64 : 128;
  const uint64_t bits = uint64_t{count} * 8;
  for (size_t at = 0; at < 8; ++at) tail[size - 1 - at] = static_cast<unsigned char>(bits >> (8 * at));
  for (size_t at = 0; at < size; at += 64) add_block(state, tail.data() + at);
  std::string text;
  for (const uint32_t word : state) {
    for (int shift = 28; shift >= 0; shift -= 4) text += "0123456789abcdef"[(word >> shift) & 15];
  }
  return text;
}

}  // namespace liteboost::runner
