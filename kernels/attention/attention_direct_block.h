// One block of keys for a few rows, read where it lies. Part of attention_cpu_isa.cpp; compiled once an
// instruction set.
#pragma once

#include "attention/attention_direct.h"
#include "attention/attention_int8.h"
#include "attention/attention_task.h"

namespace liteboost {
namespace LB_ISA {
namespace {

// Row `position` of keys or values.
template <typename T>
LB_INLINE const T* row_in_pages(const AttentionArgs& a, const T* rows, int64_t page_stride, int64_t stride,
                                int64_t position) {
  return rows + a.pages[position / a.page_rows] * page_stride + position % a.page_rows * stride;
}

// A task's share of what its thread reads next, while it reads rows [first, first + rows) of the `n` keys or values at
// `key`: as many bytes, of rows of all kv heads. Lines lie in as many streams as a row has: memory delivers those sooner.
template <typename T>
Ahead<T> next_rows(const AttentionArgs& a, const Task& t, const void* from, int64_t page_stride,
                   int64_t stride, int64_t dim, int64_t key, int64_t n, int64_t first, int64_t rows) {
  const AttentionArgs& next = *a.next;
  const int64_t share = (n + a.num_kv_heads - 1) / a.num_kv_heads;
  const int64_t begin = a.next_begin + key - t.begin + t.kv_head * share;
  const int64_t left = min_of(a.next_end - begin, next.page_rows - begin % next.page_rows);
  const int64_t line_elements = 64 / static_cast<int64_t>(sizeof(T));
  const int64_t lines = (dim + line_elements - 1) / line_elements;  // of one head's row
  const int64_t distance = min_of(share, left) * stride / lines / line_elements;
  if (left <= 0 || distance <= first) return {static_cast<const T*>(from), 0, 0};
  const T* row = row_in_pages(next, static_cast<const T*>(from), page_stride, stride, begin);
  return {row + first * line_elements, line_elements, min_of(rows, distance - first), 64 * distance};
}

// What is read behind the `rows` keys at `k`, of which the first has the number `first` in the block at `key`: those of
// the next page, and behind the last of a block its values. Pages lie anywhere.
template <typename T>
LB_INLINE Ahead<T> behind_keys(const AttentionArgs& a, const Task& t, const T* keys, const T* values,
                               int64_t key, int64_t n, int64_t first, int64_t rows, const T* k) {
  if (a.pages == nullptr) return rows_behind(k, a.key_strides[2], rows, a.head_dim);
  if (a.next != nullptr)
    return next_rows<T>(a, t, a.next->key, a.key_page_stride, a.key_strides[2], a.head_dim, key, n, first,
                        rows);
  const int64_t left = n - first - rows;
  if (left == 0)
    return {row_in_pages(a, values, a.value_page_stride, a.value_strides[2], key), a.value_strides[2], n};
  return {row_in_pages(a, keys, a.key_page_stride, a.key_strides[2], key + first + rows), a.key_strides[2],
          left};
}

// The same of values, behind the last of which come the keys of the next block.
template <typename T>
LB_INLINE Ahead<T> behind_values(const AttentionArgs& a, const Task& t, const T* keys, const T* values,
                                 int64_t key, int64_t n, int64_t first, int64_t rows, const T* v) {
  if (a.pages == nullptr) return rows_behind(v, a.value_strides[2], rows, a.value_dim);
  if (a.next != nullptr)
    return next_rows<T>(a, t, a.next->value, a.value_page_stride, a.value_strides[2], a.value_dim, key, n,
                        first, rows);
  const int64_t next = key + first + rows, left = key + n - next;
  if (left > 0)
    return {row_in_pages(a, values, a.value_page_stride, a.value_strides[2], next), a.value_strides[2], left};
  if (next >= t.end) return {v, 0, 0};
  return {row_in_pages(a, keys, a.key_page_stride, a.key_strides[2], next), a.key_strides[2], t.end - next};
}

// output[row] = decay[row] * output + probabilities times the values of the block.
template <typename Words, typename T>
void weigh_block(const AttentionArgs& a, const Task& t, const T* keys, const T* values, int64_t key,
                 int64_t n) {
  each_stretch(a, keys, values, key, n, [&](int64_t first, int64_t rows, const T*, const T* v) {
    const Ahead<T> ahead = behind_values(a, t, keys, values, key, n, first, rows, v);
    // What was summed before decays once, with the first stretch.
    for (int64_t row = 0; first > 0 && row < t.rows; ++row) t.decay[row] = 1.0f;
    weigh_values<Words>(t.logits + first / Words::kPerWord, kBlockKeys, t.rows, v, a.value_strides[2], rows,
                        a.value_dim, t.outputs, t.output_stride, t.decay, ahead);
  });
}

template <typename Words, typename T>
void dot_block(const AttentionArgs& a, const Task& t, const T* keys, const T* values, int64_t key,
               int64_t n) {
  each_stretch(a, keys, values, key, n, [&](int64_t first, int64_t rows, const T* k, const T*) {
    dot_keys<Words>(t.queries_packed, t.query_stride, t.rows, k, a.key_strides[2], rows, a.head_dim,
                    t.logits + first, kBlockKeys, behind_keys(a, t, keys, values, key, n, first, rows, k));
  });
}

// Softmax of all rows; probabilities are stored as Words.
template <typename Words, typename T>
void softmax_block(const AttentionArgs& a, const Task& t, int64_t key, int64_t n, Cover cover) {
  for (int64_t row = 0; row < t.rows; ++row) {
    softmax_row<Words, T>(a, t, row, t.logits + row * kBlockKeys, key, n, 0, round_up(n, kLanes), cover);
  }
}

// Attention of a few query rows over a block of keys and values of type T.
template <typename Words, typename T>
struct Direct {
  template <typename Q>
  static void pack(const Task& t, int64_t row, const Q* query, int64_t dim) {
    pack_query<Words>(query, dim, t.queries_packed + row * t.query_stride);
    if constexpr (is_int8<T>) t.query_scales[row] = 1.0f;
  }

