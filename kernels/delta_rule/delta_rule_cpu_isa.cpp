#include "common/vec_math.h"
#include "delta_rule/delta_rule.h"

#define LB_UNROLL _Pragma("GCC unroll 8")

namespace liteboost {
namespace LB_ISA {
namespace {

// Tokens of a chunk: as many as leave a vector register for each product of the state with their queries and keys.
#if defined(__AVX512F__)
constexpr int kChunk = 8;
#else
constexpr int kChunk = 4;
#endif
// Queries, then keys, of a chunk: a row of this many for each dimension of a head.
constexpr int kRow = 2 * kChunk;
// kChunk numbers, or a vector where that is more.
constexpr int kPadded = kLanes > kChunk ? kLanes : kChunk;
constexpr float kEps = 1e-6f;
// Vectors of columns of the state at once, of one token, and of a chunk.
constexpr int kMostVectors = 4;
#if defined(__aarch64__)
constexpr int kChunkVectors = 2;
#else
constexpr int kChunkVectors = 1;
#endif

// A chunk as it is read. Where fewer tokens are left the others are zeros, which change nothing; a single token has a
// chunk of one, whose other columns stand unused.
struct Chunk {
  float* qk;     // [k_dim][kRow]
  float* v;      // [kChunk][v_dim]
  float* saved;  // [k_dim][kMostVectors][kLanes]: columns of the state as they were
  float beta[kPadded];
  float decay[kPadded];
  float since[kChunk];        // P_i: the decays up to and with i
  float until[kChunk];        // D(last, i): those behind i
  float pairs[kChunk][kRow];  // [j][i] of queries, then of keys: D(i, j) (x_i . k_j)
};

template <typename T>
LB_INLINE float element(const void* data, int64_t at) {
  return load(static_cast<const T*>(data) + at, 1)[0];
}

// `tokens` numbers of g or beta.
template <typename T>
void read_rates(const void* data, int64_t at, int64_t stride, int tokens, float* out) {
  for (int i = 0; i < tokens; ++i) out[i] = element<T>(data, at + i * stride);
}

// out[r * row + i * step] = in[i * token + r * dim] for `tokens` tokens and `dims` dimensions, and 0 for the tokens
// from there to C. Reads in vectors along whichever of the two is adjacent.
template <int C, typename T>
void transpose_in(const T* in, int64_t token, int64_t dim, int tokens, int64_t dims, float* out, int64_t row,
                  int64_t step) {
  if (dim == 1) {
    for (int i = 0; i < C; ++i) {
      for_lanes(dims, [&](int64_t r, auto n) __attribute__((always_inline)) {
        float lanes[kLanes];
        store(lanes, i < tokens ? load(in + i * token + r, n) : VF{});
        const int count = static_cast<int>(dims - r < kLanes ? dims - r : kLanes);
        for (int l = 0; l < count; ++l) out[(r + l) * row + i * step] = lanes[l];
      });
    }
    return;
  }
  float lanes[kPadded] = {};
  for (int64_t r = 0; r < dims; ++r) {
    const T* at = in + r * dim;
    if (token == 1 && tokens == kChunk) {
      if constexpr (kLanes <= kChunk) {
        for (int i = 0; i < kChunk; i += kLanes) store(lanes + i, load(at + i));
      } else {
        store(lanes, load(at, kChunk));
      }
    } else {
      for (int i = 0; i < tokens; ++i) lanes[i] = element<T>(at, i * token);
    }
    for (int i = 0; i < C; ++i) out[r * row + i * step] = lanes[i];
  }
}

// The same with the dimensions adjacent: out[i * dims + r].
template <int C, typename T>
void copy_in(const T* in, int64_t token, int64_t dim, int tokens, int64_t dims, float* out) {
  if (dim != 1) return transpose_in<C>(in, token, dim, tokens, dims, out, 1, dims);
  for (int i = 0; i < C; ++i) {
    for_lanes(dims, [&](int64_t r, auto n) __attribute__((always_inline)) {
      store(out + i * dims + r, i < tokens ? load(in + i * token + r, n) : VF{}, n);
    });
  }
}

// The factors of each column of rows of kRow numbers.
LB_INLINE void scale_columns(float* rows, int64_t count, const float (&factor)[kRow]) {
  for (int64_t r = 0; r < count; ++r) {
    LB_UNROLL for (int c = 0; c < kRow; c += kLanes) {
      store(rows + r * kRow + c, load(rows + r * kRow + c) * load(factor + c));
    }
  }
}

// Lengths, where wanted, and the scaling of the queries.
void scale(const DeltaRuleArgs& args, float* qk) {
  float factor[kRow];
  for (int i = 0; i < kRow; ++i) factor[i] = 1.0f;
  if (args.normalize) {
    VF squares[kRow / kLanes] = {};
    for (int64_t r = 0; r < args.k_dim; ++r) {
      LB_UNROLL for (int c = 0; c < kRow / kLanes; ++c) {
        const VF x = load(qk + r * kRow + c * kLanes);
        squares[c] = fma(x, x, squares[c]);
      }
    }
    for (int c = 0; c < kRow / kLanes; ++c) {
      store(factor + c * kLanes, 1.0f / sqrt(squares[c] + splat(kEps)));
    }
  }
  for (int i = 0; i < kChunk; ++i) factor[i] *= args.scaling;
  scale_columns(qk, args.k_dim, factor);
}

// pairs[j][i] = D(i, j) (x_i . k_j), and the products of decays. A lane beyond its time, i < j, is never read.
template <int C>
void decay_pairs(const DeltaRuleArgs& args, Chunk& chunk) {
  VF sums[C][kRow / kLanes] = {};
  for (int64_t r = 0; r < args.k_dim; ++r) {
    const float* row = chunk.qk + r * kRow;
    LB_UNROLL for (int j = 0; j < C; ++j) {
      const VF k = splat(row[kChunk + j]);
      LB_UNROLL for (int c = 0; c < kRow / kLanes; ++c) {
        sums[j][c] = fma(load(row + c * kLanes), k, sums[j][c]);
      }
    }
  }
  float product = 1.0f;
  for (int i = 0; i < C; ++i) chunk.since[i] = product *= chunk.decay[i];
  product = 1.0f;
  for (int i = C - 1; i >= 0; --i) {
    chunk.until[i] = product;
    product *= chunk.decay[i];
  }
  for (int j = 0; j < C; ++j) {
    LB_UNROLL for (int c = 0; c < kRow / kLanes; ++c) store(chunk.pairs[j] + c * kLanes, sums[j][c]);
    float between = 1.0f;
    for (int i = j + 1; i < C; ++i) {
      between *= chunk.decay[i];
      chunk.pairs[j][i] *= between;
      chunk.pairs[j][kChunk + i] *= between;
    }
  }
}

// What is not finite of the columns once more, token by token, as the rule is written: infinities of several dimensions
// then meet in the sums in which they belong together. `q` are the outputs in fp32; chunk.saved is the state before.
template <typename T, int C, int V, typename N>
void redo_not_finite(const DeltaRuleArgs& args, const Chunk& chunk, float* to, T* out, int64_t column,
                     int tokens, const VF (&q)[C][V], N n) {
  const int64_t k_dim = args.k_dim, v_dim = args.v_dim;
  for (int v = 0; v < V; ++v) {
    VF spoiled{};
    for (int i = 0; i < tokens; ++i) {
      const float* query = chunk.qk + i;
      const float* key = query + kChunk;
      VF known{}, sum{};
      for (int64_t r = 0; r < k_dim; ++r) {
        float* state = chunk.saved + (r * V + v) * kLanes;
        const VF s = load(state) * splat(chunk.decay[i]);
        store(state, s);
        known = fma(s, splat(key[r * kRow]), known);
      }
      const VF value = load(chunk.v + i * v_dim + column + v * kLanes, n);
      const VF delta = (value - known) * splat(chunk.beta[i]);
      for (int64_t r = 0; r < k_dim; ++r) {
        float* state = chunk.saved + (r * V + v) * kLanes;
        const VF s = fma(delta, splat(key[r * kRow]), load(state));
        store(state, s);
        sum = fma(s, splat(query[r * kRow]), sum);
      }
      const VF zero = q[i][v] * VF{};  // or NaN
      store(out + i * args.v_heads * v_dim + column + v * kLanes, zero == zero ? q[i][v] : sum, n);
      spoiled += zero;
    }
    for (int64_t r = 0; r < k_dim; ++r) {
      float* at = to + r * v_dim + v * kLanes;
      store(at, spoiled == spoiled ? load(at, n) : load(chunk.saved + (r * V + v) * kLanes), n);
    }
  }
}

// One chunk of C tokens for V vectors of columns of the state, from `column` on; n: Full, or the lanes of the last.
template <typename T, int C, int V, typename N>
LB_INLINE void columns(const DeltaRuleArgs& args, const Chunk& chunk, const float* from, float* to, T* out,
                       int64_t column, int tokens, N n) {
  const int64_t k_dim = args.k_dim, v_dim = args.v_dim;
  from += column;
  to += column;
  VF q[C][V] = {}, k[C][V] = {};  // S^T q_i and S^T k_i; then out_i and delta_i
  for (int64_t r = 0; r < k_dim; ++r) {
    const float* row = chunk.qk + r * kRow;
    VF s[V];
    LB_UNROLL for (int v = 0; v < V; ++v) s[v] = load(from + r * v_dim + v * kLanes, n);
    LB_UNROLL for (int i = 0; i < C; ++i) {
      const VF q_i = splat(row[i]), k_i = splat(row[kChunk + i]);
      LB_UNROLL for (int v = 0; v < V; ++v) {
        q[i][v] = fma(s[v], q_i, q[i][v]);
        k[i][v] = fma(s[v], k_i, k[i][v]);
      }
    }
  }
  LB_UNROLL for (int i = 0; i < C; ++i) {
    LB_UNROLL for (int v = 0; v < V; ++v) {
      VF known = k[i][v] * splat(chunk.since[i]);
      VF sum = q[i][v] * splat(chunk.since[i]);
      LB_UNROLL for (int j = 0; j < i; ++j) {
        known = fma(k[j][v], splat(chunk.pairs[j][kChunk + i]), known);
        sum = fma(k[j][v], splat(chunk.pairs[j][i]), sum);
      }
      const VF value = load(chunk.v + i * v_dim + column + v * kLanes, n);
      k[i][v] = (value - known) * splat(chunk.beta[i]);
      q[i][v] = fma(k[i][v], splat(chunk.pairs[i][i]), sum);
    }
  }
  // Whatever is not finite among the state, queries, keys, values and rates is so in an output of the chunk.
  VF spoiled{};
  LB_UNROLL for (int i = 0; i < C; ++i) {
    LB_UNROLL for (int v = 0; v < V; ++v) spoiled = fma(q[i][v], VF{}, spoiled);
  }
  const bool is_finite = sum(spoiled) == 0.0f;
  if (!is_finite) {
    for (int64_t r = 0; r < k_dim; ++r) {
      for (int v = 0; v < V; ++v)
        store(chunk.saved + (r * V + v) * kLanes, load(from + r * v_dim + v * kLanes, n));
    }
  }
  const VF decay = splat(chunk.since[C - 1]);
  // delta_j with the decay behind it: it stands in registers, the keys do not.
  LB_UNROLL for (int i = 0; i < C; ++i) {
    LB_UNROLL for (int v = 0; v < V; ++v) {
      if (i < tokens) store(out + i * args.v_heads * v_dim + column + v * kLanes, q[i][v], n);
      k[i][v] = k[i][v] * splat(chunk.until[i]);
    }
  }
  for (int64_t r = 0; r < k_dim; ++r) {
    const float* keys = chunk.qk + r * kRow + kChunk;
    LB_UNROLL for (int v = 0; v < V; ++v) {
      VF s = load(from + r * v_dim + v * kLanes, n) * decay;
      LB_UNROLL for (int i = 0; i < C; ++i) s = fma(k[i][v], splat(keys[i]), s);
      store(to + r * v_dim + v * kLanes, s, n);
    }
  }
  if (!is_finite) redo_not_finite<T, C, V>(args, chunk, to, out, column, tokens, q, n);
}

// A chunk whose `tokens` <= C tokens are read, for every column. V: vectors at once.
template <typename T, int C, int V>
void run_chunk(const DeltaRuleArgs& args, Chunk& chunk, const float* from, float* to, T* out, int tokens) {
  decay_pairs<C>(args, chunk);
  int64_t column = 0;
  for (; column + V * kLanes <= args.v_dim; column += V * kLanes) {
    columns<T, C, V>(args, chunk, from, to, out, column, tokens, Full{});
  }
  for (; column + kLanes <= args.v_dim; column += kLanes) {
    columns<T, C, 1>(args, chunk, from, to, out, column, tokens, Full{});
  }
  if (column < args.v_dim) {
    const int rest = static_cast<int>(args.v_dim - column);
    columns<T, C, 1>(args, chunk, from, to, out, column, tokens, rest);
  }
}

template <typename T, int C>
void read_chunk(const DeltaRuleArgs& args, Chunk& chunk, int64_t batch, int64_t head, int64_t token,
                int tokens) {
  const int64_t k_head = head / (args.v_heads / args.k_heads);
  const auto place = [&](const DeltaRuleStrides& s, int64_t h) {
    return batch * s.batch + token * s.token + h * s.head;
  };
  const DeltaRuleStrides &q = args.query_strides, &k = args.key_strides, &v = args.value_strides;
  transpose_in<C>(static_cast<const T*>(args.query) + place(q, k_head), q.token, q.dim, tokens, args.k_dim,
                  chunk.qk, kRow, 1);
  transpose_in<C>(static_cast<const T*>(args.key) + place(k, k_head), k.token, k.dim, tokens, args.k_dim,
                  chunk.qk + kChunk, kRow, 1);
  scale(args, chunk.qk);
  copy_in<C>(static_cast<const T*>(args.value) + place(v, head), v.token, v.dim, tokens, args.v_dim, chunk.v);
  memset(chunk.beta, 0, sizeof(chunk.beta));
  memset(chunk.decay, 0, sizeof(chunk.decay));
  const DeltaRuleStrides &g = args.g_strides, &b = args.beta_strides;
  LB_DISPATCH_DTYPE(args.g_dtype, G, read_rates<G>(args.g, place(g, head), g.token, tokens, chunk.decay));
  LB_DISPATCH_DTYPE(args.beta_dtype, B,
                    read_rates<B>(args.beta, place(b, head), b.token, tokens, chunk.beta));
  for (int i = 0; i < kChunk; i += kLanes) store(chunk.decay + i, exp(load(chunk.decay + i)));
}

template <typename T>
void run(const DeltaRuleArgs& args, float* scratch, int64_t begin, int64_t end) {
  Chunk chunk;
  chunk.qk = scratch;
  chunk.v = scratch + args.k_dim * kRow;
  chunk.saved = chunk.v + kChunk * args.v_dim;
  memset(chunk.qk, 0, sizeof(float) * args.k_dim * kRow);
  const int64_t size = args.k_dim * args.v_dim;
  const int64_t step = args.order == Order::of_one_row ? 1 : kChunk;
  for (int64_t at = begin; at < end; ++at) {
    const int64_t batch = at / args.v_heads, head = at % args.v_heads;
    float* to = args.state + at * size;
    const float* from = args.state_from ? args.state_from + at * size : to;
    if (!args.state_from) memset(to, 0, sizeof(float) * size);
    if (args.tokens == 0 && from != to) memcpy(to, from, sizeof(float) * size);
    for (int64_t token = 0; token < args.tokens; token += step, from = to) {
      const int64_t rest = args.tokens - token;
      const int tokens = static_cast<int>(rest < step ? rest : step);
      T* out = static_cast<T*>(args.out) + ((batch * args.tokens + token) * args.v_heads + head) * args.v_dim;
      if (tokens == 1) {
        read_chunk<T, 1>(args, chunk, batch, head, token, tokens);
        run_chunk<T, 1, kMostVectors>(args, chunk, from, to, out, tokens);
      } else {
        read_chunk<T, kChunk>(args, chunk, batch, head, token, tokens);
        run_chunk<T, kChunk, kChunkVectors>(args, chunk, from, to, out, tokens);
      }
    }
  }
}

int64_t scratch_floats(const DeltaRuleArgs& args) {
  return args.k_dim * (kRow + kMostVectors * kLanes) + kChunk * args.v_dim;
}

void run_any(const DeltaRuleArgs& args, float* scratch, int64_t begin, int64_t end) {
  LB_DISPATCH_DTYPE(args.dtype, T, run<T>(args, scratch, begin, end));
}

}  // namespace

extern const DeltaRuleKernels delta_rule_kernels;
const DeltaRuleKernels delta_rule_kernels = {scratch_floats, run_any};

}  // namespace LB_ISA
}  // namespace liteboost
