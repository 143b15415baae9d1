// Attention's loops over blocks of keys, on raw pointers; compiled once an instruction set.
//
// A task walks the keys of one kv head block by block, for all its rows: the queries of several query heads,
// one head after the other. A block is packed once and multiplied with every row (attention_tile.h, by AMX
// attention_tile_amx.h), or, for
// few rows, read where it lies (attention_direct.h). Rows are taken in chunks whose logits stay in the cache
// between the two products. Keys in pages (paged_attention/) are walked the same, page by page.
#include "attention/attention.h"
#include "attention/attention_direct_block.h"
#include "attention/attention_pack.h"
#include "attention/attention_task.h"
#include "attention/attention_tile.h"
#include "common/vec.h"
#if defined(__AMX_BF16__)
#include "attention/attention_tile_amx.h"
#endif

namespace liteboost {
namespace LB_ISA {
namespace {

constexpr int64_t kMaxTiles = (kChunkRows + kVectorRows - 1) / kVectorRows;
// Longer dot products are summed in parts, which keeps the error of a long fp32 sum down.
constexpr int64_t kWordsAtOnce = 128;
constexpr float kOnes[16] = {1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f,
                             1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f};

struct Tile {
  int64_t row, rows;
  int64_t begin, end;  // keys of the block, in whole vectors; begin at the edge of a panel
};

// Cuts rows [begin, end) into tiles of nearly the same height, at most `height`, each with the keys that any of its
// rows sees.
int64_t cut_tiles(const AttentionArgs& a, const Task& t, int64_t begin, int64_t end, int64_t key, int64_t n,
                  int64_t height, Tile* tiles) {
  int64_t count = 0;
  int64_t left = (end - begin + height - 1) / height;
  for (int64_t row = begin; row < end; --left) {
    const int64_t rows = (end - row + left - 1) / left;
    int64_t first = n;
    int64_t last = 0;
    for (int64_t r = row; r < row + rows; ++r) {
      first = min_of(first, first_key(a, query_of(t, r)) - key);
      last = max_of(last, last_key(a, query_of(t, r)) - key);
    }
    first = max_of(first, 0) / kPanel * kPanel;
    last = round_up(min_of(last, n), kLanes);
    if (first < last) tiles[count++] = {row, rows, first, last};
    row += rows;
  }
  return count;
}

// One block of keys for rows [begin, end), from packed operands.
template <typename Words, typename Stored, typename Products>
void packed_chunk(const AttentionArgs& a, const Task& t, const Tile* tiles, int64_t count, int64_t begin,
                  int64_t key, int64_t n, Cover cover) {
  Products products;
  const int64_t words = words_of<Words>(a.head_dim);
  for (int64_t panel = 0; panel < n; panel += kPanel) {
    for (int64_t i = 0; i < count; ++i) {
      const Tile& tile = tiles[i];
      const int64_t columns = min_of(tile.end - panel, kPanel);
      if (panel < tile.begin || columns <= 0) continue;
      const float* queries = t.queries_packed + tile.row * t.query_stride;
      float* logits = t.logits + (tile.row - begin) * kBlockKeys + panel;
      for (int64_t w = 0; w == 0 || w < words; w += kWordsAtOnce) {
        products.template multiply<Words>(
            queries + w, t.query_stride, t.keys_packed + panel * words + w * kPanel,
            min_of(words - w, kWordsAtOnce), logits, kBlockKeys, w > 0 ? kOnes : nullptr, tile.rows, columns);
      }
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    const Tile& tile = tiles[i];
    for (int64_t row = tile.row; row < tile.row + tile.rows; ++row) {
      softmax_row<Words, Stored>(a, t, row, t.logits + (row - begin) * kBlockKeys, key, n, tile.begin,
                                 tile.end - tile.begin, cover);
    }
  }
  constexpr int64_t capacity = kBlockKeys / Words::kPerWord;
  for (int64_t panel = 0; panel < a.value_dim; panel += kPanel) {
    const int64_t columns = round_up(min_of(a.value_dim - panel, kPanel), kLanes);
    for (int64_t i = 0; i < count; ++i) {
      const Tile& tile = tiles[i];
      const int64_t skipped = tile.begin / Words::kPerWord;
      products.template multiply<Words>(t.logits + (tile.row - begin) * kBlockKeys + tile.begin, kBlockKeys,
                                        t.values_packed + panel * capacity + skipped * kPanel,
                                        (tile.end - tile.begin) / Words::kPerWord,
                                        t.outputs + tile.row * t.output_stride + panel, t.output_stride,
                                        t.decay + tile.row, tile.rows, columns);
    }
  }
}

template <typename Words, typename T>
void pack_block(const AttentionArgs& a, const Task& t, const T* keys, const T* values, int64_t key,
                int64_t n) {
  each_stretch(a, keys, values, key, n, [&](int64_t first, int64_t rows, const T* k, const T* v) {
    pack_keys<Words>(k, a.key_strides[2], rows, a.head_dim, first, t.keys_packed);
    pack_values<Words>(v, a.value_strides[2], rows, round_up(rows, kLanes), a.value_dim,
                       kBlockKeys / Words::kPerWord, t.values_packed + first / Words::kPerWord * kPanel);
  });
}

template <typename Words, typename Products, typename T>
void packed_block_by(const AttentionArgs& a, const Task& t, const T* keys, const T* values, int64_t key,
                     int64_t n) {
  bool packed = false;
  for (int64_t begin = 0; begin < t.rows; begin += kChunkRows) {
    const int64_t end = min_of(begin + kChunkRows, t.rows);
    Tile tiles[kMaxTiles];
    const int64_t count = cut_tiles(a, t, begin, end, key, n, Products::kRows, tiles);
    if (count == 0) continue;
    const Cover cover = mask_cover(a, t, begin, end, key, n);
    if (cover == Cover::none) continue;
    if (!packed) {
      read_scales(a, t, keys, values, key, n);
      pack_block<Words>(a, t, keys, values, key, n);
    }
    packed = true;
    packed_chunk<Words, T, Products>(a, t, tiles, count, begin, key, n, cover);
  }
}

template <typename Words, typename T>
void packed_block(const AttentionArgs& a, const Task& t, const T* keys, const T* values, int64_t key,
                  int64_t n) {
#if defined(__AMX_BF16__)
  if constexpr (Words::kPerWord == 2) {
    if (words_of<Words>(a.head_dim) % kHalfStepWords == 0)
      return packed_block_by<Words, AmxProducts>(a, t, keys, values, key, n);
  }
#endif
  packed_block_by<Words, VectorProducts>(a, t, keys, values, key, n);
}

// out = sums * factor, or 0 whatever the sums hold where a row sees no key.
template <typename T>
void store_row(T* out, const float* sums, float factor, bool sees_none, int64_t dim) {
  for (int64_t c = 0; c < dim; c += kLanes) {
    const VF sum = load_some(sums + c, dim - c);
    store_some(out + c, sees_none ? VF{} : sum * factor, dim - c);
  }
}

// output = sums / total, where the sink, if any, joins the total.
template <typename T>
void write_row(const AttentionArgs& a, int64_t batch, int64_t head, int64_t query, const float* sums,
               float maximum, float total) {
  const int64_t row = (batch * a.q_len + query) * a.num_heads + head;
  const bool sees_none = maximum == kMinusInfinity;
  float factor = 0.0f;
  if (!sees_none) {
    if (a.sinks != nullptr) {
      const float sink =
          a.sinks[batch * a.sink_strides[0] + head * a.sink_strides[1] + query * a.sink_strides[2]];
      const float largest = sink > maximum ? sink : maximum;
      const float shrink = expf(maximum - largest);
      factor = shrink / (total * shrink + expf(sink - largest));
    } else {
      factor = 1.0f / total;
    }
  }
  if (a.lse != nullptr) {
    // A logit of infinity has made the total NaN.
    const bool is_infinite = sees_none || maximum == kInfinity;
    a.lse[row] = is_infinite ? maximum : maximum + logf(total);
    store_row(static_cast<float*>(a.output) + row * a.value_dim, sums, factor, sees_none, a.value_dim);
  } else {
    store_row(static_cast<T*>(a.output) + row * a.value_dim, sums, factor, sees_none, a.value_dim);
  }
}

// Partial result of a task: for each row value_dim sums, the maximum, the total.
int64_t partial_row_floats(const AttentionArgs& a) { return a.value_dim + 2; }

float* partial_of(const AttentionArgs& a, int64_t tile, int64_t split) {
  return a.partials + (tile * a.kv_splits + split) * a.task_heads * a.task_queries * partial_row_floats(a);
}

// Which rows tile `tile` holds. Late queries come first: under causality they are the most work, and tasks
// handed out last should be short.
Task tile_rows(const AttentionArgs& a, int64_t tile) {
  const int64_t group = a.num_heads / a.num_kv_heads;
  const int64_t head_blocks = (group + a.task_heads - 1) / a.task_heads;
  const int64_t query_blocks = (a.q_len + a.task_queries - 1) / a.task_queries;
  const int64_t heads_and_batches = a.batch * a.num_kv_heads * head_blocks;
  const int64_t block = query_blocks - 1 - tile / heads_and_batches;
  const int64_t rest = tile % heads_and_batches;

  Task t = {};
  t.batch = rest / (a.num_kv_heads * head_blocks);
  t.kv_head = rest / head_blocks % a.num_kv_heads;
  const int64_t head = rest % head_blocks * a.task_heads;
  t.first_head = t.kv_head * group + head;
  t.heads = min_of(a.task_heads, group - head);
  t.first_query = block * a.task_queries;
  t.queries = min_of(a.task_queries, a.q_len - t.first_query);
  t.rows = t.heads * t.queries;
  t.unscaled = a.scaling > 0.0f && !(a.softcap > 0.0f) &&
               (a.mask_type == AttentionMask::none || a.mask_type == AttentionMask::boolean);
  return t;
}

// Calls walk(begin, end) for each run of neighbouring blocks of keys among those that the task's queries read.
template <typename Walk>
void walk_selected(const AttentionArgs& a, const Task& t, const Walk& walk) {
  const int64_t query_blocks = (a.q_len + a.task_queries - 1) / a.task_queries;
  const int64_t query_block = t.batch * query_blocks + t.first_query / a.task_queries;
  const int64_t head = a.selected_heads == a.num_heads ? t.first_head : t.kv_head;
  const int64_t row = query_block * a.selected_heads + head;
  const int64_t* blocks = a.selected + row * a.most_selected;
  const int64_t count = a.selected_counts[row];
  for (int64_t i = 0; i < count;) {
    const int64_t first = blocks[i];
    int64_t behind = first;
    for (; i < count && blocks[i] == behind; ++i) ++behind;
    walk(first * a.block_keys, min_of(behind * a.block_keys, t.end));
  }
}

// `Stored` is the type of keys and values, T that of queries and output.
template <typename Words, typename T, typename Stored>
void run_task(const AttentionArgs& a, int64_t task, void* memory) {
  const int64_t tile = task / a.kv_splits;
  const int64_t split = task % a.kv_splits;
  Task t = tile_rows(a, tile);
  Scratch scratch = {static_cast<char*>(memory)};
  lay_out<Words>(a, scratch, t);

  const int64_t first = first_key(a, t.first_query);
  const int64_t last = last_key(a, t.first_query + t.queries - 1);
  if (a.split_keys > 0) {
    // The split that holds the first key, and those behind it.
    const int64_t origin =
        a.split_origins == nullptr ? 0 : a.split_origins[t.batch * a.q_len + t.first_query] - a.split_keys;
    t.begin = origin + ((first - origin) / a.split_keys + split) * a.split_keys;
    t.end = min_of(t.begin + a.split_keys, last);
    t.begin = max_of(t.begin, 0);
  } else {
    // Splits of whole panels, so that only the last one has a ragged block.
    const int64_t share = round_up((max_of(last - first, 0) + a.kv_splits - 1) / a.kv_splits, kPanel);
    t.begin = first + split * share;
    t.end = min_of(t.begin + share, last);
  }

  const T* queries = static_cast<const T*>(a.query) + t.batch * a.query_strides[0];
  for (int64_t row = 0; row < t.rows; ++row) {
    const T* query = queries + head_of(t, row) * a.query_strides[1] + query_of(t, row) * a.query_strides[2];
    if (a.direct) {
      Direct<Words, Stored>::pack(t, row, query, a.head_dim);
    } else {
      pack_query<typename Words::Packed>(query, a.head_dim, t.queries_packed + row * t.query_stride);
      if constexpr (is_int8<Stored>) t.query_scales[row] = 1.0f;
    }
    if (a.mask_type == AttentionMask::boolean && !is_finite(query, a.head_dim)) t.has_nonfinite_query = true;
    t.maximum[row] = kMinusInfinity;
    t.total[row] = 0.0f;
  }
  memset(t.outputs, 0, sizeof(float) * static_cast<size_t>(t.rows * t.output_stride));

  const Stored* keys =
      static_cast<const Stored*>(a.key) + t.batch * a.key_strides[0] + t.kv_head * a.key_strides[1];
  const Stored* values =
      static_cast<const Stored*>(a.value) + t.batch * a.value_strides[0] + t.kv_head * a.value_strides[1];
  const int64_t step = a.direct ? kDirectKeys : kBlockKeys;
  const auto walk = [&](int64_t begin, int64_t end) {
    for (int64_t key = begin, n; key < end; key += n) {
      n = block_keys(a, key, min_of(step, end - key));
      if (a.direct) {
        Direct<Words, Stored>::block(a, t, keys, values, key, n);
      } else {
        packed_block<typename Words::Packed>(a, t, keys, values, key, n);
      }
    }
  };
  if (a.selected_counts != nullptr) {
    walk_selected(a, t, walk);
  } else {
    walk(t.begin, t.end);
  }

  for (int64_t row = 0; row < t.rows; ++row) {
    const float* sums = t.outputs + row * t.output_stride;
    const float maximum = t.unscaled ? t.maximum[row] * a.scaling : t.maximum[row];
    if (a.kv_splits == 1) {
      write_row<T>(a, t.batch, head_of(t, row), query_of(t, row), sums, maximum, t.total[row]);
    } else {
      float* partial = partial_of(a, tile, split) + row * partial_row_floats(a);
      memcpy(partial, sums, sizeof(float) * static_cast<size_t>(a.value_dim));
      partial[a.value_dim] = maximum;
      partial[a.value_dim + 1] = t.total[row];
    }
  }
}

// Brings the partial sums of a row to their common maximum, adds them up in the first, and writes the row.
template <typename T>
void merge_tile(const AttentionArgs& a, int64_t tile) {
  const Task t = tile_rows(a, tile);
  const int64_t dim = a.value_dim;
  for (int64_t row = 0; row < t.rows; ++row) {
    const int64_t offset = row * partial_row_floats(a);
    float maximum = kMinusInfinity;
    for (int64_t s = 0; s < a.kv_splits; ++s) {
      const float* found = partial_of(a, tile, s) + offset + dim;
      // A NaN stays; its part's total may be all that says so.
      const bool is_nan = found[0] != found[0] || (found[1] != found[1] && found[0] != kInfinity);
      if (is_nan || maximum != maximum) {
        maximum = kNaN;
      } else if (found[0] > maximum) {
        maximum = found[0];
      }
    }
    float total = 0.0f;
    float* sums = partial_of(a, tile, 0) + offset;
    for (int64_t s = 0; s < a.kv_splits; ++s) {
      const float* partial = partial_of(a, tile, s) + offset;
      const float weight = maximum == kMinusInfinity ? 0.0f : expf(partial[dim] - maximum);
      total += partial[dim + 1] * weight;
      for (int64_t c = 0; c < dim; c += kLanes) {
        const VF sum = s == 0 ? VF{} : load_some(sums + c, dim - c);
        store_some(sums + c, fma(load_some(partial + c, dim - c), splat(weight), sum), dim - c);
      }
    }
    write_row<T>(a, t.batch, head_of(t, row), query_of(t, row), sums, maximum, total);
  }
}

// ---- the table ----

size_t scratch_bytes(const AttentionArgs& a) {
  Scratch scratch = {nullptr};
  Task t = {};
  // Words of one value are the larger layout.
  lay_out<Words32>(a, scratch, t);
  return scratch.used;
}

template <typename Words, typename T>
void run_stored(const AttentionArgs& a, int64_t task, void* scratch) {
  a.quantize_kv ? run_task<Words, T, int8_t>(a, task, scratch) : run_task<Words, T, T>(a, task, scratch);
}

void run(const AttentionArgs& a, int64_t task, void* scratch) {
  switch (a.dtype) {
    case DType::f32:
      return run_stored<Words32, float>(a, task, scratch);
    case DType::f16:
      return run_stored<Words32, f16>(a, task, scratch);
    case DType::bf16:
#if defined(LB_BF16_PAIRS)
      return run_stored<WordsBf16, bf16>(a, task, scratch);
#elif defined(LB_INT8_ATTENTION)
      return a.quantize_kv ? run_task<WordsOfInt8, bf16, int8_t>(a, task, scratch)
                           : run_task<Words32, bf16, bf16>(a, task, scratch);
#else
      return run_stored<Words32, bf16>(a, task, scratch);
#endif
  }
}

void merge(const AttentionArgs& a, int64_t tile) { LB_DISPATCH_DTYPE(a.dtype, T, merge_tile<T>(a, tile)); }

}  // namespace

const AttentionKernels attention_kernels = {&scratch_bytes, &run, &merge};

}  // namespace LB_ISA
}  // namespace liteboost
