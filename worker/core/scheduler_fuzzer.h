// Random requests, cancels, failed steps, slabs that come and go at every step and KV that goes to
// host memory and to a block store and comes back early, late, wrong or not at all, with one step
// in flight or two: whatever happens, every sequence must say what it says alone with plenty of
// memory.
#ifndef PALIMPSEST_WORKER_CORE_SCHEDULER_FUZZER_H_
#define PALIMPSEST_WORKER_CORE_SCHEDULER_FUZZER_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "worker/core/fake_kv_store.h"
#include "worker/core/fake_model.h"
#include "worker/core/fake_swap_copier.h"
#include "worker/core/scheduler.h"
#include "worker/core/scheduler_oracle.h"
#include "worker/core/swap_gate.h"

namespace palimpsest {

class SchedulerFuzzer {
 public:
  explicit SchedulerFuzzer(uint64_t seed)
      : random_(seed),
        config_(RandomConfig()),
        model_config_{config_.geometry, config_.vocab_size, config_.sliding_window},
        kv_((config_.geometry.slab_bytes * config_.geometry.region_slabs).count()),
        mapped_(config_.geometry.region_slabs),
        model_(model_config_, kv_.data()),
        swap_({.kv = kv_.data(),
               .block_bytes = config_.geometry.block_bytes,
               .slots = config_.swap_blocks,
               .seed = seed,
               .failing_percent = Chance(30) ? 20 : 0}),
        gate_(&open_, &swap_, 1, 1),
        runner_(&model_, &gate_,
                {.depth = config_.pipeline_depth,
                 .seed = seed,
                 .before_execution = [this](const StepPlan& plan) { ExpectMapped(plan); }}),
        store_({.block_bytes = config_.geometry.block_bytes,
                .block_tokens = config_.geometry.block_tokens,
                .capacity_blocks = Between(1, 200),
                .seed = seed,
                .failing_percent = Chance(30) ? 20 : 0,
                .lying_percent = Chance(30) ? 10 : 0}),
        has_store_(config_.sliding_window != 1 && Chance(70)),
        scheduler_(config_, &token_bytes_, has_store_ ? &store_ : nullptr,
                   !has_store_ && Chance(30) ? WeakKey : ChainKey) {}

  void Run() {
    const int steps = Between(40, 120);
    for (int i = 0; i < steps && !::testing::Test::HasFatalFailure(); ++i) RandomStep();
    Drain();
    for (auto& [id, tracked] : sequences_) Verify(tracked);
  }

  const SchedulerCounters& counters() const { return scheduler_.counters(); }
  int64_t continued_chunks() const { return runner_.continued_chunks(); }
  int64_t preempted_in_flight() const { return preempted_in_flight_; }
  int64_t moves() const { return moves_; }
  int64_t finished() const { return finished_; }
  int64_t joined_steps() const { return joined_steps_; }
  Offloader::Counters offload_counters() const { return scheduler_.offload_counters(); }
  int64_t lies() const { return store_.lies(); }
  bool windowed() const { return config_.sliding_window > 0; }

 private:
  class OpenGate : public ParameterGate {
   public:
    absl::Status AwaitStage(int) override { return absl::OkStatus(); }
  };
  struct Tracked {
    SequenceRequest request;
    std::vector<TokenId> output;
    std::optional<SequenceOutput> last;
  };

  // Many blocks have the same.
  static BlockKey WeakKey(const BlockKey& parent, absl::Span<const TokenId> tokens) {
    uint64_t sum = parent.low;
    for (TokenId token : tokens) sum += token;
    return {0, sum % 13};
  }

  int Between(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_); }
  bool Chance(int percent) { return Between(1, 100) <= percent; }

