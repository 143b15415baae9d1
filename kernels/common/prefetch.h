// Asking for memory ahead of its use, for the torch-free loops; see vec.h.
#pragma once

#include "common/vec.h"

namespace liteboost {
namespace LB_ISA {
namespace {

// Asks for a cache line that will be read soon, into the second cache. The first is filled from there in time, and
// has little room beside what is at hand: where it has 32 KB (Zen 4), asking for 16 KB ahead into it halved the
// speed of four rows and more. Only a hint: the address may lie beyond the end of a tensor.
LB_INLINE void fetch_ahead(const void* p) { __builtin_prefetch(p, 0, 2); }

// Asks for a line of what is read in one go, `ahead` bytes before it is, where `line` is. A Sapphire Rapids reads four
// streams of as many pages a third faster than one: there, of each window of 32 KB that is next, lines of its quarters in turn.
template <int64_t ahead>
LB_INLINE void fetch_stream_ahead(const char* line) {
#if defined(__AMX_BF16__)
  constexpr uintptr_t kWindow = 32 << 10;
  const uintptr_t at = reinterpret_cast<uintptr_t>(line), inside = at & (kWindow - 1);
  const uintptr_t quarter = (inside / 64 & 3) * (kWindow / 4);
  fetch_ahead(reinterpret_cast<const char*>(at - inside + kWindow + quarter + inside / 256 * 64));
#else
  fetch_ahead(line + ahead);
#endif
}

// Lines of rows that will be read soon, asked for in the order of memory.
struct LinesAhead {
  const char* row;
  int64_t stride, row_bytes, rows;  // those that are left
  int64_t at = 0;                   // in the row

  LB_INLINE void ask(int64_t lines) {
    for (; lines > 0 && rows > 0; --lines) {
      fetch_ahead(row + at);
      at += 64;
      if (at < row_bytes) continue;
      at = 0;
      row += stride;
      --rows;
    }
  }
};

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
