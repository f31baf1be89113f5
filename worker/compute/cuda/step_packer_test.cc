#include "worker/compute/cuda/step_packer.h"

#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace palimpsest::cuda {
namespace {

using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;

constexpr int32_t kBlockElements = 4096;
constexpr int32_t kTokenElements = 32;
constexpr int32_t kNull = 77;

PackerOptions Options() {
  PackerOptions options;
  options.vocab_size = 100;
  options.max_position = 200;
  options.block_tokens = 16;
  options.block_elements = kBlockElements;
  options.token_elements = kTokenElements;
  options.kv_heads = 2;
  options.null_block = kNull;
  options.multiprocessors = 4;
  options.max_rows = 64;
  options.max_sequences = 8;
  options.max_ints = 400;
  return options;
}

std::vector<BlockId> Blocks(uint32_t first, int count) {
  std::vector<BlockId> blocks;
  for (int i = 0; i < count; ++i) blocks.push_back(BlockId(first + static_cast<uint32_t>(i)));
  return blocks;
}

class StepPackerTest : public ::testing::Test {
 protected:
  void Start(const PackerOptions& options) {
    options_ = options;
    packer_ = std::make_unique<StepPacker>(options);
    // Exactly as much as promised: AddressSanitizer sees what is written behind it.
    buffer_ = std::vector<uint64_t>(MaxStagingBytes(options) / 8 + 1);
  }
  void SetUp() override { Start(Options()); }

  const PackedStep& Pack(const StepPlan& plan, const std::vector<int32_t>& previous = {},
                         int32_t graph_rows = 0) {
    const absl::Status status = packer_->Validate(plan, previous);
    EXPECT_TRUE(status.ok()) << status;
    packer_->Pack(plan, previous, graph_rows, reinterpret_cast<std::byte*>(buffer_.data()), step_);
    EXPECT_LE(step_.bytes, MaxStagingBytes(options_));
    return step_;
  }

  template <typename T>
  std::vector<T> Read(size_t offset, int32_t count) const {
    const auto* from =
        reinterpret_cast<const T*>(reinterpret_cast<const std::byte*>(buffer_.data()) + offset);
    return std::vector<T>(from, from + count);
  }
  std::vector<int32_t> Ints(int32_t begin, int32_t count) const {
    return Read<int32_t>(step_.layout.ints + static_cast<size_t>(begin) * 4, count);
  }

  std::string Refusal(const SequenceChunk& chunk, const std::vector<int32_t>& previous = {}) {
    StepPlan plan;
    plan.chunks.push_back(chunk);
    return std::string(packer_->Validate(plan, previous).message());
  }