  SchedulerConfig RandomConfig() {
    SchedulerConfig config;
    config.geometry.block_tokens = Between(1, 5);
    config.geometry.block_bytes =
        Bytes(FakeModel::kEntryBytes * (config.geometry.block_tokens + Between(0, 2)));
    config.geometry.slab_bytes = Bytes(8 * Between(2, 24));
    const int blocks = Between(12, 70);
    config.geometry.region_slabs = static_cast<int32_t>(
        CeilDiv(config.geometry.block_bytes * (blocks + 1), config.geometry.slab_bytes));
    config.max_kv_slabs = config.geometry.region_slabs;
    config.vocab_size = 50;
    config.max_sequence_tokens = Between(20, 90);
    config.sliding_window = Chance(30) ? Between(1, 20) : 0;
    config.eos_token_ids = {kOracleEos};
    config.max_batch_sequences = Between(1, 8);
    config.max_step_tokens = config.max_batch_sequences + Between(0, 24);
    config.queue_capacity = Between(1, 30);
    config.pipeline_depth = Between(1, 2);
    config.swap_blocks = Chance(60) ? Between(1, 60) : 0;
    EXPECT_TRUE(config.Validate().ok());
    return config;
  }

  std::vector<TokenId> RandomPrompt(int longest) {
    std::vector<TokenId> prompt;
    if (Chance(30) && !sequences_.empty()) {  // the next turn of an earlier conversation
      const Tracked& earlier =
          std::next(sequences_.begin(), Between(0, sequences_.size() - 1))->second;
      prompt = earlier.request.prompt;
      prompt.insert(prompt.end(), earlier.output.begin(), earlier.output.end());
    } else if (Chance(60)) {  // a shared beginning
      std::mt19937 shared(Between(1, 3));
      for (int i = Between(1, 30); i > 0; --i) prompt.push_back(shared() % 50);
    }
    for (int i = Between(0, 12); i > 0; --i) prompt.push_back(Between(0, 49));
    if (prompt.empty()) prompt.push_back(1);
    if (static_cast<int>(prompt.size()) > longest) prompt.resize(longest);
    return prompt;
  }

  void AddRandom() {
    if (scheduler_.longest_sequence() < 2) return;
    SequenceRequest request;
    request.prompt = RandomPrompt(scheduler_.longest_sequence() - 1);
    if (Chance(20)) request.output_offset = Between(0, request.prompt.size() - 1);
    request.params.max_tokens = Chance(20) ? 0 : Between(1, 40);
    request.params.seed = Between(1, 3);
    request.params.ignore_eos = Chance(40);
    if (Chance(30)) request.params.stop = {"abcab", "cc", "bab"};
    if (Chance(20)) request.params.stop_token_ids = {11, 12};
    if (Chance(20)) request.params.repetition_penalty = 1.3f;
    const int before = scheduler_.running() + scheduler_.waiting();
    const auto id = scheduler_.Add(request);
    if (!id.ok()) {
      ASSERT_EQ(id.status().code(), absl::StatusCode::kResourceExhausted) << id.status();
      ASSERT_EQ(before, config_.max_sequences());
      return;
    }
    sequences_[*id] = {request, {}, {}};
  }

  void RandomStep() {
    if (Chance(40)) AddRandom();
    if (Chance(6) && !sequences_.empty()) CancelRandom();
    if (Chance(25)) MapSlabs(Between(1, 6));
    if (Chance(15)) GiveSlabs(Between(1, Chance(20) ? 100 : 6));
    if (Chance(5)) Compact();
    if (Chance(2)) {
      preempted_in_flight_ += scheduler_.in_flight() > 0 ? scheduler_.running() : 0;
      scheduler_.PreemptAll();
    }
    if (Chance(90)) Submit();
    if (Chance(85)) Wait();
    if (Chance(20)) scheduler_.SetSwapOverlap(Chance(30) ? 0 : Between(0, 20));
    if (Chance(ending_percent_)) EndTransfer();
    if (has_store_) RandomStoreStep();
    CollectOutputs();
    scheduler_.CheckInvariants();
  }

