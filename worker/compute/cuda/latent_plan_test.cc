// A plan is read as the kernels read it (FlashInfer's mla.cuh): every row must meet each of its
// tokens once.
#include "worker/compute/cuda/latent_plan.h"

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace palimpsest::cuda {
namespace {

constexpr int32_t kTileTokens = 64;

class LatentPlanTest : public ::testing::Test {
 protected:
  // The plan in memory of exactly its size: AddressSanitizer sees what is written behind it.
  void Plan(const LatentMachine& machine, const std::vector<LatentSequence>& sequences) {
    machine_ = machine;
    sequences_ = sequences;
    int32_t rows = 0;
    for (const LatentSequence& sequence : sequences) rows += sequence.rows;
    const auto count = static_cast<int32_t>(sequences.size());
    grid_ = LatentGridFor(machine, rows, count);
    pieces_ = LatentPieces(machine, rows, count);
    EXPECT_LE(pieces_, MaxLatentPieces(machine, rows + 3, count + 2));
    layout_ = LatentPlanLayout::For(pieces_, machine.multiprocessors);
    plan_.assign(layout_.bytes / 4, 0x7f7f7f7f);
    LatentPlanner(machine).Fill(sequences, grid_, layout_,
                                reinterpret_cast<std::byte*>(plan_.data()));
  }

  int32_t At(size_t array, int32_t i) const { return plan_[array / 4 + static_cast<size_t>(i)]; }

  // Number of a packed row and head, token -> how often they met. Checks what the kernels rely on.
  void Check() {
    EXPECT_LE(grid_.teams * grid_.team_blocks, machine_.multiprocessors);
    std::map<int32_t, std::set<std::pair<int32_t, int32_t>>> ranges;  // of tokens, by number
    std::map<int32_t, std::vector<int32_t>> partials;                 // rows, by number
    std::set<int32_t> whole, partial_rows;
    ASSERT_EQ(At(layout_.team_pieces, 0), 0);
    const int32_t used = At(layout_.team_pieces, grid_.teams);
    ASSERT_LE(used, pieces_);
    for (int32_t i = 0; i < used; ++i) {
      const int32_t rows = At(layout_.rows, i), tokens = At(layout_.tokens, i);
      const int32_t begin = At(layout_.begin, i), end = At(layout_.end, i);
      const int32_t tile = At(layout_.tile, i), partial = At(layout_.partial, i);
      EXPECT_EQ(begin % kTileTokens, 0);
      EXPECT_LT(begin, end);
      // Loads beyond the sequence's blocks read nothing, so the last tile of tokens may be cut.
      EXPECT_LE(end, tokens);
      const int32_t first = At(layout_.first_row, i) * machine_.heads;
      const int32_t size = std::min(grid_.tile(), rows * machine_.heads - tile);
      ASSERT_GT(size, 0);
      for (int32_t n = 0; n < size; ++n) {
        const int32_t number = first + tile + n;
        const int32_t seen = tokens - rows + (tile + n) / machine_.heads + 1;
        if (begin < seen) {
          EXPECT_TRUE(ranges[number].emplace(begin, std::min(end, seen)).second);
        }
        if (partial < 0) {
          EXPECT_TRUE(whole.insert(number).second);
        } else {
          EXPECT_TRUE(partial_rows.insert(partial + n).second);
          EXPECT_LT(partial + n, LatentPartialRows(machine_.multiprocessors));
          partials[number].push_back(partial + n);
        }
      }
    }
    CheckCover(ranges);
    CheckMerges(whole, partials);
  }

  void CheckCover(const std::map<int32_t, std::set<std::pair<int32_t, int32_t>>>& ranges) const {
    size_t numbers = 0;
    for (const LatentSequence& sequence : sequences_) {
      for (int32_t n = 0; n < sequence.rows * machine_.heads; ++n, ++numbers) {
        int32_t next = 0;
        const auto found = ranges.find(sequence.first_row * machine_.heads + n);
        ASSERT_NE(found, ranges.end());
        for (const auto& [begin, end] : found->second) {
          EXPECT_EQ(begin, next);
          next = end;
        }
        EXPECT_EQ(next, sequence.tokens - sequence.rows + n / machine_.heads + 1);
      }
    }
    EXPECT_EQ(numbers, ranges.size());
  }

  void CheckMerges(const std::set<int32_t>& whole,
                   std::map<int32_t, std::vector<int32_t>> partials) const {
    std::map<int32_t, std::vector<int32_t>> merged;
    for (int32_t b = 0; b < machine_.multiprocessors; ++b) {
      const int32_t first = At(layout_.merge_begin, b);
      for (int32_t i = 0; first + i < At(layout_.merge_end, b); ++i) {
        std::vector<int32_t>& from = merged[first + i];
        EXPECT_TRUE(from.empty());
        EXPECT_FALSE(whole.contains(first + i));
        for (int32_t row = At(layout_.merge_partial_begin, b) + i;
             row < At(layout_.merge_partial_end, b); row += At(layout_.merge_stride, b)) {
          from.push_back(row);
        }
      }
    }
    for (auto& partial : partials) std::sort(partial.second.begin(), partial.second.end());
    EXPECT_EQ(merged, partials);
  }

  LatentMachine machine_;
  std::vector<LatentSequence> sequences_;
  LatentGrid grid_;
  int32_t pieces_ = 0;
  LatentPlanLayout layout_;
  std::vector<int32_t> plan_;
};

TEST_F(LatentPlanTest, HeadsArePowersOfTwoUpToTwoBlocks) {
  for (const int32_t heads : {1, 2, 16, 64, 128}) EXPECT_TRUE(TakesLatentHeads(heads)) << heads;
  for (const int32_t heads : {0, -1, 3, 40, 96, 256})
    EXPECT_FALSE(TakesLatentHeads(heads)) << heads;
}

TEST_F(LatentPlanTest, ShortDecodesAreOnePieceEach) {
  Plan({16, 132}, {{0, 1, 0, 60}, {1, 1, 4, 17}});
  EXPECT_EQ(grid_, (LatentGrid{1, 132}));
  EXPECT_EQ(At(layout_.team_pieces, 132), 2);
  EXPECT_EQ(At(layout_.partial, 0), -1);
  EXPECT_EQ(At(layout_.first_block, 1), 4);
  Check();
}

TEST_F(LatentPlanTest, LongSequenceKeepsManyTeamsBusy) {
  Plan({16, 132}, {{0, 1, 0, 8192}});
  EXPECT_EQ(At(layout_.team_pieces, 132), 43);
  Check();
}

// A tail of one token would cost as much as 64.
TEST_F(LatentPlanTest, EqualSequencesThatFillTheTeamsAreWhole) {
  std::vector<LatentSequence> sequences;
  for (int32_t s = 0; s < 128; ++s) sequences.push_back({s, 1, s * 17, 257});
  Plan({16, 132}, sequences);
  EXPECT_EQ(At(layout_.team_pieces, 132), 128);
  Check();
  sequences.resize(32);
  Plan({16, 132}, sequences);
  EXPECT_EQ(At(layout_.team_pieces, 132), 96);
  Check();
}

TEST_F(LatentPlanTest, ManyHeadsTakeTwoBlocks) {
  Plan({128, 132}, {{0, 1, 0, 5000}, {1, 1, 400, 3}});
  EXPECT_EQ(grid_, (LatentGrid{2, 66}));
  Check();
}

// Decode graphs are launched for the number of rows they were captured with.
TEST_F(LatentPlanTest, GridAndLayoutOfDecodesDependOnTheNumberOfRowsAlone) {
  for (const int32_t heads : {16, 64, 128}) {
    const LatentMachine machine = {heads, 132};
    EXPECT_EQ(LatentGridFor(machine, 5, 5), LatentGridFor(machine, 48, 48));
  }
}

TEST_F(LatentPlanTest, NoSequences) {
  Plan({16, 132}, {});
  EXPECT_EQ(At(layout_.team_pieces, 132), 0);
  Check();
}

TEST_F(LatentPlanTest, EveryRowMeetsItsTokensOnceInAnyStep) {
  std::mt19937 random(7);
  for (int round = 0; round < 300; ++round) {
    const LatentMachine machine = {1 << random() % 8, static_cast<int32_t>(1 + random() % 40)};
    std::vector<LatentSequence> sequences;
    int32_t row = 0, block = 0;
    for (uint32_t s = 0; s <= random() % 12; ++s) {
      LatentSequence sequence;
      sequence.first_row = row;
      sequence.rows = static_cast<int32_t>(random() % 2 == 0 ? 1 : 1 + random() % 90);
      sequence.first_block = block;
      sequence.tokens = sequence.rows + static_cast<int32_t>(random() % (1 << random() % 12));
      row += sequence.rows;
      block += sequence.tokens;
      sequences.push_back(sequence);
    }
    if (LatentGridFor(machine, row, static_cast<int32_t>(sequences.size())).teams == 0) continue;
    Plan(machine, sequences);
    Check();
    ASSERT_FALSE(HasFailure()) << "round " << round << ", " << machine.heads << " heads, "
                               << machine.multiprocessors << " multiprocessors";
  }
}

}  // namespace
}  // namespace palimpsest::cuda
