// Attention with an online softmax over key tiles. Included like matmul_impl.h, after it.
//
// What fixes the order: tiles start at multiples of kKeyTile positions whatever the chunk; a score
// is one chain over the head's dimensions; within a tile a row's weights are summed lane by lane,
// masked lanes counting as zero, and its output takes the visible values in the order of their
// positions. A task of few rows reads keys and values as they are stored; one of many rows, or over
// e4m3, converts each tile to floats first. The operations on an element are the same.

namespace palimpsest::PALIMPSEST_ISA {

struct AttentionScratch {
  float* keys;     // [head_dim][kKeyTile]
  float* values;   // [kKeyTile][value_dim]
  float* queries;  // [rows][head_dim], scaled
  float* scores;   // [rows][kKeyTile]
  float* sums;     // [rows][value_dim]
  float* largest;  // [rows]
  float* total;    // [rows]
  float* decay;    // [rows]: what the running sums are multiplied by in this tile

  // The rows from number `row` on.
  AttentionScratch From(int64_t row, const AttentionTask& task) const {
    AttentionScratch s = *this;
    s.queries += row * task.head_dim;
    s.scores += row * kKeyTile;
    s.sums += row * task.value_dim;
    s.largest += row;
    s.total += row;
    s.decay += row;
    return s;
  }
};

static AttentionScratch CutScratch(float* scratch, int64_t rows, const AttentionTask& task) {
  AttentionScratch s;
  s.keys = scratch;
  s.values = s.keys + kKeyTile * task.head_dim;
  s.queries = s.values + kKeyTile * task.value_dim;
  s.scores = s.queries + rows * task.head_dim;
  s.sums = s.scores + rows * kKeyTile;
  s.largest = s.sums + rows * task.value_dim;
  s.total = s.largest + rows;
  s.decay = s.total + rows;
  return s;
}

// Where the keys and values of a tile lie. Lanes outside [first, last) are not read by any query of
// the task and may not be mapped; they point at a lane that is.
struct KeyTile {
  int32_t base;
  int32_t first;
  int32_t last;
  const uint16_t* keys[kKeyTile];
  const uint16_t* values[kKeyTile];
};

// Finds the tile at `base`; its pointers are for the task's first KV head.
static void FindTile(const AttentionTask& task, int32_t base, int32_t oldest, int32_t past,
                     KeyTile& tile) {
  tile.base = base;
  tile.first = oldest > base ? oldest - base : 0;
  tile.last = static_cast<int32_t>(Smaller(past - base, kKeyTile));
  int32_t block = (base + tile.first) / task.block_tokens;
  int32_t slot = (base + tile.first) % task.block_tokens;
  for (int32_t lane = tile.first; lane < tile.last; ++block, slot = 0) {
    const std::byte* at = task.kv + int64_t{task.block_table[block].value()} * task.block_bytes;
    for (; slot < task.block_tokens && lane < tile.last; ++slot, ++lane) {
      const std::byte* key = at + task.key_offset + slot * task.token_bytes;
      const std::byte* value = at + task.value_offset + slot * task.token_bytes;
      tile.keys[lane] = reinterpret_cast<const uint16_t*>(key);
      tile.values[lane] = reinterpret_cast<const uint16_t*>(value);
    }
  }
  for (int32_t lane = 0; lane < kKeyTile; ++lane) {
    if (lane >= tile.first && lane < tile.last) continue;
    tile.keys[lane] = tile.keys[tile.first];
    tile.values[lane] = tile.values[tile.first];
  }
}

// Converts one KV head of a tile whose pointers are to bytes of e4m3.
static void ConvertE4m3Tile(const AttentionTask& task, const KeyTile& tile, int64_t kv_head,
                            const AttentionScratch& s) {
  const int64_t width = task.value_dim;
  for (int32_t lane = tile.first / 16 * 16; lane < tile.last; lane += 16) {
    const uint8_t* keys[16];
    for (int i = 0; i < 16; ++i) keys[i] = reinterpret_cast<const uint8_t*>(tile.keys[lane + i]);
    TransposeE4m3(keys, kv_head * task.head_dim, task.head_dim,
                  [&](int64_t d, const F32x16& v) { Store(s.keys + d * kKeyTile + lane, v); });
  }
  for (int32_t lane = tile.first; lane < tile.last; ++lane) {
    const auto* values = reinterpret_cast<const uint8_t*>(tile.values[lane]) + kv_head * width;
    for (int64_t d = 0; d < width; d += 16) {
      Store(s.values + lane * width + d, LoadE4m3(values + d));
    }
  }
}

// Converts one KV head of a tile.
static void ConvertTile(const AttentionTask& task, const KeyTile& tile, int64_t kv_head,
                        const AttentionScratch& s) {
  if (task.e4m3) return ConvertE4m3Tile(task, tile, kv_head, s);
  const int64_t width = task.value_dim;
  for (int32_t lane = tile.first / 16 * 16; lane < tile.last; lane += 16) {
    TransposeBf16(tile.keys + lane, kv_head * task.head_dim, task.head_dim,
                  [&](int64_t d, const F32x16& v) { Store(s.keys + d * kKeyTile + lane, v); });
  }
  for (int32_t lane = tile.first; lane < tile.last; ++lane) {
    for (int64_t d = 0; d < width; d += 16) {
      Store(s.values + lane * width + d, LoadBf16(tile.values[lane] + kv_head * width + d));
    }
  }
}

// Scores of R rows, straight from the stored keys. Meanwhile the same head of the tile `next` is
// fetched into the cache, a line per step: more at once than the core can track would be dropped.
template <int R>
static void ScoreStored(int64_t rows, const KeyTile& tile, const KeyTile& next, int64_t head,
                        int64_t head_dim, const float* queries, float* scores) {
  if constexpr (R > 1) {
    if (rows < R) {
      return ScoreStored<R - 1>(rows, tile, next, head, head_dim, queries, scores);
    }
  }
  for (int32_t lane = tile.first / 16 * 16; lane < tile.last; lane += 16) {
    F32x16 acc[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) acc[r] = Zero();
    TransposeBf16(
        tile.keys + lane, head,
        head_dim, [&](int64_t d, const F32x16& v) __attribute__((always_inline)) {
          const auto* rows_of = d & 16 ? next.values : next.keys;
          Prefetch(
              reinterpret_cast<const std::byte*>(rows_of[lane + (d & 15)] + head + d / 32 * 32));
#pragma GCC unroll 16
          for (int r = 0; r < R; ++r) {
            acc[r] = Fma(Broadcast(queries[r * head_dim + d]), v, acc[r]);
          }
        });
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) Store(scores + r * kKeyTile + lane, acc[r]);
  }
}

