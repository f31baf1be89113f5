#include "worker/compute/cuda/latent_plan.h"

#include <algorithm>
#include <functional>

namespace palimpsest::cuda {
namespace {

// Tokens that a block takes at once: pieces begin at multiples.
constexpr int32_t kBlockTokens = 64;
constexpr int32_t kMaxHeads = 2 * kLatentBlockRows;

int32_t CeilDiv(int64_t a, int64_t b) { return static_cast<int32_t>((a + b - 1) / b); }

// Tokens of a piece, not fewer than each team's share: the shorter the pieces the more there is to
// merge.
int32_t PieceTokens(int32_t share) {
  if (share <= 16) return kBlockTokens;
  if (share <= 32) return 2 * kBlockTokens;
  if (share <= 64) return 3 * kBlockTokens;
  return CeilDiv(share, 4 * kBlockTokens) * 4 * kBlockTokens;
}

int32_t* At(std::byte* plan, size_t offset) { return reinterpret_cast<int32_t*>(plan + offset); }

}  // namespace

bool TakesLatentHeads(int32_t heads) {
  return heads > 0 && heads <= kMaxHeads && (heads & (heads - 1)) == 0;
}

LatentGrid LatentGridFor(const LatentMachine& machine, int32_t rows, int32_t sequences) {
  LatentGrid grid;
  if (int64_t{rows} * machine.heads > int64_t{kLatentBlockRows} * sequences) grid.team_blocks = 2;
  grid.teams = machine.multiprocessors / grid.team_blocks;
  return grid;
}

int32_t LatentPieces(const LatentMachine& machine, int32_t rows, int32_t sequences) {
  const LatentGrid grid = LatentGridFor(machine, rows, sequences);
  // Pieces that are not a tile's last are full, of which there are as many as teams.
  return CeilDiv(int64_t{rows} * machine.heads, grid.tile()) + sequences + grid.teams;
}

int32_t MaxLatentPieces(const LatentMachine& machine, int32_t max_rows, int32_t max_sequences) {
  // Teams of one block have at most kLatentBlockRows numbers a sequence.
  return CeilDiv(int64_t{max_rows} * machine.heads, kMaxHeads) + 2 * max_sequences +
         machine.multiprocessors;
}

LatentPlanLayout LatentPlanLayout::For(int32_t pieces, int32_t multiprocessors) {
  LatentPlanLayout layout;
  const auto place = [&layout](size_t& offset, int32_t count) {
    offset = layout.bytes;
    layout.bytes += (static_cast<size_t>(count) * 4 + 15) / 16 * 16;
  };
  for (size_t* array : {&layout.first_row, &layout.first_block, &layout.rows, &layout.tokens,
                        &layout.tile, &layout.begin, &layout.end, &layout.partial}) {
    place(*array, pieces);
  }
  place(layout.team_pieces, multiprocessors + 1);
  for (size_t* array : {&layout.merge_begin, &layout.merge_end, &layout.merge_partial_begin,
                        &layout.merge_partial_end, &layout.merge_stride}) {
    place(*array, multiprocessors);
  }
  return layout;
}

// The last tile of a sequence sees the most, so it comes first.
void LatentPlanner::ListTiles(absl::Span<const LatentSequence> sequences, const LatentGrid& grid) {
  tiles_.clear();
  for (const LatentSequence& sequence : sequences) {
    const int32_t numbers = sequence.rows * machine_.heads;
    const int32_t before = sequence.tokens - sequence.rows;
    for (int32_t i = CeilDiv(numbers, grid.tile()) - 1; i >= 0; --i) {
      Tile tile;
      tile.sequence = &sequence;
      tile.first = i * grid.tile();
      tile.size = std::min(grid.tile(), numbers - tile.first);
      tile.tokens = before + CeilDiv(tile.first + tile.size, machine_.heads);
      tiles_.push_back(tile);
    }
  }
}

// Each piece goes to the team that has the least to do.
void LatentPlanner::Deal(const Tile& tile, const LatentGrid& grid, int32_t limit) {
  const bool cut = tile.tokens > limit;
  for (int32_t begin = 0; begin < tile.tokens; begin += limit) {
    const int32_t end = std::min(begin + limit, tile.tokens);
    std::pop_heap(loads_.begin(), loads_.end(), std::greater<>());
    auto& [cost, team] = loads_.back();
    pieces_.push_back({team, begin, end, cut ? partial_rows_ : -1, tile.sequence, tile.first});
    // To begin a piece takes as long as so many tokens.
    cost += end - begin + 2 * grid.tile();
    std::push_heap(loads_.begin(), loads_.end(), std::greater<>());
    if (cut) partial_rows_ += tile.size;
  }
}

void LatentPlanner::WriteMerges(const LatentGrid& grid, int32_t limit,
                                const LatentPlanLayout& layout, std::byte* plan) const {
  int32_t block = 0, partial = 0;
  for (const Tile& tile : tiles_) {
    if (tile.tokens <= limit) continue;
    // Over all tiles these are no more than there are blocks, as limit * teams is not below the sum
    // of tokens.
    const int32_t chunks = std::max(1, tile.tokens / limit * grid.team_blocks);
    const int32_t chunk = CeilDiv(tile.size, chunks);
    const int32_t end = partial + CeilDiv(tile.tokens, limit) * tile.size;
    const int32_t first = tile.sequence->first_row * machine_.heads + tile.first;
    for (int32_t at = 0; at < tile.size; at += chunk, ++block) {
      At(plan, layout.merge_begin)[block] = first + at;
      At(plan, layout.merge_end)[block] = first + std::min(at + chunk, tile.size);
      At(plan, layout.merge_partial_begin)[block] = partial + at;
      At(plan, layout.merge_partial_end)[block] = end;
      At(plan, layout.merge_stride)[block] = tile.size;
    }
    partial = end;
  }
  for (const size_t array : {layout.merge_begin, layout.merge_end, layout.merge_partial_begin,
                             layout.merge_partial_end, layout.merge_stride}) {
    std::fill(At(plan, array) + block, At(plan, array) + machine_.multiprocessors, 0);
  }
}

void LatentPlanner::WritePieces(const LatentGrid& grid, const LatentPlanLayout& layout,
                                std::byte* plan) {
  int32_t* const team_pieces = At(plan, layout.team_pieces);
  std::fill(team_pieces, team_pieces + machine_.multiprocessors + 1, 0);
  for (const Piece& piece : pieces_) ++team_pieces[piece.team + 1];
  for (int32_t t = 0; t < machine_.multiprocessors; ++t) team_pieces[t + 1] += team_pieces[t];
  next_.assign(team_pieces, team_pieces + grid.teams);
  for (const Piece& piece : pieces_) {
    const int32_t to = next_[static_cast<size_t>(piece.team)]++;
    At(plan, layout.first_row)[to] = piece.sequence->first_row;
    At(plan, layout.first_block)[to] = piece.sequence->first_block;
    At(plan, layout.rows)[to] = piece.sequence->rows;
    At(plan, layout.tokens)[to] = piece.sequence->tokens;
    At(plan, layout.tile)[to] = piece.tile;
    At(plan, layout.begin)[to] = piece.begin;
    At(plan, layout.end)[to] = piece.end;
    At(plan, layout.partial)[to] = piece.partial;
  }
}

void LatentPlanner::Fill(absl::Span<const LatentSequence> sequences, const LatentGrid& grid,
                         const LatentPlanLayout& layout, std::byte* plan) {
  ListTiles(sequences, grid);
  int64_t tokens = 0;
  for (const Tile& tile : tiles_) tokens += tile.tokens;
  const int32_t limit = PieceTokens(CeilDiv(tokens, grid.teams));
  pieces_.clear();
  partial_rows_ = 0;
  loads_.clear();
  for (int32_t team = 0; team < grid.teams; ++team) loads_.emplace_back(0, team);
  for (const Tile& tile : tiles_) Deal(tile, grid, limit);
  WriteMerges(grid, limit, layout, plan);
  WritePieces(grid, layout, plan);
}

}  // namespace palimpsest::cuda
