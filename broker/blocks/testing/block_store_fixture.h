// A block store over real tiers below which a test lets things go wrong (FaultyBackend), with
// workers in this process.
#ifndef PALIMPSEST_BROKER_BLOCKS_TESTING_BLOCK_STORE_FIXTURE_H_
#define PALIMPSEST_BROKER_BLOCKS_TESTING_BLOCK_STORE_FIXTURE_H_

#include <stdlib.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "broker/blocks/block_store.h"
#include "broker/blocks/testing/block_worker.h"
#include "broker/device/host_memory.h"
#include "broker/tier/faulty_backend.h"
#include "common/process.h"
#include "common/testing/eventually.h"
#include "common/yaml_config.h"
#include "gtest/gtest.h"

namespace palimpsest {

class BlockStoreTest : public ::testing::Test {
 protected:
  static constexpr Bytes kBlock = KiB(64);
  static constexpr absl::Duration kPatience = absl::Seconds(20);
  static constexpr TenantId kAlpha{0};
  static constexpr TenantId kBeta{1};
  static constexpr uint64_t kSeed = 7;

  BlockStoreTest() {
    std::string pattern = "/tmp/palimpsest_blocks_XXXXXX";
    folder_ = mkdtemp(pattern.data());
    std::filesystem::create_directory(shared());
    auto self = ProcessHandle::Open(getpid());
    if (!self.ok()) abort();
    self_ = std::make_shared<const ProcessHandle>(*std::move(self));
  }
  ~BlockStoreTest() override {
    if (store_ != nullptr) {
      const absl::Status consistent = store_->CheckConsistency();
      EXPECT_TRUE(consistent.ok()) << consistent;
    }
    store_.reset();
    std::filesystem::remove_all(folder_);
  }

  std::string disk() const { return folder_ + "/disk"; }
  std::string shared() const { return folder_ + "/shared"; }

  // 16 MiB of T1 in chunks of 2 MiB, and these tiers below.
  TiersConfig Tiers(const std::string& lower) const {
    auto yaml = YamlConfig::Parse(
        absl::StrCat("dram: {bytes: 16 MiB, chunk_bytes: 2 MiB, unmap_deadline: 2s}\n",
                     "staging: 8 MiB\npolicy: lru\n", lower),
        "tiers.yaml");
    EXPECT_TRUE(yaml.ok()) << yaml.status();
    TiersConfig config = ReadTiers(yaml->root(), "node");
    const absl::Status finished = yaml->Finish();
    EXPECT_TRUE(finished.ok()) << finished;
    return config;
  }
  std::string Nvme() const { return absl::StrCat("nvme: {bytes: 64 MiB, path: ", disk(), "}\n"); }
  std::string Directory() const {
    return absl::StrCat("directory: {bytes: 64 MiB, path: ", shared(), "}\n");
  }
  static std::string Cxl() {
    return "cxl: {bytes: 32 MiB, emulated: {bytes_per_second: 8 GiB, latency: 1us}}\n";
  }

  absl::Status Start(const std::string& lower) {
    BlockStore::Options options;
    options.tiers = Tiers(lower);
    const SaidBudgets nothing(options.tiers.lower.size() + 1);
    const auto budgets = ShareBudgets(options.tiers, {nothing, nothing});
    if (!budgets.ok()) return budgets.status();
    options.tenants = {{"alpha", (*budgets)[0], kBlock}, {"beta", (*budgets)[1], kBlock}};
    options.memory_back_off = absl::Milliseconds(50);
    options.tier_wrapper = [this](const std::string& tier, std::unique_ptr<TierBackend> medium) {
      FaultInjector& faults = faults_.try_emplace(tier, kSeed).first->second;
      return std::make_unique<FaultyBackend>(std::move(medium), faults);
    };
    options.chunk_maker = [this](Bytes size) -> absl::StatusOr<UniqueFd> {
      if (no_memory_) return absl::ResourceExhaustedError("memfd: no memory");
      return NewHostMemory("test", size, HostPages::kSmall);
    };
    auto store = BlockStore::Open(std::move(options), Clock::Real(), hand_overs_);
    if (!store.ok()) return store.status();
    store_ = *std::move(store);
    return absl::OkStatus();
  }
  void MustStart(const std::string& lower) {
    const absl::Status started = Start(lower);
    ASSERT_TRUE(started.ok()) << started;
    AwaitServing();
  }
  void AwaitServing() {
    EXPECT_TRUE(Eventually([&] {
      const auto status = Status();
      for (const v1::TierMemory& tier : status.tiers()) {
        if (!tier.serving()) return false;
      }
      return true;
    })) << Status().DebugString();
  }
  std::unique_ptr<BlockWorker> Worker(uint64_t session = 1, TenantId tenant = kAlpha) {
    return std::make_unique<BlockWorker>(*store_, hand_overs_, SessionId(session), tenant,
                                         tenant == kAlpha ? "alpha" : "beta", self_, kBlock);
  }