  void RandomStoreStep() {
    if (Chance(80)) store_.AnswerOne();
    if (Chance(10)) store_.DropOne();
    if (Chance(30)) store_.DemoteOne();
    if (Chance(1)) store_.Lose();
    if (Chance(3)) store_.WantPlaces();
    if (Chance(1)) store_.Corrupt();
    if (Chance(3)) store_.SetAvailable(Chance(80));
    if (Chance(10)) {
      scheduler_.SetLoadCosts({.token_seconds = Between(0, 20) * 1e-3,
                               .position_seconds = Between(0, 3) * 1e-4,
                               .block_seconds = Between(0, 5) * 1e-3,
                               .answer_seconds = Between(0, 5) * 1e-3,
                               .window_tokens = config_.sliding_window});
    }
    if (Chance(90)) PollStore();
  }

  void PollStore() {
    now_ += absl::Milliseconds(Chance(10) ? Between(0, 2000) : Between(0, 2));
    scheduler_.PollStore(now_);
    StartTransfers();
  }

  void CancelRandom() {
    const auto it = std::next(sequences_.begin(), Between(0, sequences_.size() - 1));
    const bool running = !it->second.last.has_value();
    CollectOutputs();
    EXPECT_EQ(scheduler_.Cancel(it->first), running && !it->second.last.has_value());
  }

  void MapSlabs(int count) {
    std::vector<RegionIndex> fresh;
    for (size_t i = 0; i < mapped_.size(); ++i) {
      if (!mapped_[i]) fresh.push_back(RegionIndex(i));
    }
    if (Chance(50)) std::shuffle(fresh.begin(), fresh.end(), random_);
    if (static_cast<int>(fresh.size()) > count) fresh.resize(count);
    for (RegionIndex index : fresh) {
      mapped_[index.value()] = true;
      Garble(index);
    }
    scheduler_.OnSlabsMapped(fresh);
  }

  void StartTransfers() {
    for (SwapTransfer& transfer : scheduler_.TakeTransfers()) swap_.Start(std::move(transfer));
  }

  void EndTransfer() {
    swap_.EndOne();
    Report(swap_.TakeEnded());
  }

  void Report(const std::vector<SwapEnded>& ended) {
    for (const SwapEnded& one : ended) {
      if (!one.status.ok() && one.awaited && scheduler_.in_flight() > 0) AbandonAll();
      scheduler_.OnTransferEnded(one);
    }
    StartTransfers();
  }

  void AbandonAll() {
    for (int32_t i = 0; i < scheduler_.in_flight(); ++i) runner_.Wait().IgnoreError();
    scheduler_.Abandon();
  }

  void EndTransfers() {
    StartTransfers();
    while (scheduler_.transferring()) {
      swap_.AwaitAll();
      Report(swap_.TakeEnded());
    }
  }

  void Compact() {
    while (scheduler_.in_flight() > 0) Wait();
    EndTransfers();
    Perform(scheduler_.Compact());
  }

  void GiveSlabs(int count) {
    while (scheduler_.in_flight() > 0) Wait();
    if (Chance(70)) scheduler_.MakeRoomToGive(count);
    EndTransfers();
    const int held = std::count(mapped_.begin(), mapped_.end(), true);
    const Scheduler::Give give = scheduler_.GiveSlabs(count);
    EXPECT_EQ(static_cast<int>(give.slabs.size()), std::min(count, held));
    Perform(give);
  }

