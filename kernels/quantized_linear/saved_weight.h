// A weight as it is saved, of which the CPU arranges one tile at a time.
#pragma once

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstring>

#include "quantized_linear/quantized_linear.h"

namespace liteboost {

inline int64_t tile_bytes(const QuantizedTiles& weight) {
  return steps_of(weight.k) * kStep * kTile * weight.bits / 8;
}

inline int64_t tiles_of(int64_t n) { return (n + kTile - 1) / kTile; }

// A weight as it is saved, one tile of which is arranged at a time. `layout` says what the tiles have.
struct SavedWeight {
  QuantizedTiles layout;
  const char* data;            // [n, k] int8, or [n, k / 2] of packing 1
  const char* scales;          // [n, groups]
  const uint8_t* zero_points;  // [n, groups] or null
};

// `size` bytes at a time, from kTile rows of `bytes` to side by side; at the end of a row fewer.
inline void interleave(const char* from, int64_t rows, int64_t bytes, int64_t size, char* to) {
  const int64_t whole = bytes / size, left = bytes % size;
  for (int64_t row = 0; row < rows; ++row) {
    const char* at = from + row * bytes;
    char* own = to + row * size;
    for (int64_t i = 0; i < whole; ++i) std::memcpy(own + i * kTile * size, at + i * size, size);
    if (left > 0) std::memcpy(own + whole * kTile * size, at + whole * size, left);
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
    const int64_t row_bytes = tile_.k * tile_.bits / 8;
    interleave(weight_.data + first * row_bytes, rows, row_bytes, 4, data_);
    char* scales = data_ + tile_bytes(tile_);
    interleave(weight_.scales + first * scale_bytes_, rows, scale_bytes_, scale_bytes_ / tile_.groups,
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