// A matrix of floats, and rows of bfloat16 wherever they lie.
struct FloatMatrix {
  const float* data;
  int64_t stride;
  PALIMPSEST_INLINE F32x16 At(const FloatMatrix& m, int64_t row, int64_t column) {
    return Load(m.data + row * m.stride + column);
  }
};
struct StoredRows {
  const uint16_t* const* rows;
  int64_t first;  // element of a row that is column 0
  PALIMPSEST_INLINE F32x16 At(const StoredRows& m, int64_t row, int64_t column) {
    return LoadBf16(m.rows[row] + m.first + column);
  }
};

// The product out[r][n] += sum over k of a[r][k] * b[k][n]: one chain per element.
struct ProductTask {
  const float* a;
  int64_t a_stride;
  int64_t k_first;
  int64_t k_last;
  float* out;
  int64_t out_stride;
  const float* decay;  // per row: multiplies `out` first; none: starts from zero
};

template <int R, int N, typename Matrix>
static void RowsTimesMatrix(const ProductTask& task, int64_t row, const Matrix& b, int64_t column) {
  const float* a = task.a + row * task.a_stride;
  float* out = task.out + row * task.out_stride + column;
  F32x16 acc[R][N];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) {
      acc[r][n] = task.decay == nullptr ? Zero()
                                        : Mul(Load(out + r * task.out_stride + n * 16),
                                              Broadcast(task.decay[row + r]));
    }
  }
  for (int64_t k = task.k_first; k < task.k_last; ++k) {
    F32x16 line[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) line[n] = Matrix::At(b, k, column + n * 16);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const F32x16 x = Broadcast(a[r * task.a_stride + k]);
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) acc[r][n] = Fma(x, line[n], acc[r][n]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) Store(out + r * task.out_stride + n * 16, acc[r][n]);
  }
}

// Picks the micro-kernel for what is left of rows and columns.
template <int R, int N, typename Matrix>
static void ProductBlock(const ProductTask& task, int64_t rows, int64_t row, const Matrix& b,
                         int64_t vectors, int64_t column) {
  if constexpr (R > 1) {
    if (rows < R) return ProductBlock<R - 1, N>(task, rows, row, b, vectors, column);
  }
  if constexpr (N > 1) {
    if (vectors < N) return ProductBlock<R, N - 1>(task, rows, row, b, vectors, column);
  }
  RowsTimesMatrix<R, N>(task, row, b, column);
}

template <typename Matrix>
static void Product(const ProductTask& task, int64_t rows, const Matrix& b, int64_t columns) {
  for (int64_t n = 0; n < columns; n += kAttentionVectors * 16) {
    const int64_t vectors = Smaller(kAttentionVectors, (columns - n) / 16);
    for (int64_t r = 0; r < rows; r += kAttentionRows) {
      ProductBlock<kAttentionRows, kAttentionVectors>(task, Smaller(kAttentionRows, rows - r), r, b,
                                                      vectors, n);
    }
  }
}