  void Perform(const Scheduler::Give& give) {
    std::set<BlockId> sources, targets;
    for (const BlockMove& move : give.moves) {
      sources.insert(move.from);
      targets.insert(move.to);
    }
    EXPECT_EQ(sources.size(), give.moves.size());
    EXPECT_EQ(targets.size(), give.moves.size());
    const int64_t size = config_.geometry.block_bytes.count();
    for (const BlockMove& move : give.moves) {
      EXPECT_FALSE(sources.contains(move.to));
      ExpectMapped(move.from);
      std::memcpy(&kv_[move.to.value() * size], &kv_[move.from.value() * size], size);
    }
    for (RegionIndex index : give.slabs) {
      EXPECT_TRUE(mapped_[index.value()]);
      mapped_[index.value()] = false;
      Garble(index);
    }
    for (const BlockMove& move : give.moves) ExpectMapped(move.to);
    moves_ += give.moves.size();
  }

  void Garble(RegionIndex index) {
    const int64_t size = config_.geometry.slab_bytes.count();
    for (int64_t i = 0; i < size; ++i) kv_[index.value() * size + i] = std::byte(random_());
  }

  // What is in free blocks is nobody's, once no step in flight uses them any more.
  void GarbleFreeBlocks() {
    const int64_t size = config_.geometry.block_bytes.count();
    for (uint32_t id = 1; id < config_.geometry.block_count(); ++id) {
      if (!scheduler_.blocks().free(BlockId(id))) continue;
      std::memset(&kv_[id * size], static_cast<int>(random_()), size);
    }
  }

  void ExpectMapped(BlockId block) {
    const int64_t size = config_.geometry.block_bytes.count();
    for (int64_t i = block.value() * size; i < (block.value() + 1) * size; ++i) {
      ASSERT_TRUE(mapped_[i / config_.geometry.slab_bytes.count()]) << "block " << block;
    }
  }

  void ExpectMapped(const StepPlan& plan) {
    for (const SequenceChunk& chunk : plan.chunks) {
      const int32_t first = config_.sliding_window == 0
                                ? 0
                                : std::max(0, chunk.first_position - config_.sliding_window + 1);
      for (size_t i = first / config_.geometry.block_tokens; i < chunk.block_table.size(); ++i) {
        ExpectMapped(chunk.block_table[i]);
      }
    }
  }

  void CheckPlan(const StepPlan& plan) {
    size_t tokens = 0;
    ASSERT_LE(static_cast<int>(plan.chunks.size()), config_.max_batch_sequences);
    for (const SequenceChunk& chunk : plan.chunks) {
      tokens += chunk.tokens.size();
      const auto end = chunk.first_position + static_cast<int32_t>(chunk.tokens.size());
      ASSERT_EQ(static_cast<int32_t>(chunk.block_table.size()), config_.geometry.BlocksFor(end));
      ASSERT_TRUE(chunk.token_from < 0 || chunk.tokens.size() == 1);
    }
    ASSERT_LE(static_cast<int>(tokens), config_.max_step_tokens);
  }

  void Submit() {
    if (scheduler_.in_flight() == config_.pipeline_depth) return;
    if (scheduler_.in_flight() == 0) GarbleFreeBlocks();
    const int64_t preempted = scheduler_.counters().preemptions;
    const bool others = scheduler_.in_flight() > 0;
    const StepPlan& plan = scheduler_.Schedule();
    if (others) preempted_in_flight_ += scheduler_.counters().preemptions - preempted;
    CheckPlan(plan);
    StartTransfers();
    joined_steps_ += plan.arriving;
    if (plan.chunks.empty()) return;
    if (Chance(6)) runner_.FailNext();
    ASSERT_TRUE(runner_.Submit(plan).ok());
  }

  void Wait() {
    if (scheduler_.in_flight() == 0) return;
    auto result = runner_.Wait();
    const std::vector<SwapEnded> ended = swap_.TakeEnded();
    const bool failed = std::any_of(ended.begin(), ended.end(), [](const SwapEnded& one) {
      return one.awaited && !one.status.ok();
    });
    if (result.ok() && !failed) {
      scheduler_.Commit(*std::move(result));
    } else {
      for (int32_t i = 1; i < scheduler_.in_flight(); ++i) runner_.Wait().IgnoreError();
      scheduler_.Abandon();
    }
    Report(ended);
  }

