#include "broker/blocks/tier_check.h"

#include <algorithm>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "broker/blocks/staging_pool.h"
#include "broker/tier/dram_arena.h"
#include "common/block_checksum.h"
#include "common/mapping.h"
#include "common/mutex.h"
#include "common/random.h"

namespace palimpsest {
namespace {

constexpr uint32_t kArenaDescriptors = 64;

struct CheckedBlock {
  BlockRecord record;
  PinnedBytes<std::byte> sent;
  PinnedBytes<std::byte> came;
  absl::Status status;
};

// Blocks of random bytes, with room for them to come back.
absl::StatusOr<std::vector<CheckedBlock>> MakeBlocks(StagingPool& memory, const Clock& clock,
                                                     const TierCheckOptions& options) {
  std::vector<CheckedBlock> blocks(options.blocks);
  std::mt19937_64 random(RandomSeed());
  for (CheckedBlock& block : blocks) {
    for (PinnedBytes<std::byte>* buffer : {&block.sent, &block.came}) {
      auto taken = memory.Await(options.block, absl::ZeroDuration());
      if (!taken.ok()) return taken.status();
      *buffer = *std::move(taken);
    }
    std::generate(block.sent.bytes.begin(), block.sent.bytes.end(),
                  [&random] { return static_cast<std::byte>(random()); });
    block.record.id.key = {options.key_high, RandomSeed()};
    block.record.id.tenant = options.tenant;
    block.record.length = options.block;
    block.record.checksum = BlockChecksum(block.record.id.key, block.sent.bytes);
    block.record.expiry = clock.Now() + 2 * options.patience + absl::Minutes(1);
  }
  return blocks;
}

// Results of requests that end later, also after nobody waits any more.
class Results {
 public:
  explicit Results(size_t expected) : state_(std::make_shared<State>(expected)) {}

  TierStore::Done Of(size_t index) {
    return [state = state_, index](absl::Status status) { state->Set(index, std::move(status)); };
  }
  void Set(size_t index, absl::Status status) { state_->Set(index, std::move(status)); }
  std::vector<absl::Status> Await(absl::Duration patience) {
    state_->done.WaitForNotificationWithTimeout(patience);
    MutexLock lock(&state_->mu);
    return state_->results;
  }

 private:
  struct State {
    explicit State(size_t expected)
        : results(expected, absl::DeadlineExceededError("no answer in time")), missing(expected) {}
    void Set(size_t index, absl::Status status) {
      MutexLock lock(&mu);
      results[index] = std::move(status);
      if (--missing == 0) done.Notify();
    }
    Mutex mu;
    std::vector<absl::Status> results ABSL_GUARDED_BY(mu);
    size_t missing ABSL_GUARDED_BY(mu);
    Notification done;
  };

  const std::shared_ptr<State> state_;
};

// Begins something for each block and waits for all of them.
template <typename Begin>
absl::Duration TakeAll(std::vector<CheckedBlock>& blocks, const Clock& clock,
                       absl::Duration patience, Begin begin) {
  const absl::Time start = clock.Now();
  Results results(blocks.size());
  for (size_t i = 0; i < blocks.size(); ++i) {
    absl::Status refused = blocks[i].status;
    if (refused.ok()) refused = begin(blocks[i], results.Of(i));
    if (!refused.ok()) results.Set(i, refused);
  }
  const std::vector<absl::Status> ended = results.Await(patience);
  for (size_t i = 0; i < blocks.size(); ++i) blocks[i].status = ended[i];
  return clock.Now() - start;
}

double Rate(const std::vector<CheckedBlock>& blocks, Bytes block, absl::Duration took) {
  const auto ok = std::count_if(blocks.begin(), blocks.end(),
                                [](const CheckedBlock& b) { return b.status.ok(); });
  const double seconds = absl::ToDoubleSeconds(took);
  return seconds > 0 ? static_cast<double>((block * ok).count()) / seconds : 0;
}

void Compare(std::vector<CheckedBlock>& blocks, TierCheck& check) {
  for (CheckedBlock& block : blocks) {
    if (block.status.ok() && block.sent.bytes != block.came.bytes) {
      block.status = absl::DataLossError("a block came back with other bytes");
    }
    check.blocks += block.status.ok() ? 1 : 0;
    if (check.status.ok()) check.status = block.status;
  }
}

// Both buffers of all blocks.
absl::StatusOr<std::unique_ptr<StagingPool>> MakeMemory(const TierCheckOptions& options) {
  return StagingPool::Make(RoundUp(RoundUp(options.block, KiB(4)) * options.blocks * 2, kHugePage));
}

}  // namespace

TierCheck CheckStore(TierStore& store, const Clock& clock, const TierCheckOptions& options) {
  TierCheck check;
  auto memory = MakeMemory(options);
  if (check.status = memory.status(); !check.status.ok()) return check;
  auto blocks = MakeBlocks(**memory, clock, options);
  if (check.status = blocks.status(); !check.status.ok()) return check;
  const absl::Duration stored = TakeAll(
      *blocks, clock, options.patience, [&](const CheckedBlock& block, TierStore::Done done) {
        return store.Store(
            {block.record, {block.sent.bytes, block.sent.pin}, clock.Now() + options.patience},
            std::move(done));
      });
  check.store_rate = Rate(*blocks, options.block, stored);
  const absl::Duration loaded = TakeAll(
      *blocks, clock, options.patience, [&](const CheckedBlock& block, TierStore::Done done) {
        return store.Load({block.record.id, block.came, clock.Now() + options.patience},
                          std::move(done));
      });
  check.load_rate = Rate(*blocks, options.block, loaded);
  Compare(*blocks, check);
  for (const CheckedBlock& block : *blocks) store.Remove(block.record.id.key);
  return check;
}

TierCheck CheckArena(const Clock& clock, const TierCheckOptions& options) {
  TierCheck check;
  auto memory = MakeMemory(options);
  if (check.status = memory.status(); !check.status.ok()) return check;
  auto blocks = MakeBlocks(**memory, clock, options);
  if (check.status = blocks.status(); !check.status.ok()) return check;
  DramArena::Options arena_options;
  arena_options.max_chunks = 1;
  arena_options.chunk_bytes = RoundUp(options.block * options.blocks, kHugePage);
  arena_options.other_descriptors = kArenaDescriptors;
  auto arena = DramArena::Open(arena_options);
  if (check.status = arena.status(); !check.status.ok()) return check;
  if (check.status = (*arena)->Create(ArenaChunkId(0)); !check.status.ok()) return check;
  const auto extent = [&](const CheckedBlock& block) {
    const auto index = &block - blocks->data();
    return ArenaExtent{ArenaChunkId(0), options.block * index, options.block};
  };
  const absl::Duration stored = TakeAll(*blocks, clock, options.patience,
                                        [&](const CheckedBlock& block, TierStore::Done done) {
                                          done((*arena)->Write(extent(block), block.sent.bytes));
                                          return absl::OkStatus();
                                        });
  check.store_rate = Rate(*blocks, options.block, stored);
  const absl::Duration loaded = TakeAll(*blocks, clock, options.patience,
                                        [&](const CheckedBlock& block, TierStore::Done done) {
                                          done((*arena)->Read(extent(block), block.came.bytes));
                                          return absl::OkStatus();
                                        });
  check.load_rate = Rate(*blocks, options.block, loaded);
  Compare(*blocks, check);
  if (const absl::Status retired = (*arena)->Retire(ArenaChunkId(0)); check.status.ok()) {
    check.status = retired;
  }
  return check;
}

}  // namespace palimpsest
