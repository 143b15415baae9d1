// A weight as it is saved, of which the CPU arranges one tile at a time.
#pragma once

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstring>

#include "quantized_linear/quantized_linear.h"

namespace liteboost {

inline int64_t tile_bytes(const QuantizedTiles& weight) {
  return (weight.k + kStep - 1) / kStep * kStep * kTile * weight.bits / 8;
}

inline int64_t tiles_of(int64_t n) { return (n + kTile - 1) / kTile; }

// A weight as it is saved, one tile of which is arranged at a time. `layout` says what the tiles have.
struct SavedWeight {
  QuantizedTiles layout;
  const char* data;            // [n, k] int8, or [n, k / 2] of packing 1
  const char* scales;          // [n, groups]
  const uint8_t* zero_points;  // [n, groups] or null
};

// `size` bytes at a time, of which a row has `count`, from kTile rows to side by side.
inline void interleave(const char* from, int64_t rows, int64_t count, int64_t size, char* to) {
  for (int64_t row = 0; row < rows; ++row) {
    const char* at = from + row * count * size;
    if (size == 1) {
      for (int64_t i = 0; i < count; ++i) to[i * kTile + row] = at[i];
    } else {
      for (int64_t i = 0; i < count; ++i) std::memcpy(to + (i * kTile + row) * size, at + i * size, size);
    }
  }
}

// One tile of a saved weight, in memory of its own.
class ArrangedTile {
 public:
  explicit ArrangedTile(const SavedWeight& weight) : weight_(weight), tile_(weight.layout) {
    const int64_t scale_size = tile_.scale_dtype == DType::f32 ? 4 : 2;
    scale_bytes_ = tile_.groups * scale_size;
    const int64_t data = tile_bytes(tile_), scales = scale_bytes_ * kTile, zeros = tile_.groups * kTile;
    memory_ = c10::GetCPUAllocator()->allocate(data + scales + zeros);
    data_ = static_cast<char*>(memory_.get());
    std::memset(data_, 0, data + scales + zeros);
    tile_.data = data_;
    tile_.scales = data_ + data;
    tile_.zero_points =
        weight.zero_points ? reinterpret_cast<const uint8_t*>(data_ + data + scales) : nullptr;
  }

  const QuantizedTiles& arranged(int64_t tile) {
    const int64_t first = tile * kTile, rows = std::min(weight_.layout.n - first, kTile);
    const bool is_w8 = tile_.bits == 8;
    const int64_t row_bytes = tile_.k * tile_.bits / 8;
    interleave(weight_.data + first * row_bytes, rows, is_w8 ? row_bytes : row_bytes / 4, is_w8 ? 1 : 4,
               data_);
    char* scales = data_ + tile_bytes(tile_);
    interleave(weight_.scales + first * scale_bytes_, rows, tile_.groups, scale_bytes_ / tile_.groups,
               scales);
    if (weight_.zero_points) {
      interleave(reinterpret_cast<const char*>(weight_.zero_points) + first * tile_.groups, rows,
                 tile_.groups, 1, scales + scale_bytes_ * kTile);
    }
    tile_.n = rows;
    return tile_;
  }

 private:
  const SavedWeight& weight_;
  QuantizedTiles tile_;
  c10::DataPtr memory_;
  char* data_;
  int64_t scale_bytes_;
};

}  // namespace liteboost
