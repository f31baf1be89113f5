#include "worker/compute/cuda/latent_plan.h"

#include <algorithm>
#include <functional>

namespace palimpsest::cuda {
namespace {

// Tokens that a block takes at once, a step: pieces begin at multiples.
constexpr int32_t kStepTokens = 64;
constexpr int32_t kMaxHeads = 2 * kLatentBlockRows;

int32_t CeilDiv(int64_t a, int64_t b) { return static_cast<int32_t>((a + b - 1) / b); }

// The shortest piece, in steps, of a sequence of `steps`: what shorter ones save is lost in merging
// more of them. Measured on one H200.
int32_t ShortestPiece(int32_t steps) {
  if (steps <= 12) return 1;
  if (steps <= 32) return 2;
  return steps <= 128 ? 3 : 4;
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
  // Each tile has one piece, and what tiles have more is no more than there are teams (Cut).
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

// Into equal pieces of about a team's share, which is rounded up. So of s shares a tile has fewer
// than s + 1 pieces, and is in one unless s is 1.5 or more.
void LatentPlanner::Cut(const LatentGrid& grid) {
  int64_t total = 0;
  for (const Tile& tile : tiles_) total += CeilDiv(tile.tokens, kStepTokens);
  const int32_t share = CeilDiv(total, grid.teams);
  for (Tile& tile : tiles_) {
    const int32_t steps = CeilDiv(tile.tokens, kStepTokens);
    const int32_t wanted = std::max(share, ShortestPiece(steps));
    const int32_t pieces = std::max(1, (2 * steps + wanted) / (2 * wanted));
    const int32_t piece_steps = CeilDiv(steps, pieces);
    tile.piece_tokens = piece_steps * kStepTokens;
    tile.pieces = CeilDiv(steps, piece_steps);
    tile.merge_blocks = steps / wanted * grid.team_blocks;
  }
}

// Each piece goes to the team that has the least to do.
void LatentPlanner::Deal(const Tile& tile, const LatentGrid& grid) {
  const bool cut = tile.pieces > 1;
  for (int32_t begin = 0; begin < tile.tokens; begin += tile.piece_tokens) {
    const int32_t end = std::min(begin + tile.piece_tokens, tile.tokens);
    std::pop_heap(loads_.begin(), loads_.end(), std::greater<>());
    auto& [cost, team] = loads_.back();
    pieces_.push_back({team, begin, end, cut ? partial_rows_ : -1, tile.sequence, tile.first});
    // To begin a piece takes as long as so many tokens.
    cost += end - begin + 2 * grid.tile();
    std::push_heap(loads_.begin(), loads_.end(), std::greater<>());
    if (cut) partial_rows_ += tile.size;
  }
}

void LatentPlanner::WriteMerges(const LatentPlanLayout& layout, std::byte* plan) const {
  int32_t block = 0, partial = 0;
  for (const Tile& tile : tiles_) {
    if (tile.pieces == 1) continue;
    const int32_t chunk = CeilDiv(tile.size, tile.merge_blocks);
    const int32_t end = partial + tile.pieces * tile.size;
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
  Cut(grid);
  pieces_.clear();
  partial_rows_ = 0;
  loads_.clear();
  for (int32_t team = 0; team < grid.teams; ++team) loads_.emplace_back(0, team);
  for (const Tile& tile : tiles_) Deal(tile, grid);
  WriteMerges(layout, plan);
  WritePieces(grid, layout, plan);
}

}  // namespace palimpsest::cuda