// Turns a row's scores of lanes first .. last - 1 into weights relative to the largest score so
// far.
static void SoftmaxRow(float* scores, int32_t first, int32_t last, float* largest, float* total,
                       float* decay) {
  alignas(64) static const float lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  constexpr int kVectors = kKeyTile / 16;
  const F32x16 lowest = Broadcast(-__builtin_inff());
  F32x16 s[kVectors];
  F32x16 most = Broadcast(*largest);
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i) {
    const F32x16 lane = Add(Load(lanes), Broadcast(static_cast<float>(16 * i)));
    s[i] = SelectLess(lane, Broadcast(static_cast<float>(first)), lowest, Load(scores + 16 * i));
    s[i] = SelectLess(lane, Broadcast(static_cast<float>(last)), s[i], lowest);
    most = Max(most, s[i]);
  }
  const float now = ReduceMax(most);
  F32x16 sum = Zero();
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i) {
    s[i] = Exp(Sub(s[i], Broadcast(now)));
    sum = Add(sum, s[i]);
    Store(scores + 16 * i, s[i]);
  }
  alignas(64) float factor[16];
  Store(factor, Exp(Broadcast(*largest - now)));
  *decay = factor[0];
  *largest = now;
  *total = *total * factor[0] + ReduceAdd(sum);
}

// The part of one key tile that one token sees, as lanes of the tile.
struct Visible {
  int32_t first;
  int32_t last;
};

PALIMPSEST_INLINE Visible VisibleLanes(const AttentionTask& task, int32_t token, int32_t base) {
  const int32_t position = task.first_position + token;
  const int32_t oldest = task.keep_first_tile && base == 0 ? 0 : OldestKey(task, position);
  return {oldest > base ? oldest - base : 0,
          static_cast<int32_t>(Smaller(position - base + 1, kKeyTile))};
}

// Scores of tokens begin .. end - 1 of one KV head, whose rows of scratch are `s`; `next` is the
// tile that will be needed after this one. Returns whether keys and values are read as they are
// stored.
static bool ScoreTile(const AttentionTask& task, const KeyTile& tile, const KeyTile& next,
                      int64_t kv_head, const AttentionScratch& s, int32_t begin, int32_t end) {
  const int64_t group = task.group, head_dim = task.head_dim;
  const int64_t first_row = begin * group, rows = (end - begin) * group;
  const bool stored = task.tokens * group <= kAttentionRows && !task.e4m3;
  if (stored) {
    ScoreStored<kAttentionRows>(rows, tile, next, kv_head * head_dim, head_dim,
                                s.queries + first_row * head_dim, s.scores + first_row * kKeyTile);
  } else {
    ConvertTile(task, tile, kv_head, s);
    Product({s.queries + first_row * head_dim, head_dim, 0, head_dim,
             s.scores + first_row * kKeyTile, kKeyTile, nullptr},
            rows, FloatMatrix{s.keys, kKeyTile}, kKeyTile);
  }
  if (task.softcap > 0) SoftCap(s.scores + first_row * kKeyTile, rows * kKeyTile, task.softcap);
  return stored;
}

static void AttendTile(const AttentionTask& task, const KeyTile& tile, const KeyTile& next,
                       int64_t kv_head, const AttentionScratch& s) {
  const int32_t base = tile.base;
  int32_t begin = 0, end = task.tokens;
  while (begin < end && task.first_position + begin < base) ++begin;
  while (end > begin && VisibleLanes(task, end - 1, base).first >= kKeyTile) --end;
  if (begin == end) return;
  const int64_t group = task.group, value_dim = task.value_dim;
  const bool stored = ScoreTile(task, tile, next, kv_head, s, begin, end);
  int32_t token = begin;
  while (token < end) {
    // Tokens that see the same lanes share one product.
    const Visible lanes = VisibleLanes(task, token, base);
    int32_t next = token;
    for (; next < end; ++next) {
      const Visible other = VisibleLanes(task, next, base);
      if (other.first != lanes.first || other.last != lanes.last) break;
      for (int64_t r = next * group; r < (next + 1) * group; ++r) {
        SoftmaxRow(s.scores + r * kKeyTile, lanes.first, lanes.last, s.largest + r, s.total + r,
                   s.decay + r);
      }
    }
    const int64_t row = token * group, rows = (next - token) * group;
    const ProductTask weigh = {s.scores + row * kKeyTile, kKeyTile,  lanes.first,  lanes.last,
                               s.sums + row * value_dim,  value_dim, s.decay + row};
    if (stored) {
      Product(weigh, rows, StoredRows{tile.values, kv_head * value_dim}, value_dim);
    } else {
      Product(weigh, rows, FloatMatrix{s.values, value_dim}, value_dim);
    }
    token = next;
  }
}

