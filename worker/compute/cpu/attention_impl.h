// Attention with an online softmax over key tiles. Included like matmul_impl.h, after it.
//
// What fixes the order: tiles start at multiples of kKeyTile positions whatever the chunk; within a
// tile a row's weights are summed lane by lane, masked lanes counting as zero, and its output takes
// the visible values in the order of their positions.

namespace palimpsest::PALIMPSEST_ISA {

struct AttentionScratch {
  float* keys;     // [head_dim][kKeyTile]
  float* values;   // [kKeyTile][head_dim]
  float* queries;  // [rows][head_dim], scaled
  float* scores;   // [rows][kKeyTile]
  float* sums;     // [rows][head_dim]
  float* largest;  // [rows]
  float* total;    // [rows]
  float* decay;    // [rows]: what the running sums are multiplied by in this tile
};

static AttentionScratch CutScratch(float* scratch, int64_t rows, int64_t head_dim) {
  AttentionScratch s;
  s.keys = scratch;
  s.values = s.keys + kKeyTile * head_dim;
  s.queries = s.values + kKeyTile * head_dim;
  s.scores = s.queries + rows * head_dim;
  s.sums = s.scores + rows * kKeyTile;
  s.largest = s.sums + rows * head_dim;
  s.total = s.largest + rows;
  s.decay = s.total + rows;
  return s;
}

// Loads keys and values of positions first .. last - 1 of the tile at `base`; the rest of the
// tile's keys become zero, the rest of its values stay what they are and are not used.
static void LoadTile(const AttentionTask& task, int32_t base, int32_t first, int32_t last,
                     const AttentionScratch& s) {
  alignas(64) static const uint16_t zeros[kMaxHeadDim] = {};
  const int64_t head_dim = task.head_dim;
  const uint16_t* rows[kKeyTile];
  for (int32_t position = base; position < base + kKeyTile; ++position) {
    const int32_t lane = position - base;
    rows[lane] = zeros;
    if (position < first || position >= last) continue;
    const std::byte* block =
        task.kv +
        int64_t{task.block_table[position / task.block_tokens].value()} * task.block_bytes +
        position % task.block_tokens * task.token_bytes;
    rows[lane] = reinterpret_cast<const uint16_t*>(block + task.key_offset);
    const auto* value = reinterpret_cast<const uint16_t*>(block + task.value_offset);
    for (int64_t d = 0; d < head_dim; d += 16) {
      Store(s.values + lane * head_dim + d, LoadBf16(value + d));
    }
  }
  for (int lane = 0; lane < kKeyTile; lane += 16) {
    if (base + lane >= last || base + lane + 16 <= first) continue;
    TransposeBf16(rows + lane, head_dim, s.keys + lane, kKeyTile);
  }
}

// out[r][n] = sum over k of a[r][k] * b[k][n] for R rows and N vectors, one chain per element.
template <int R, int N>
static void RowsTimesMatrix(const float* a, int64_t a_stride, const float* b, int64_t b_stride,
                            int64_t k_first, int64_t k_last, float* out, int64_t out_stride,
                            const float* decay) {
  F32x16 acc[R][N];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) {
      acc[r][n] =
          decay == nullptr ? Zero() : Mul(Load(out + r * out_stride + n * 16), Broadcast(decay[r]));
    }
  }
  for (int64_t k = k_first; k < k_last; ++k) {
    F32x16 column[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) column[n] = Load(b + k * b_stride + n * 16);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const F32x16 x = Broadcast(a[r * a_stride + k]);
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) acc[r][n] = Fma(x, column[n], acc[r][n]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) Store(out + r * out_stride + n * 16, acc[r][n]);
  }
}

// The same for any number of rows and of vectors.
template <int R, int N>
static void ProductBlock(int64_t rows, int64_t vectors, const float* a, int64_t a_stride,
                         const float* b, int64_t b_stride, int64_t k_first, int64_t k_last,
                         float* out, int64_t out_stride, const float* decay) {
  if constexpr (R > 1) {
    if (rows < R) {
      return ProductBlock<R - 1, N>(rows, vectors, a, a_stride, b, b_stride, k_first, k_last, out,
                                    out_stride, decay);
    }
  }
  if constexpr (N > 1) {
    if (vectors < N) {
      return ProductBlock<R, N - 1>(rows, vectors, a, a_stride, b, b_stride, k_first, k_last, out,
                                    out_stride, decay);
    }
  }
  RowsTimesMatrix<R, N>(a, a_stride, b, b_stride, k_first, k_last, out, out_stride, decay);
}