  PackerOptions options_;
  std::unique_ptr<StepPacker> packer_;
  std::vector<uint64_t> buffer_;
  PackedStep step_;
};

TEST_F(StepPackerTest, DecodesComeFirstAndSlotsFollowThePlan) {
  const std::vector<TokenId> prompt = {1, 2, 3}, one = {4};
  const std::vector<BlockId> a = Blocks(10, 2), b = Blocks(20, 3);
  SamplingRequest request;
  request.params.seed = 9;
  StepPlan plan;
  plan.chunks.push_back({prompt, 15, a, &request});
  plan.chunks.push_back({one, 40, b, &request});
  plan.chunks.push_back({prompt, 0, a, nullptr});
  const PackedStep& step = Pack(plan);
  EXPECT_EQ(step.counts.rows, 7);
  EXPECT_EQ(step.counts.decodes, 1);
  EXPECT_EQ(step.counts.prefills, 2);
  EXPECT_EQ(step.counts.samples, 2);
  EXPECT_THAT(Read<int32_t>(step.layout.tokens, 7), ElementsAre(4, 1, 2, 3, 1, 2, 3));
  EXPECT_THAT(Read<int32_t>(step.layout.positions, 7), ElementsAre(40, 15, 16, 17, 0, 1, 2));
  const auto slot = [](int64_t block, int64_t token) {
    return block * kBlockElements + token * kTokenElements;
  };
  EXPECT_THAT(Read<int64_t>(step.layout.kv_slots, 7),
              ElementsAre(slot(22, 8), slot(10, 15), slot(11, 0), slot(11, 1), slot(10, 0),
                          slot(10, 1), slot(10, 2)));
  EXPECT_THAT(Read<int32_t>(step.layout.decode_blocks, 2), ElementsAre(0, 3));
  EXPECT_THAT(Read<int32_t>(step.layout.decode_last, 1), ElementsAre(9));
  EXPECT_THAT(Read<int32_t>(step.layout.prefill_rows, 3), ElementsAre(0, 3, 6));
  EXPECT_THAT(Read<int32_t>(step.layout.prefill_blocks, 3), ElementsAre(3, 5, 6));
  EXPECT_THAT(Read<int32_t>(step.layout.prefill_last, 2), ElementsAre(2, 3));
  EXPECT_THAT(step.prefill_tokens, ElementsAre(18, 3));
  EXPECT_THAT(Ints(0, 6), ElementsAre(20, 21, 22, 10, 11, 10));
  EXPECT_THAT(step.slots, ElementsAre(0, 1, -1));
  EXPECT_THAT(Read<int32_t>(step.layout.sample_rows, 2), ElementsAre(3, 0));
  EXPECT_EQ(Read<SamplingRow>(step.layout.sampling, 1)[0].seed, 9);
}

TEST_F(StepPackerTest, GraphStepsArePaddedWithTheNullBlock) {
  const std::vector<TokenId> one = {4};
  const std::vector<BlockId> a = Blocks(10, 3);
  SamplingRequest request;
  StepPlan plan;
  plan.chunks.push_back({one, 40, a, nullptr});
  plan.chunks.push_back({one, 20, a, &request});
  ASSERT_TRUE(packer_->IsDecode(plan));
  const PackedStep& step = Pack(plan, {}, 4);
  EXPECT_EQ(step.counts.rows, 4);
  EXPECT_EQ(step.counts.samples, 4);
  EXPECT_THAT(step.slots, ElementsAre(-1, 1));
  EXPECT_THAT(Read<int32_t>(step.layout.decode_blocks, 5), ElementsAre(0, 3, 5, 6, 7));
  EXPECT_THAT(Read<int32_t>(step.layout.decode_last, 4), ElementsAre(9, 5, 1, 1));
  EXPECT_THAT(Ints(5, 2), ElementsAre(kNull, kNull));
  EXPECT_THAT(Read<int64_t>(step.layout.kv_slots, 4)[3], int64_t{kNull} * kBlockElements);
  EXPECT_THAT(Read<int32_t>(step.layout.sample_rows, 4), ElementsAre(0, 1, 2, 3));
  for (const int padding : {0, 2, 3}) {
    EXPECT_EQ(Read<SamplingRow>(step.layout.sampling, 4)[padding].temperature, 0);
  }
  // The layout depends on the padded size alone.
  const size_t ints = step.layout.ints;
  const StepCounts counts = step.counts;
  plan.chunks.push_back({one, 3, a, &request});
  EXPECT_EQ(Pack(plan, {}, 4).layout.ints, ints);
  EXPECT_EQ(step_.counts, counts);
}

TEST_F(StepPackerTest, ATokenInFlightIsNamedByItsSlot) {
  const std::vector<TokenId> unknown = {0};
  const std::vector<BlockId> a = Blocks(10, 3);
  SamplingRequest request;
  request.params.repetition_penalty = 2;
  const std::vector<TokenId> history = {5, 6, 7};
  request.history = history;
  StepPlan plan;
  plan.chunks.push_back({unknown, 40, a, &request, 1});
  const PackedStep& step = Pack(plan, {-1, 3});
  EXPECT_THAT(Read<int32_t>(step.layout.tokens, 1), ElementsAre(-4));
  const SamplingRow row = Read<SamplingRow>(step.layout.sampling, 1)[0];
  EXPECT_EQ(row.input_row, 0);
  EXPECT_THAT(Ints(row.history_begin, row.history_count), ElementsAreArray(history));
  EXPECT_THAT(Refusal(plan.chunks[0], {-1, -1}), HasSubstr("continues chunk 1"));
  EXPECT_THAT(Refusal(plan.chunks[0]), HasSubstr("continues chunk 1"));
}

TEST_F(StepPackerTest, BlocksBehindTheWindowAreCut) {
  PackerOptions options = Options();
  options.window = options.windowless_tokens = 20;
  Start(options);
  const std::vector<TokenId> one = {4}, two = {4, 5};
  std::vector<BlockId> a = Blocks(10, 4);
  a[0] = a[1] = BlockId(0);
  StepPlan plan;
  plan.chunks.push_back({one, 55, a, nullptr});
  EXPECT_FALSE(packer_->IsDecode(plan));
  const PackedStep& step = Pack(plan);
  EXPECT_FALSE(step.window_free);
  EXPECT_THAT(Ints(0, 2), ElementsAre(12, 13));
  EXPECT_THAT(step.prefill_tokens, ElementsAre(56 - 32));
  EXPECT_THAT(Refusal({one, 50, a, nullptr}), HasSubstr("null block"));
  const std::vector<BlockId> b = Blocks(30, 2);
  StepPlan near;
  near.chunks.push_back({one, 19, b, nullptr});
  EXPECT_TRUE(packer_->IsDecode(near));
  near.chunks.push_back({two, 17, b, nullptr});
  EXPECT_TRUE(Pack(near).window_free);
}

TEST_F(StepPackerTest, TheMaskedKernelTakesDecodesPastAWindow) {
  PackerOptions options = Options();
  options.window = options.windowless_tokens = 20;
  options.masked = true;
  Start(options);
  const std::vector<TokenId> one = {4};
  const std::vector<BlockId> a = Blocks(10, 4);
  StepPlan plan;
  plan.chunks.push_back({one, 19, a, nullptr});
  EXPECT_NE(Pack(plan).kernel, DecodeKernel::kMasked);
  plan.chunks.push_back({one, 20, a, nullptr});
  ASSERT_TRUE(packer_->IsDecode(plan));
  const PackedStep& step = Pack(plan, {}, 4);
  EXPECT_EQ(step.kernel, DecodeKernel::kMasked);
  EXPECT_TRUE(step.window_free);
  EXPECT_THAT(Ints(0, 4), ElementsAre(10, 11, 10, 11));
}

TEST_F(StepPackerTest, WindowsOfSomeLayersKeepAllBlocks) {
  PackerOptions options = Options();
  options.windowless_tokens = 20;
  options.cuda_cores = options.tensor_cores = false;
  options.masked = true;
  Start(options);
  const std::vector<TokenId> one = {4}, two = {4, 5};
  const std::vector<BlockId> a = Blocks(10, 4);
  StepPlan plan;
  plan.chunks.push_back({one, 55, a, nullptr});
  plan.chunks.push_back({two, 18, a, nullptr});
  EXPECT_EQ(Pack(plan).kernel, DecodeKernel::kMasked);
  EXPECT_TRUE(step_.window_free);
  EXPECT_THAT(Ints(0, 4), ElementsAre(10, 11, 12, 13));
  plan.chunks.push_back({two, 19, a, nullptr});
  EXPECT_FALSE(Pack(plan).window_free);
}

TEST_F(StepPackerTest, LatentAttentionHasOnePlanForAllChunks) {
  PackerOptions options = Options();
  options.latent_heads = 16;
  options.tensor_cores = false;
  Start(options);
  const std::vector<TokenId> prompt = {1, 2, 3}, one = {4};
  const std::vector<BlockId> a = Blocks(10, 2), b = Blocks(20, 3);
  StepPlan plan;
  plan.chunks.push_back({prompt, 15, a, nullptr});
  plan.chunks.push_back({one, 40, b, nullptr});
  const PackedStep& step = Pack(plan);
  EXPECT_EQ(step.counts.decode_tiles, 0);
  EXPECT_EQ(step.latent_grid, (LatentGrid{1, 4}));
  const auto layout = LatentPlanLayout::For(step.counts.latent_pieces, step.counts.latent_blocks);
  const auto read = [&](size_t array, int32_t count) {
    return Read<int32_t>(step_.layout.latent_plan + array, count);
  };
  // The decode comes first. Each sequence is a tile, and a team's only piece.
  EXPECT_THAT(read(layout.team_pieces, 5), ElementsAre(0, 1, 2, 2, 2));
  EXPECT_THAT(read(layout.first_row, 2), ElementsAre(0, 1));
  EXPECT_THAT(read(layout.rows, 2), ElementsAre(1, 3));
  EXPECT_THAT(read(layout.first_block, 2), ElementsAre(0, 3));
  EXPECT_THAT(read(layout.tokens, 2), ElementsAre(41, 18));
  EXPECT_THAT(Ints(0, 5), ElementsAre(20, 21, 22, 10, 11));

  plan.chunks.erase(plan.chunks.begin());
  Pack(plan, {}, 4);
  EXPECT_EQ(step_.counts, packer_->CountsOfGraph(4));
  EXPECT_EQ(step_.latent_grid, packer_->LatentGridOf(step_.counts));
  const auto padded = LatentPlanLayout::For(step_.counts.latent_pieces, step_.counts.latent_blocks);
  EXPECT_THAT(read(padded.team_pieces, 5), ElementsAre(0, 1, 1, 1, 1));
}

TEST_F(StepPackerTest, BrokenPlansAreRefused) {
  const std::vector<TokenId> one = {4}, bad = {100};
  const std::vector<BlockId> a = Blocks(10, 2);
  EXPECT_THAT(Refusal({{}, 0, a, nullptr}), HasSubstr("no tokens"));
  EXPECT_THAT(Refusal({bad, 0, a, nullptr}), HasSubstr("token 100"));
  EXPECT_THAT(Refusal({one, 200, a, nullptr}), HasSubstr("positions"));
  EXPECT_THAT(Refusal({one, -1, a, nullptr}), HasSubstr("positions"));
  EXPECT_THAT(Refusal({one, 32, a, nullptr}), HasSubstr("need 3 blocks"));
  SamplingRequest request;
  request.params.repetition_penalty = 2;
  request.history = bad;
  EXPECT_THAT(Refusal({one, 0, a, &request}), HasSubstr("history"));
  const std::vector<TokenId> many(65, 1);
  EXPECT_THAT(Refusal({many, 0, Blocks(1, 5), nullptr}), HasSubstr("the runner takes"));
  EXPECT_FALSE(packer_->Validate(StepPlan(), {}).ok());
}

TEST_F(StepPackerTest, FusedDecodesAreNotPlannedAsTiles) {
  PackerOptions options = Options();
  options.fused_decode = true;
  Start(options);
  const std::vector<TokenId> one = {5};
  const std::vector<BlockId> blocks = Blocks(3, 10);
  StepPlan plan;
  plan.chunks.push_back({one, 150, blocks, nullptr});
  plan.chunks.push_back({one, 0, blocks, nullptr});
  const PackedStep& step = Pack(plan, {}, 4);
  EXPECT_EQ(step.counts, packer_->CountsOfGraph(4));
  EXPECT_EQ(step.counts.decode_tiles, 0);
  EXPECT_FALSE(step.split);
  // What the kernel cuts: the blocks of all rows, one after another from the first.
  EXPECT_THAT(Read<int32_t>(step.layout.decode_blocks, 5), ElementsAre(0, 10, 11, 12, 13));
  EXPECT_THAT(Read<int32_t>(step.layout.decode_last, 4), ElementsAre(7, 1, 1, 1));
  EXPECT_THAT(Ints(9, 4), ElementsAre(12, 3, kNull, kNull));
}

TEST_F(StepPackerTest, TheLargestStepFits) {
  const std::vector<TokenId> some(8, 1);
  const std::vector<BlockId> a = Blocks(10, 13);
  const std::vector<TokenId> history(20, 3);
  SamplingRequest request;
  request.params.repetition_penalty = 2;
  request.history = history;
  StepPlan plan;
  for (int i = 0; i < 8; ++i) plan.chunks.push_back({some, 192, a, &request});
  EXPECT_EQ(Pack(plan).counts.rows, 64);
  PackerOptions options = Options();
  options.latent_heads = 128;
  Start(options);
  EXPECT_EQ(Pack(plan).counts.rows, 64);
}

}  // namespace
}  // namespace palimpsest::cuda