static void StartRows(const AttentionTask& task, const AttentionScratch& s) {
  const int64_t width = int64_t{task.group} * task.head_dim;
  const int64_t rows = int64_t{task.kv_heads} * task.tokens * task.group;
  const F32x16 scale = Broadcast(task.scale);
  float* queries = s.queries;
  for (int64_t h = 0; h < task.kv_heads; ++h) {
    for (int64_t t = 0; t < task.tokens; ++t, queries += width) {
      const float* query = task.query + t * task.query_stride + h * width;
      for (int64_t i = 0; i < width; i += 16) Store(queries + i, Mul(Load(query + i), scale));
    }
  }
  for (int64_t i = 0; i < rows * task.value_dim; i += 16) Store(s.sums + i, Zero());
  for (int64_t r = 0; r < rows; ++r) {
    s.largest[r] = -__builtin_inff();
    s.total[r] = 0;
  }
}

static void FinishRows(const AttentionTask& task, const AttentionScratch& s) {
  const int64_t value_dim = task.value_dim;
  const float* sums = s.sums;
  const float* total = s.total;
  for (int64_t h = 0; h < task.kv_heads; ++h) {
    for (int64_t t = 0; t < task.tokens; ++t) {
      for (int64_t g = 0; g < task.group; ++g, sums += value_dim, ++total) {
        const F32x16 inverse = Broadcast(1.0f / *total);
        float* out = task.output + t * task.output_stride + (h * task.group + g) * value_dim;
        for (int64_t d = 0; d < value_dim; d += 16) Store(out + d, Mul(Load(sums + d), inverse));
      }
    }
  }
}

// Calls work(tile, next) for each tile that the task sees, in order; `next` is the one after it, or
// the tile itself.
template <typename Work>
static void ForEachTile(const AttentionTask& task, const Work& work) {
  const int32_t past = task.first_position + task.tokens;
  const int32_t oldest = OldestKey(task, task.first_position);
  const int32_t window_tile = oldest / kKeyTile * kKeyTile;
  KeyTile tiles[2];
  int32_t base = task.keep_first_tile ? 0 : window_tile;
  FindTile(task, base, base < window_tile ? base : oldest, past, tiles[0]);
  for (int i = 0; base < past; i ^= 1) {
    const int32_t next = base + kKeyTile < window_tile ? window_tile : base + kKeyTile;
    const bool last = next >= past;
    if (!last) FindTile(task, next, oldest, past, tiles[i ^ 1]);
    work(tiles[i], tiles[last ? i : i ^ 1]);
    base = next;
  }
}

static void Attention(const AttentionTask& task, float* scratch) {
  const int64_t head_rows = int64_t{task.tokens} * task.group;
  const AttentionScratch s = CutScratch(scratch, head_rows * task.kv_heads, task);
  StartRows(task, s);
  ForEachTile(task, [&](const KeyTile& tile, const KeyTile& next) {
    for (int64_t h = 0; h < task.kv_heads; ++h) {
      AttendTile(task, tile, next, h, s.From(h * head_rows, task));
    }
  });
  FinishRows(task, s);
}

static float RowSum(const float* row) {
  F32x16 sum = Zero();
  for (int32_t lane = 0; lane < kKeyTile; lane += 16) sum = Add(sum, Load(row + lane));
  return ReduceAdd(sum);
}

static void FarShares(const AttentionTask& task, int32_t recent, float* scratch, float* shares) {
  const int64_t group = task.group;
  const AttentionScratch s = CutScratch(scratch, group * task.kv_heads, task);
  StartRows(task, s);
  float* far = s.sums;  // of each row: the weights of far keys
  const int32_t past_far = FarKeysEnd(task.first_position, recent);
  ForEachTile(task, [&](const KeyTile& tile, const KeyTile& next) {
    const Visible lanes = VisibleLanes(task, 0, tile.base);
    const bool is_far = tile.base >= kKeyTile && tile.base < past_far;
    for (int64_t h = 0; h < task.kv_heads; ++h) {
      const AttentionScratch head = s.From(h * group, task);
      ScoreTile(task, tile, next, h, head, 0, 1);
      for (int64_t g = 0; g < group; ++g) {
        SoftmaxRow(head.scores + g * kKeyTile, lanes.first, lanes.last, head.largest + g,
                   head.total + g, head.decay + g);
        float& sum = far[h * group + g];
        sum = sum * head.decay[g] + (is_far ? RowSum(head.scores + g * kKeyTile) : 0);
      }
    }
  });
  for (int64_t h = 0; h < task.kv_heads; ++h) {
    double share = 0;
    for (int64_t r = h * group; r < (h + 1) * group; ++r) share += double{far[r]} / s.total[r];
    shares[h] = static_cast<float>(share < group ? share / group : 1);
  }
}

}  // namespace palimpsest::PALIMPSEST_ISA