  v1::GetStatusResponse Status() {
    v1::GetStatusResponse status;
    store_->FillStatus(status);
    return status;
  }
  v1::TenantTier Row(const std::string& tier, const std::string& tenant = "alpha") {
    const v1::GetStatusResponse status = Status();
    for (const v1::TierMemory& row : status.tiers()) {
      if (row.tier() != tier) continue;
      for (const v1::TenantTier& of : row.tenants()) {
        if (of.tenant() == tenant) return of;
      }
    }
    ADD_FAILURE() << "no row of " << tenant << " in " << tier;
    return {};
  }

  // T1 has a chunk: a promotion does not wait for one.
  static void WarmUp(BlockWorker& worker) {
    EXPECT_TRUE(Puts(worker, ChainOf("alpha", 1000, 0, 1)));
  }
  // Whether all of them come with their bytes, at the latest when there is a chunk for them.
  bool BringsBack(BlockWorker& worker, const std::vector<BlockIdentity>& chain) {
    return Eventually(
        [&] { return Gets(worker, chain, ++last_request_, kPatience) == chain.size(); });
  }
  // Whether all of them get there: the first time chunks are made.
  static bool Puts(BlockWorker& worker, const std::vector<BlockIdentity>& chain) {
    return Eventually([&] {
      const auto put = worker.Put(chain);
      EXPECT_TRUE(put.ok()) << put.status();
      return !put.ok() || *put == chain.size();
    });
  }
  static size_t Gets(BlockWorker& worker, const std::vector<BlockIdentity>& chain, uint64_t request,
                     absl::Duration wait = absl::ZeroDuration()) {
    const auto got = worker.Get(chain, request, wait);
    EXPECT_TRUE(got.ok()) << got.status();
    return got.value_or(0);
  }

  // Puts sequences 1 .. n of 4 blocks and moves all of them out of T1.
  void PutBelow(BlockWorker& worker, uint64_t sequences) {
    for (uint64_t s = 1; s <= sequences; ++s) {
      ASSERT_TRUE(Puts(worker, ChainOf("alpha", s, 0, 4)));
    }
    ASSERT_TRUE(Eventually([&] {
      EXPECT_TRUE(store_->Trim(blocks::kArenaTier, "alpha", Bytes(0)).ok());
      return Row("dram").blocks() == 0;
    })) << Status().DebugString();
    WarmUp(worker);
  }

  // All of a tenant's blocks can go, and then nothing is used: whatever happened, nothing has
  // leaked.
  void ExpectNothingLeaks() {
    for (auto& [tier, faults] : faults_) faults.Set({});
    AwaitServing();
    EXPECT_TRUE(Eventually([&] {
      for (uint8_t tier = 0; tier < Status().tiers_size(); ++tier) {
        EXPECT_TRUE(store_->Trim(blocks::TierIndex(tier), "", Bytes(0)).ok());
      }
      const v1::GetStatusResponse status = Status();
      for (const v1::TierMemory& tier : status.tiers()) {
        if (tier.used_bytes() != tier.quarantined_bytes() || tier.in_flight() > 0) return false;
      }
      return true;
    })) << Status().DebugString();
    const absl::Status consistent = store_->CheckConsistency();
    EXPECT_TRUE(consistent.ok()) << consistent;
  }

  std::string folder_;
  uint64_t last_request_ = 1000;
  std::atomic<bool> no_memory_ = false;
  std::shared_ptr<const ProcessHandle> self_;
  HandOverTable hand_overs_{Clock::Real(), 64};
  // By tier, as in the configuration.
  std::map<std::string, FaultInjector> faults_;
  std::unique_ptr<BlockStore> store_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_BLOCKS_TESTING_BLOCK_STORE_FIXTURE_H_
