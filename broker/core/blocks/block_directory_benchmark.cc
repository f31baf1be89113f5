// What the directory's decisions cost with a million blocks in T1 and as many below: conversations
// of 100 blocks of 16 tokens, ranked by the predictive policy.
#include <benchmark/benchmark.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "broker/core/blocks/block_directory.h"
#include "broker/core/blocks/simulated_store.h"

namespace palimpsest::blocks {
namespace {

constexpr uint64_t kPath = 100;
constexpr Bytes kBlock = KiB(4);
constexpr SessionId kSession(1);
constexpr TenantId kTenant(0);

class Node {
 public:
  explicit Node(uint32_t blocks) : store_(OptionsFor(blocks), absl::UnixEpoch()) {
    BlockTenant tenant = {.id = kTenant, .name = "tenant"};
    tenant.recompute.first = absl::Milliseconds(20);
    store_.names[kTenant] = tenant.name;
    static_cast<void>(store_.directory.AddTenant(tenant, store_.now));
    TierState state = {.serving = true};
    state.load = {.latency = absl::Microseconds(100), .bytes_per_second = 2e9};
    state.store = {.latency = absl::Microseconds(20), .bytes_per_second = 2e9};
    store_.directory.OnTierState(TierIndex(1), state, store_.now);
    static_cast<void>(store_.directory.OpenSession(kSession, kTenant, store_.now));
    store_.PerformAll();
    while (written_ < blocks * 5 / 4) Turn(++sequences_);
  }

  // A request for a new sequence, all of whose blocks are stored.
  void Turn(uint64_t name) { Write(Path(name, kPath)); }
  void Turn() { Turn(++sequences_); }

  void Write(const std::vector<BlockIdentity>& path) {
    Begin(path);
    std::vector<ArenaLedger::Wanted> wanted;
    for (const BlockIdentity& id : path) wanted.push_back({id, kBlock});
    const auto reserved = store_.directory.Reserve(kSession, request_, wanted, store_.now);
    std::vector<ArenaLedger::Committed> committed;
    for (size_t i = 0; i < reserved->size(); ++i) {
      if ((*reserved)[i].result == Reservation::kReserved) committed.push_back({path[i].key, 1});
    }
    static_cast<void>(store_.directory.Commit(kSession, committed, store_.now));
    written_ += path.size();
    End();
    // The tier takes what it gets at once; nothing is copied.
    for (const BlockAction& action : store_.directory.TakeActions()) {
      if (const auto* made = std::get_if<MakeChunk>(&action)) {
        store_.directory.OnChunkMade(made->chunk, absl::OkStatus(), store_.now);
      } else if (const auto* stored = std::get_if<StoreBlock>(&action)) {
        store_.directory.OnStored(stored->to, stored->record, store_.now);
        store_.directory.OnStoreDone(stored->transfer, absl::OkStatus(), store_.now);
      } else if (const auto* removed = std::get_if<RemoveBlock>(&action)) {
        store_.directory.OnRemoved(
            removed->tier, {.id = Path(removed->key.high, removed->key.low).back()}, store_.now);
      }
    }
  }

  static std::vector<BlockIdentity> Path(uint64_t name, uint64_t blocks) {
    std::vector<BlockIdentity> path(blocks);
    for (uint64_t i = 0; i < blocks; ++i) {
      path[i].key = {name, i + 1};
      path[i].parent = {name, i};
      path[i].tokens.assign(16, static_cast<TokenId>(i));
      path[i].tenant = "tenant";
    }
    return path;
  }

  size_t Begin(const std::vector<BlockIdentity>& path) {
    store_.now += absl::Milliseconds(50);
    AcquireRequest request = {.request = ++request_};
    request.ids = path;
    return store_.directory.Acquire(kSession, request, store_.now)->blocks.size();
  }
  void End() {
    static_cast<void>(store_.directory.EndRequest(
        kSession, {.request = request_, .how = cache::Ending::kEndOfTurn}, store_.now));
  }

  const BlockDirectory& directory() const { return store_.directory; }

 private:
  static DirectoryOptions OptionsFor(uint32_t blocks) {
    DirectoryOptions options;
    options.arena = {.max_chunks = blocks / 4096 + 1, .chunk_bytes = kBlock * 4096};
    options.lower = {{.name = "nvme", .capacity = kBlock * blocks}};
    return options;
  }

  SimulatedStore store_;
  uint64_t sequences_ = 0;
  uint64_t request_ = 0;
  uint64_t written_ = 0;
};

Node& MillionBlocks() {
  static auto* const node = new Node(1 << 20);
  return *node;
}

// A request whose 1,000 blocks are all in T1, and its end.
void BM_AcquireThousand(benchmark::State& state) {
  Node& node = MillionBlocks();
  const std::vector<BlockIdentity> path = Node::Path(uint64_t{1} << 40, 1000);
  node.Write(path);
  size_t blocks = 0;
  for (auto _ : state) {
    blocks = node.Begin(path);
    state.PauseTiming();
    node.End();
    state.ResumeTiming();
  }
  state.counters["blocks"] = static_cast<double>(blocks);
}
BENCHMARK(BM_AcquireThousand)->Unit(benchmark::kMicrosecond);

// A request for 100 new blocks in a full T1: learned, ranked, stored, others demoted for them.
void BM_StoreHundred(benchmark::State& state) {
  Node& node = MillionBlocks();
  for (auto _ : state) node.Turn();
  state.SetItemsProcessed(static_cast<int64_t>(state.iterations() * kPath));
}
BENCHMARK(BM_StoreHundred)->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace palimpsest::blocks

BENCHMARK_MAIN();