  void CollectOutputs() {
    for (const SequenceOutput& output : scheduler_.TakeOutputs()) {
      Tracked& tracked = sequences_.at(output.id);
      ASSERT_FALSE(tracked.last.has_value()) << "output after the end";
      if (output.token.has_value()) tracked.output.push_back(output.token->token);
      if (output.finish.has_value()) tracked.last = output;
    }
  }

  // With what it asks for, every sequence must come to its end. The slabs come in any order.
  void Drain() {
    const int64_t limit = 200 + 100 * static_cast<int64_t>(sequences_.size()) *
                                    (config_.max_sequence_tokens + 1) / 10;
    for (int64_t i = 0; !scheduler_.idle() && !::testing::Test::HasFatalFailure(); ++i) {
      ASSERT_LT(i, limit) << "no end in sight";
      const int mapped = std::count(mapped_.begin(), mapped_.end(), true);
      const int wanted = scheduler_.Demand().needed;
      ASSERT_LE(wanted, static_cast<int>(mapped_.size()));
      if (wanted > mapped) MapSlabs(wanted - mapped);
      Submit();
      if (Chance(50)) Wait();
      if (Chance(50)) EndTransfer();
      if (has_store_) {
        store_.AnswerOne();
        PollStore();
      }
      CollectOutputs();
      scheduler_.CheckInvariants();
    }
    while (scheduler_.in_flight() > 0) Wait();
    EndTransfers();
    // Requests end when what they leave is stored.
    const auto open = [this] { return store_.waiting_calls() + store_.open_requests(); };
    for (int i = 0; has_store_ && (open() > 0 || i < 2); ++i) {
      ASSERT_LT(i, 1000);
      store_.AnswerAll();
      PollStore();
      EndTransfers();
    }
    EXPECT_EQ(store_.held(), 0u) << "a place was not given back";
    EXPECT_EQ(store_.open_requests(), 0u);
    EXPECT_EQ(scheduler_.swap_space().used(), 0);
    scheduler_.CheckInvariants();
    EXPECT_EQ(scheduler_.blocks().live_blocks(), 0);
  }

  void Verify(const Tracked& tracked) {
    ASSERT_TRUE(tracked.last.has_value());
    EXPECT_EQ(tracked.last->usage.output_tokens, static_cast<int32_t>(tracked.output.size()));
    const ExpectedOutput expected =
        OutputAlone(model_config_, token_bytes_, tracked.request, scheduler_.longest_sequence());
    if (tracked.last->finish == FinishReason::kCancelled) {
      ASSERT_LE(tracked.output.size(), expected.tokens.size());
      ASSERT_TRUE(
          std::equal(tracked.output.begin(), tracked.output.end(), expected.tokens.begin()));
      return;
    }
    ++finished_;
    ASSERT_EQ(tracked.output, expected.tokens);
    ASSERT_EQ(*tracked.last->finish, expected.reason);
    ASSERT_EQ(tracked.last->stop_trim_bytes, expected.trim);
  }

  std::mt19937_64 random_;
  absl::Time now_ = absl::UnixEpoch();
  const SchedulerConfig config_;
  const FakeModel::Config model_config_;
  std::vector<std::byte> kv_;
  std::vector<bool> mapped_;
  FakeModel model_;
  OpenGate open_;
  FakeSwapCopier swap_;
  SwapGate gate_;
  FakeRunner runner_;
  LetterTokens token_bytes_;
  FakeKvStore store_;
  const bool has_store_;
  Scheduler scheduler_;
  const int ending_percent_ = Chance(30) ? 10 : 60;  // transfers, at each step
  std::map<SequenceId, Tracked> sequences_;
  int64_t moves_ = 0;
  int64_t joined_steps_ = 0;
  int64_t preempted_in_flight_ = 0;
  int64_t finished_ = 0;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_CORE_SCHEDULER_FUZZER_H_
