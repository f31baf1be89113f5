// Cuts a step's attention over cached latents into the pieces that FlashInfer's MLA kernels work
// on. Pure.
//
// Rows and heads are packed: head h of row r is number r * heads + h. A tile is consecutive numbers
// of one sequence, as many as a team of one or two thread blocks takes at once. The grid has a
// block for each multiprocessor. A team takes its pieces one after another, each of them a tile and
// some of the tokens before it; when all teams are done, blocks merge what the pieces of one tile
// found.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_LATENT_PLAN_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_LATENT_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/types/span.h"

namespace palimpsest::cuda {

// Numbers that one thread block takes at once.
inline constexpr int32_t kLatentBlockRows = 64;

// The kernels' causal mask needs tiles of whole rows: a power of two.
bool TakesLatentHeads(int32_t heads);

struct LatentGrid {
  int32_t team_blocks = 1;
  int32_t teams = 0;

  int32_t tile() const { return team_blocks * kLatentBlockRows; }

  friend bool operator==(const LatentGrid&, const LatentGrid&) = default;
};

struct LatentMachine {
  int32_t heads = 0;
  int32_t multiprocessors = 0;
};

// For `rows` query rows of `sequences` sequences.
LatentGrid LatentGridFor(const LatentMachine& machine, int32_t rows, int32_t sequences);

// Pieces that a plan with this grid may have, and that any plan of up to so many rows and sequences
// may have.
int32_t LatentPieces(const LatentMachine& machine, int32_t rows, int32_t sequences);
int32_t MaxLatentPieces(const LatentMachine& machine, int32_t max_rows, int32_t max_sequences);

// Rows of partial results that a plan may need, each of one head.
constexpr int64_t LatentPartialRows(int32_t multiprocessors) {
  return int64_t{2} * multiprocessors * kLatentBlockRows;
}

// Byte offsets of a plan's int32 arrays, each aligned to 16.
struct LatentPlanLayout {
  // [pieces], of the piece's sequence: first row, first of its block ids, rows, tokens.
  size_t first_row = 0, first_block = 0, rows = 0, tokens = 0;
  // [pieces]: first number of the tile in the sequence, range of tokens, and where the partial
  // results go, -1 if the tile is in one piece.
  size_t tile = 0, begin = 0, end = 0, partial = 0;
  // [multiprocessors + 1]: team t has the pieces team_pieces[t] .. team_pieces[t + 1] - 1.
  size_t team_pieces = 0;
  // [multiprocessors]: block b merges the numbers merge_begin[b] .. merge_end[b] - 1. The partial
  // results of the first are the rows merge_partial_begin, + merge_stride, + 2 merge_stride ... up
  // to merge_partial_end.
  size_t merge_begin = 0, merge_end = 0, merge_partial_begin = 0, merge_partial_end = 0,
         merge_stride = 0;
  size_t bytes = 0;

  static LatentPlanLayout For(int32_t pieces, int32_t multiprocessors);
};

// Rows first_row .. first_row + rows - 1 of the step are the last of `tokens` tokens, and lie in
// the blocks from index `first_block` of the step's block ids. A row sees the tokens up to itself.
struct LatentSequence {
  int32_t first_row = 0;
  int32_t rows = 0;
  int32_t first_block = 0;
  int32_t tokens = 0;
};

class LatentPlanner {
 public:
  explicit LatentPlanner(const LatentMachine& machine) : machine_(machine) {}

  // Writes a plan of the layout For(LatentPieces(...), multiprocessors) for at most as many rows
  // and sequences as `grid` and layout were made for.
  void Fill(absl::Span<const LatentSequence> sequences, const LatentGrid& grid,
            const LatentPlanLayout& layout, std::byte* plan);

 private:
  struct Tile {
    const LatentSequence* sequence;
    int32_t first;   // number in the sequence
    int32_t size;    // numbers
    int32_t tokens;  // that its last row sees
    // Set by Cut. Over all tiles there are no more merge_blocks than blocks.
    int32_t pieces = 1, piece_tokens = 0, merge_blocks = 0;
  };
  struct Piece {
    int32_t team, begin, end, partial;
    const LatentSequence* sequence;
    int32_t tile;
  };

  void ListTiles(absl::Span<const LatentSequence> sequences, const LatentGrid& grid);
  void Cut(const LatentGrid& grid);
  void Deal(const Tile& tile, const LatentGrid& grid);
  void WriteMerges(const LatentPlanLayout& layout, std::byte* plan) const;
  void WritePieces(const LatentGrid& grid, const LatentPlanLayout& layout, std::byte* plan);

  const LatentMachine machine_;
  std::vector<Tile> tiles_;
  std::vector<Piece> pieces_;
  std::vector<std::pair<int64_t, int32_t>> loads_;  // cost and team, a heap with the least on top
  int32_t partial_rows_ = 0;
  std::vector<int32_t> next_;
};

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_LATENT_PLAN_H_
