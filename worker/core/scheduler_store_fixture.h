// For tests of a scheduler beside a block store: both answer when the test says so.
#ifndef PALIMPSEST_WORKER_CORE_SCHEDULER_STORE_FIXTURE_H_
#define PALIMPSEST_WORKER_CORE_SCHEDULER_STORE_FIXTURE_H_

#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/core/fake_kv_store.h"
#include "worker/core/fake_swap_copier.h"
#include "worker/core/scheduler.h"

namespace palimpsest {

class NoBytes : public TokenBytes {
 public:
  absl::string_view BytesOf(TokenId) const override { return "x"; }
};

inline SchedulerConfig StoreTestConfig(int32_t blocks, int32_t window) {
  SchedulerConfig config;
  config.geometry = {.slab_bytes = Bytes(10),
                     .block_bytes = Bytes(10),
                     .region_slabs = blocks + 1,
                     .block_tokens = 4};
  config.max_kv_slabs = blocks + 1;
  config.vocab_size = 100;
  config.max_sequence_tokens = 200;
  config.max_batch_sequences = 3;
  config.max_step_tokens = 100;
  config.root_key = {3, 4};
  if (window == 0) return config;
  config.sliding_window = window;
  config.max_step_tokens = 8;
  return config;
}

class SchedulerStoreTest : public ::testing::Test {
 protected:
  explicit SchedulerStoreTest(int32_t blocks = 20, BlockKeyFunction key = ChainKey,
                              int32_t window = 0)
      : config_(StoreTestConfig(blocks, window)),
        kv_(static_cast<size_t>(10 * (blocks + 1))),
        scheduler_(config_, &token_bytes_, &store_, key) {
    scheduler_.OnSlabsMapped(AllSlabs());
  }

  std::vector<RegionIndex> AllSlabs() const {
    std::vector<RegionIndex> slabs;
    for (int32_t i = 0; i < config_.geometry.region_slabs; ++i) slabs.push_back(RegionIndex(i));
    return slabs;
  }

  static std::vector<TokenId> Tokens(int32_t count, TokenId first = 1) {
    std::vector<TokenId> tokens(static_cast<size_t>(count));
    for (int32_t i = 0; i < count; ++i) tokens[i] = (first + 7 * i) % 90;
    return tokens;
  }

  SequenceId Add(std::vector<TokenId> prompt, int32_t max_tokens = 1) {
    SequenceRequest request;
    request.prompt = std::move(prompt);
    request.params.max_tokens = max_tokens;
    return scheduler_.Add(std::move(request)).value();
  }

  void Transfers() {
    for (SwapTransfer& transfer : scheduler_.TakeTransfers()) copier_.Start(std::move(transfer));
    copier_.AwaitAll();
    for (const SwapEnded& ended : copier_.TakeEnded()) scheduler_.OnTransferEnded(ended);
  }
  // The store answers, copies end.
  void Settle() {
    for (int i = 0; i < 10; ++i) {
      store_.AnswerAll();
      scheduler_.PollStore(now_);
      Transfers();
    }
    scheduler_.CheckInvariants();
  }

  // One step; the first positions of its chunks.
  std::vector<int32_t> Step(TokenId token = 99) {
    std::vector<int32_t> positions;
    const StepPlan& plan = scheduler_.Schedule();
    StepResult result;
    for (const SequenceChunk& chunk : plan.chunks) {
      positions.push_back(chunk.first_position);
      result.sampled.emplace_back();
      if (chunk.sampling != nullptr) result.sampled.back().emplace().token = token;
    }
    if (!positions.empty()) scheduler_.Commit(std::move(result));
    scheduler_.CheckInvariants();
    return positions;
  }

  void Ask() {
    EXPECT_THAT(Step(), ::testing::IsEmpty());
    Settle();
  }

  // T0 forgets everything.
  void Clear() {
    Settle();
    scheduler_.GiveSlabs(config_.geometry.region_slabs);
    scheduler_.OnSlabsMapped(AllSlabs());
  }

  // Computes a prompt, which is stored; T0 forgets it.
  void Remember(std::vector<TokenId> prompt) {
    Add(std::move(prompt));
    Ask();
    EXPECT_THAT(Step(), ::testing::ElementsAre(0));
    Clear();
  }

  absl::Time now_ = absl::UnixEpoch();
  const SchedulerConfig config_;
  NoBytes token_bytes_;
  std::vector<std::byte> kv_;
  FakeKvStore store_{
      {.block_bytes = Bytes(10), .block_tokens = 4, .capacity_blocks = 50, .seed = 3}};
  FakeSwapCopier copier_{{.kv = kv_.data(), .block_bytes = Bytes(10)}};
  Scheduler scheduler_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_CORE_SCHEDULER_STORE_FIXTURE_H_
