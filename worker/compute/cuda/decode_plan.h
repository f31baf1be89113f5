// Cuts the attention of a decode step into tiles, so that few long sequences keep all of a GPU
// busy. Pure.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_DECODE_PLAN_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_DECODE_PLAN_H_

#include <cstdint>

#include "absl/types/span.h"

namespace palimpsest::cuda {

// Tiles per KV head that a step of `sequences` sequences may use: each sequence has at least one,
// and there are enough more to fill `multiprocessors` several times over.
int32_t MaxDecodeTiles(int32_t sequences, int32_t kv_heads, int32_t multiprocessors);

// The number of tokens of a tile: the smallest with which all sequences of these lengths (each at
// least 1) fit into `max_tiles` >= lengths.size() tiles. Not below 32 tokens, where merging partial
// results would cost more than it saves.
int32_t DecodeChunkTokens(absl::Span<const int32_t> lengths, int32_t max_tiles);

// Tile t works on tokens tile_chunk[t] * chunk .. of sequence tile_sequence[t]; those of sequence i
// are first_tile[i] .. first_tile[i + 1] - 1.
struct DecodeTiles {
  absl::Span<int32_t> tile_sequence;  // [max_tiles]
  absl::Span<int32_t> tile_chunk;     // [max_tiles]
  absl::Span<bool> valid;             // [max_tiles]
  absl::Span<int32_t> first_tile;     // [sequences + 1]
};

// Fills `tiles`; what remains of max_tiles is not valid. Returns whether any sequence has more than
// one tile.
bool FillDecodeTiles(absl::Span<const int32_t> lengths, int32_t chunk_tokens, DecodeTiles tiles);

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_DECODE_PLAN_H_