static void Product(int64_t rows, int64_t columns, const float* a, int64_t a_stride, const float* b,
                    int64_t b_stride, int64_t k_first, int64_t k_last, float* out,
                    int64_t out_stride, const float* decay) {
  for (int64_t n = 0; n < columns; n += kAttentionVectors * 16) {
    const int64_t vectors = Smaller(kAttentionVectors, (columns - n) / 16);
    for (int64_t r = 0; r < rows; r += kAttentionRows) {
      ProductBlock<kAttentionRows, kAttentionVectors>(
          Smaller(kAttentionRows, rows - r), vectors, a + r * a_stride, a_stride, b + n, b_stride,
          k_first, k_last, out + r * out_stride + n, out_stride,
          decay == nullptr ? nullptr : decay + r);
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
  const int32_t oldest = position < task.window ? 0 : position - task.window + 1;
  return {oldest > base ? oldest - base : 0,
          static_cast<int32_t>(Smaller(position - base + 1, kKeyTile))};
}

static void AttendTile(const AttentionTask& task, int32_t base, const AttentionScratch& s) {
  int32_t begin = 0, end = task.tokens;
  while (begin < end && task.first_position + begin < base) ++begin;
  while (end > begin && VisibleLanes(task, end - 1, base).first >= kKeyTile) --end;
  if (begin == end) return;
  const int64_t group = task.group, head_dim = task.head_dim;
  Product((end - begin) * group, kKeyTile, s.queries + begin * group * head_dim, head_dim, s.keys,
          kKeyTile, 0, head_dim, s.scores + begin * group * kKeyTile, kKeyTile, nullptr);
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
    const int64_t row = token * group;
    Product((next - token) * group, head_dim, s.scores + row * kKeyTile, kKeyTile, s.values,
            head_dim, lanes.first, lanes.last, s.sums + row * head_dim, head_dim, s.decay + row);
    token = next;
  }
}

static void Attention(const AttentionTask& task, float* scratch) {
  const int64_t head_dim = task.head_dim, rows = int64_t{task.tokens} * task.group;
  const AttentionScratch s = CutScratch(scratch, rows, head_dim);
  const F32x16 scale = Broadcast(1.0f / __builtin_sqrtf(static_cast<float>(head_dim)));
  for (int64_t t = 0; t < task.tokens; ++t) {
    const float* query = task.query + t * task.query_stride;
    for (int64_t i = 0; i < task.group * head_dim; i += 16) {
      Store(s.queries + t * task.group * head_dim + i, Mul(Load(query + i), scale));
      Store(s.sums + t * task.group * head_dim + i, Zero());
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    s.largest[r] = -__builtin_inff();
    s.total[r] = 0;
  }
  const int32_t past = task.first_position + task.tokens;
  const int32_t oldest =
      task.first_position < task.window ? 0 : task.first_position - task.window + 1;
  for (int32_t base = oldest / kKeyTile * kKeyTile; base < past; base += kKeyTile) {
    LoadTile(task, base, oldest > base ? oldest : base,
             static_cast<int32_t>(Smaller(past, base + kKeyTile)), s);
    AttendTile(task, base, s);
  }
  for (int64_t t = 0; t < task.tokens; ++t) {
    for (int64_t h = 0; h < task.group; ++h) {
      const int64_t row = t * task.group + h;
      const F32x16 inverse = Broadcast(1.0f / s.total[row]);
      float* out = task.output + t * task.output_stride + h * head_dim;
      for (int64_t d = 0; d < head_dim; d += 16) {
        Store(out + d, Mul(Load(s.sums + row * head_dim + d), inverse));
      }
    }
  }
}

}  // namespace palimpsest::PALIMPSEST_ISA
