// The arithmetic of the CPU runner, built once per instruction set and chosen at run time.
//
// Every function computes each output element by one fixed sequence of operations: which rows,
// tokens or keys are computed in the same call, and by which thread, never changes a bit. All
// builds give the same bits too. Memory a call writes is disjoint from what other calls write as
// long as their unit, row or head ranges are. Nothing here allocates, blocks or fails.
#ifndef PALIMPSEST_WORKER_COMPUTE_CPU_KERNELS_H_
#define PALIMPSEST_WORKER_COMPUTE_CPU_KERNELS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/ids.h"
#include "worker/core/far_keys.h"

namespace palimpsest {

enum class Nonlinearity { kNone, kRelu, kSilu, kGeluTanh };

// A packed weight matrix (packing.h) applied to some rows of input.
struct Projection {
  const std::byte* weights = nullptr;
  int64_t rows = 0;             // outputs of the matrix
  int64_t cols = 0;             // inputs
  const float* bias = nullptr;  // `rows` floats, or none
  const float* input = nullptr;
  int64_t input_stride = 0;  // floats between tokens
  int64_t tokens = 0;
  float* output = nullptr;
  int64_t output_stride = 0;
  Nonlinearity nonlinearity = Nonlinearity::kNone;  // project_gated: of the gate, never kNone
};

// Attention of consecutive query tokens of one sequence and some neighbouring heads over keys and
// values of bfloat16 or e4m3 in blocks of the KV region.
struct AttentionTask {
  // Rotated queries; kv_heads * group heads of head_dim floats per token, and the outputs of
  // value_dim.
  const float* query = nullptr;
  int64_t query_stride = 0;  // floats between tokens
  float* output = nullptr;
  int64_t output_stride = 0;
  int32_t kv_heads = 1;
  int32_t group = 1;      // query heads per KV head
  int32_t head_dim = 0;   // of queries and keys, a multiple of 16
  int32_t value_dim = 0;  // a multiple of 16, at most head_dim
  float scale = 1.0f;     // multiplies scores
  float softcap = 0.0f;   // c > 0: scores become c tanh(score / c)
  int32_t first_position = 0;
  int32_t tokens = 0;
  int32_t window = INT32_MAX;  // a token sees itself and the window - 1 before it
  // Lossy: the first key tile is seen too, and the window grows to begin with a tile. The tiles
  // between are not read.
  bool keep_first_tile = false;

  const std::byte* kv = nullptr;
  bool e4m3 = false;
  int64_t block_bytes = 0;
  int32_t block_tokens = 0;
  const BlockId* block_table = nullptr;
  // Within a block: this layer's key and value of the block's first token and the first of the KV
  // heads, and the distance to the next token's.
  int64_t key_offset = 0;
  int64_t value_offset = 0;
  int64_t token_bytes = 0;
};

// Keys are taken in tiles that start at multiples of this position.
inline constexpr int32_t kKeyTile = kFarKeyTile;

// First position that a token at `position` sees, leaving aside a first tile that is kept.
constexpr int32_t OldestKey(const AttentionTask& task, int32_t position) {
  const int32_t oldest = position < task.window ? 0 : position - task.window + 1;
  return task.keep_first_tile ? oldest / kKeyTile * kKeyTile : oldest;
}

// Largest head_dim of an attention call.
inline constexpr int32_t kMaxHeadDim = 768;

// Scratch of one attention call with tokens * group * kv_heads == rows, in floats.
constexpr int64_t AttentionScratchFloats(int64_t rows, int64_t head_dim) {
  return kKeyTile * head_dim * 2 + rows * (kKeyTile + 2 * head_dim + 16);
}

struct Kernels {
  const char* name;

  // Units of a projection are panels. Project: output = nonlinearity(W x + bias), kNone or kRelu.
  // ProjectAdd: output += W x + bias.
  void (*project)(const Projection&, int64_t first_unit, int64_t last_unit);
  void (*project_add)(const Projection&, int64_t first_unit, int64_t last_unit);
  // The matrix holds gate rows, then as many up rows, a multiple of 32 each; unit u is panel u of
  // either. output = nonlinearity(gate) * up.
  void (*project_gated)(const Projection&, int64_t first_unit, int64_t last_unit);

  // out = x / sqrt(mean(x^2) + epsilon) * (offset + weight); size is a multiple of 16. `out` may be
  // x.
  void (*rms_norm)(const float* x, const float* weight, int64_t size, float epsilon, float offset,
                   float* out);
  // out = (x - mean(x)) / sqrt(variance(x) + epsilon) * weight + bias; likewise.
  void (*layer_norm)(const float* x, const float* weight, const float* bias, int64_t size,
                     float epsilon, float* out);

  // Rotates a head of 2 * half floats: pairs (i, i + half), as Hugging Face's rotate_half does.
  void (*rotate)(float* head, const float* cosines, const float* sines, int64_t half);

  // Rounds to nearest, ties to even.
  void (*to_bf16)(const float* in, int64_t size, uint16_t* out);

  void (*attention)(const AttentionTask&, float* scratch);

  // x[i] = cap * tanh(x[i] / cap); size is a multiple of 16.
  void (*soft_cap)(float* x, int64_t size, float cap);

  // output[i] = e^x[i]; size is a multiple of 16.
  void (*exponential)(const float* x, int64_t size, float* out);

  // Of a task of one token (its output and values are not used): for each KV head which share of
  // the attention weights of its queries, on average, goes to far keys (far_keys.h).
  void (*far_shares)(const AttentionTask&, int32_t recent_tokens, float* scratch, float* shares);
};

// The builds this machine can run, fastest first; never empty.
const std::vector<const Kernels*>& SupportedKernels();

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_COMPUTE_CPU_KERNELS_H_