  static void block(const AttentionArgs& a, const Task& t, const T* keys, const T* values, int64_t key,
                    int64_t n) {
    const Cover cover = mask_cover(a, t, 0, t.rows, key, n);
    if (cover == Cover::none) return;
    dot_block<Words>(a, t, keys, values, key, n);
    read_scales(a, t, keys, values, key, n);
    softmax_block<Words, T>(a, t, key, n, cover);
    weigh_block<Words>(a, t, keys, values, key, n);
  }
};

#if defined(LB_INT8_ATTENTION)
template <>
struct Direct<WordsOfInt8, int8_t> {
  template <typename Q>
  static void pack(const Task& t, int64_t row, const Q* query, int64_t dim) {
    float* packed = t.queries_packed + row * t.query_stride;
    t.query_scales[row] = pack_query_int16(query, dim, packed);
    if (t.query_scales[row] == 0.0f) pack_query<WordsOfInt8>(query, dim, packed);
  }

  // The dot products of the rows that are no integers.
  static void dot_rows_as_they_are(const AttentionArgs& a, const Task& t, const int8_t* keys,
                                   const int8_t* values, int64_t key, int64_t n) {
    for (int64_t row = 0; row < t.rows; ++row) {
      if (t.query_scales[row] != 0.0f) continue;
      each_stretch(a, keys, values, key, n, [&](int64_t first, int64_t rows, const int8_t* k, const int8_t*) {
        dot_keys<WordsOfInt8>(t.queries_packed + row * t.query_stride, t.query_stride, 1, k, a.key_strides[2],
                              rows, a.head_dim, t.logits + row * kBlockKeys + first, kBlockKeys,
                              rows_behind(k, a.key_strides[2], rows, a.head_dim));
      });
    }
  }

  static void block(const AttentionArgs& a, const Task& t, const int8_t* keys, const int8_t* values,
                    int64_t key, int64_t n) {
    const Cover cover = mask_cover(a, t, 0, t.rows, key, n);
    if (cover == Cover::none) return;
    each_stretch(a, keys, values, key, n, [&](int64_t first, int64_t rows, const int8_t* k, const int8_t*) {
      dot_int8(a, t, k, first, rows);
    });
    dot_rows_as_they_are(a, t, keys, values, key, n);
    read_scales(a, t, keys, values, key, n);
    softmax_block<Words32, int8_t>(a, t, key, n, cover);
    bool has_limbs = true;
    for (int64_t row = 0; row < t.rows && has_limbs; ++row) {
      has_limbs = split_weights(t.logits + row * kBlockKeys, round_up(n, kLanes), t.limbs[row]);
    }
    if (!has_limbs) return weigh_block<Words32>(a, t, keys, values, key, n);
    each_stretch(a, keys, values, key, n, [&](int64_t first, int64_t rows, const int8_t*, const int8_t* v) {
      for (int64_t row = 0; first > 0 && row < t.rows; ++row) t.decay[row] = 1.0f;
      weigh_int8(t.limbs, first, t.rows, v, a.value_strides[2], rows, a.value_dim, t.outputs, t.output_stride,
                 t.decay);
    });
  }
};
#endif

}  // namespace
}  // namespace LB_ISA
}  // namespace liteboost
