// Bytes at the end of memory, on aarch64, which has no masked loads and stores; see vec.h.
#pragma once

#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

namespace liteboost {
namespace LB_ISA {
namespace {

// The first n < 8 bytes, lowest first, zero above: in powers of two, so that nothing beyond them is touched.
LB_INLINE uint64_t load_word(const void* p, int n) {
  const char* at = static_cast<const char*>(p);
  uint64_t word = 0;
  int shift = 0;
  const auto take = [&](auto part) __attribute__((always_inline)) {
    memcpy(&part, at, sizeof(part));
    word |= static_cast<uint64_t>(part) << shift;
    at += sizeof(part);
    shift += 8 * sizeof(part);
  };
  if (n & 4) take(uint32_t{});
  if (n & 2) take(uint16_t{});
  if (n & 1) take(uint8_t{});
  return word;
}
LB_INLINE void store_word(void* p, uint64_t word, int n) {
  char* at = static_cast<char*>(p);
  const auto put = [&](auto part) __attribute__((always_inline)) {
    memcpy(at, &part, sizeof(part));
    at += sizeof(part);
    word >>= 8 * sizeof(part) % 64;
  };
  if (n & 4) put(static_cast<uint32_t>(word));
  if (n & 2) put(static_cast<uint16_t>(word));
  if (n & 1) put(static_cast<uint8_t>(word));
}
// The first n < 16 bytes, others zero.
LB_INLINE uint8x16_t load_bytes(const void* p, int n) {
  if (n < 8) return vreinterpretq_u8_u64(vcombine_u64(vcreate_u64(load_word(p, n)), vcreate_u64(0)));
  const uint8_t* at = static_cast<const uint8_t*>(p);
  return vcombine_u8(vld1_u8(at), vcreate_u8(load_word(at + 8, n - 8)));
}

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
