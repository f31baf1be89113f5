// For tests of the block directory: one tenant with two sessions over a simulated store.
#ifndef PALIMPSEST_BROKER_CORE_BLOCKS_BLOCK_DIRECTORY_FIXTURE_H_
#define PALIMPSEST_BROKER_CORE_BLOCKS_BLOCK_DIRECTORY_FIXTURE_H_

#include <memory>
#include <string>
#include <vector>

#include "broker/core/blocks/block_directory.h"
#include "broker/core/blocks/simulated_store.h"
#include "broker/core/cache/score_policies.h"
#include "gtest/gtest.h"

namespace palimpsest::blocks {
inline constexpr TenantId kAnna(0), kBerta(1);
inline constexpr SessionId kOne(1), kTwo(2);
inline constexpr TierIndex kNvme(1);
inline constexpr Bytes kBlock = KiB(4);

// Block `i` of sequence `name`.
inline BlockIdentity Id(uint64_t name, uint64_t i, const std::string& tenant = "anna") {
  BlockIdentity id = {.key = {name, i}, .parent = {name, i - 1}};
  id.tokens = {static_cast<TokenId>(i)};
  id.tenant = tenant;
  return id;
}

inline std::vector<BlockIdentity> Path(uint64_t name, uint64_t blocks,
                                       const std::string& tenant = "anna") {
  std::vector<BlockIdentity> path;
  for (uint64_t i = 1; i <= blocks; ++i) path.push_back(Id(name, i, tenant));
  return path;
}

inline DirectoryOptions Options() {
  DirectoryOptions options;
  // Chunks of 10 blocks.
  options.arena = {.max_chunks = 8, .chunk_bytes = kBlock * 10, .unit = kBlock};
  options.lower = {{.name = "nvme", .capacity = kBlock * 100, .unit = kBlock}};
  options.low_water = 0.2;
  return options;
}

inline TierState Serving() {
  return {.serving = true,
          .load = {.latency = absl::Milliseconds(1), .bytes_per_second = 1e9},
          .store = {.latency = absl::Microseconds(10), .bytes_per_second = 1e9}};
}

class BlockDirectoryTest : public testing::Test {
 protected:
  // Anna with two sessions and `chunks` of T1, ranked by policy_.
  void Start(int64_t chunks, const DirectoryOptions& options = Options()) {
    store_ = std::make_unique<SimulatedStore>(options, absl::UnixEpoch() + absl::Hours(1));
    BlockTenant anna = {.id = kAnna, .name = "anna", .budgets = {kBlock * 10 * chunks}};
    anna.recompute = {.first = absl::Seconds(1)};
    anna.policy = policy_;
    BlockTenant berta = anna;
    berta.id = kBerta;
    berta.name = "berta";
    store_->names = {{kAnna, "anna"}, {kBerta, "berta"}};
    ASSERT_TRUE(directory().AddTenant(anna, now()).ok());
    ASSERT_TRUE(directory().AddTenant(berta, now()).ok());
    directory().OnTierState(kNvme, Serving(), now());
    for (const SessionId session : {kOne, kTwo}) {
      ASSERT_TRUE(directory().OpenSession(session, kAnna, now()).ok());
    }
    store_->PerformAll();
  }

  BlockDirectory& directory() { return store_->directory; }
  absl::Time now() { return store_->now; }

  // Reserves, writes and commits as much as there is room for. Block i of sequence n is n * 100 +
  // i.
  size_t Write(SessionId session, const std::vector<BlockIdentity>& path, uint64_t request = 0) {
    std::vector<ArenaLedger::Wanted> wanted;
    for (const BlockIdentity& id : path) wanted.push_back({id, kBlock});
    const auto reserved = directory().Reserve(session, request, wanted, now());
    EXPECT_TRUE(reserved.ok());
    std::vector<ArenaLedger::Committed> committed;
    for (size_t i = 0; i < reserved->size(); ++i) {
      if ((*reserved)[i].result != Reservation::kReserved) continue;
      const uint64_t bytes = path[i].key.high * 100 + path[i].key.low;
      store_->BytesAt((*reserved)[i].extent) = bytes;
      committed.push_back({path[i].key, bytes});
    }
    EXPECT_TRUE(directory().Commit(session, committed, now()).ok());
    store_->Collect();
    return committed.size();
  }

  AcquireReply Acquire(SessionId session, uint64_t request, const std::vector<BlockIdentity>& path,
                       absl::Duration wait = absl::ZeroDuration()) {
    AcquireRequest wanted = {.request = request, .ids = path};
    if (wait > absl::ZeroDuration()) wanted.deadline = now() + wait;
    const auto reply = directory().Acquire(session, wanted, now());
    EXPECT_TRUE(reply.ok()) << reply.status();
    store_->Collect();
    return *reply;
  }

  void End(SessionId session, uint64_t request) {
    EXPECT_TRUE(directory().EndRequest(session, {.request = request}, now()).ok());
    store_->Collect();
  }

  template <typename Action>
  size_t Pending() const {
    size_t count = 0;
    for (const BlockAction& action : store_->pending)
      count += std::holds_alternative<Action>(action);
    return count;
  }

  // `path` lies in NVMe and not in T1.
  void PutBelow(const std::vector<BlockIdentity>& path) {
    for (const BlockIdentity& id : path) {
      const uint64_t bytes = id.key.high * 100 + id.key.low;
      const BlockRecord record = {.id = id, .length = kBlock, .checksum = bytes};
      store_->tiers[kNvme.value()][id.key] = {record, bytes};
    }
    std::vector<BlockRecord> records;
    // In no particular order.
    for (size_t i = path.size(); i > 0; --i) {
      records.push_back(store_->tiers[kNvme.value()].at(path[i - 1].key).record);
    }
    std::swap(records.front(), records[records.size() / 2]);
    directory().OnRecovered(kNvme, records, now());
    store_->Collect();
  }

  TierCounters Counters(TierIndex tier, TenantId tenant = kAnna) {
    EXPECT_EQ(directory().CheckConsistency(), absl::OkStatus());
    return directory().CountersOf(tenant, tier);
  }
  static uint64_t Refused(const TierCounters& counters, Refusal why) {
    return counters.refusals[static_cast<size_t>(why)];
  }

  PolicyMaker policy_ = [](TierIndex) { return std::make_unique<cache::LruPolicy>(); };
  std::unique_ptr<SimulatedStore> store_;
};

}  // namespace palimpsest::blocks

#endif  // PALIMPSEST_BROKER_CORE_BLOCKS_BLOCK_DIRECTORY_FIXTURE_H_
