#include "worker/compute/cuda/decode_plan.h"

#include <algorithm>

namespace palimpsest::cuda {
namespace {

constexpr int32_t kMinChunkTokens = 32;
// Thread blocks of the decode kernel that a multiprocessor holds at once.
constexpr int32_t kBlocksPerMultiprocessor = 4;

int64_t Tiles(absl::Span<const int32_t> lengths, int64_t chunk_tokens) {
  int64_t tiles = 0;
  for (const int32_t length : lengths) tiles += (length + chunk_tokens - 1) / chunk_tokens;
  return tiles;
}

}  // namespace

int32_t MaxDecodeTiles(int32_t sequences, int32_t kv_heads, int32_t multiprocessors) {
  return sequences + (multiprocessors * kBlocksPerMultiprocessor + kv_heads - 1) / kv_heads;
}

int32_t DecodeChunkTokens(absl::Span<const int32_t> lengths, int32_t max_tiles) {
  int32_t low = kMinChunkTokens;
  int32_t high = kMinChunkTokens;
  for (const int32_t length : lengths) high = std::max(high, length);
  while (low < high) {
    const int32_t middle = low + (high - low) / 2;
    if (Tiles(lengths, middle) <= max_tiles) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

bool FillDecodeTiles(absl::Span<const int32_t> lengths, int32_t chunk_tokens, DecodeTiles tiles) {
  size_t tile = 0;
  tiles.first_tile[0] = 0;
  for (size_t i = 0; i < lengths.size(); ++i) {
    const int32_t chunks = (lengths[i] + chunk_tokens - 1) / chunk_tokens;
    for (int32_t chunk = 0; chunk < chunks; ++chunk, ++tile) {
      tiles.tile_sequence[tile] = static_cast<int32_t>(i);
      tiles.tile_chunk[tile] = chunk;
      tiles.valid[tile] = true;
    }
    tiles.first_tile[i + 1] = static_cast<int32_t>(tile);
  }
  const bool split = tile > lengths.size();
  for (; tile < tiles.valid.size(); ++tile) {
    tiles.tile_sequence[tile] = 0;
    tiles.tile_chunk[tile] = 0;
    tiles.valid[tile] = false;
  }
  return split;
}

}  // namespace palimpsest::cuda
