// Random calls, results and faults; after each one everything is recounted, and what is served is
// compared with what was committed.
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "broker/core/blocks/block_directory.h"
#include "broker/core/blocks/event_follower.h"
#include "broker/core/blocks/simulated_store.h"
#include "broker/core/cache/queue_policies.h"
#include "broker/core/cache/score_policies.h"
#include "gtest/gtest.h"

namespace palimpsest::blocks {
namespace {

constexpr uint32_t kTenants = 2;
constexpr uint32_t kSessions = 4;
constexpr Bytes kBlock = KiB(4);

DirectoryOptions Options() {
  DirectoryOptions options;
  options.arena = {.max_chunks = 5, .chunk_bytes = kBlock * 6, .unit = kBlock};
  options.lower = {{.name = "cxl", .capacity = kBlock * 20, .unit = kBlock},
                   {.name = "nvme", .capacity = kBlock * 60, .unit = kBlock}};
  options.max_loads = 3;
  options.max_queued_loads = 8;
  options.max_stores = 4;
  options.low_water = 0.1;
  options.history = 64;
  options.events = 256;
  options.max_waits = 4;
  return options;
}

PolicyMaker MakerOf(uint64_t seed) {
  switch (seed % 3) {
    case 0:
      return nullptr;
    case 1:
      return [](TierIndex) { return std::make_unique<cache::LruPolicy>(); };
    default:
      return [](TierIndex) { return std::make_unique<cache::S3FifoPolicy>(24); };
  }
}

class Fuzzer {
 public:
  explicit Fuzzer(uint64_t seed)
      : random_(seed), store_(Options(), absl::UnixEpoch() + absl::Hours(1)) {
    for (uint32_t i = 0; i < kTenants; ++i) {
      BlockTenant tenant = {.id = TenantId(i), .name = NameOf(i), .policy = MakerOf(seed)};
      tenant.budgets = {kBlock * 6 * 4, kBlock * 16};
      store_.names[tenant.id] = tenant.name;
      EXPECT_EQ(store_.directory.AddTenant(tenant, store_.now), absl::OkStatus());
    }
    for (uint8_t tier = 1; tier <= 2; ++tier) SetServing(TierIndex(tier), true);
  }

  void Run(int steps) {
    for (int i = 0; i < steps; ++i) {
      Step();
      Collect();
      Check();
      if (testing::Test::HasFailure()) {
        ADD_FAILURE() << "step " << i;
        return;
      }
    }
    End();
  }

  uint64_t promoted() const { return promoted_; }
  uint64_t demoted() const { return demoted_; }
  uint64_t waited() const { return waited_; }
  uint64_t overdue() const { return overdue_; }
  uint64_t prefetched() const { return prefetched_; }
  uint64_t moved_down() const { return moved_down_; }
  uint64_t left_out() const { return left_out_; }
  uint64_t from_others() const { return from_others_; }

 private:
  struct Pin {
    ArenaExtent extent;
    uint64_t bytes = 0;
  };
  struct Request {
    std::vector<BlockIdentity> path;
    std::vector<Pin> pins;
    std::map<WaitId, AcquireRequest> waits;
  };
  struct Session {
    TenantId tenant;
    std::map<uint64_t, Request> requests;
    std::map<BlockKey, std::pair<BlockIdentity, ArenaExtent>> writing;
    std::set<uint32_t> mapped;
  };

  static std::string NameOf(uint32_t tenant) { return tenant == 0 ? "anna" : "berta"; }
  uint64_t Roll(uint64_t below) { return random_() % below; }

  // Of a small tree of sequences; one of 40 with tokens of its own, so that its key collides.
  std::vector<BlockIdentity> RollPath(TenantId tenant) {
    std::vector<BlockIdentity> path;
    BlockKey parent{tenant.value() + 1, 0};
    uint64_t name = 0;
    for (uint64_t i = 3 + Roll(6); i > 0; --i) {
      name = name * 4 + (path.size() < 4 ? Roll(2) : 0) + 1;
      BlockIdentity id = {.key = {tenant.value() + 1, name}, .parent = parent};
      id.tokens = {static_cast<TokenId>(Roll(40) == 0 ? 7 : name)};
      id.tenant = NameOf(tenant.value());
      parent = id.key;
      path.push_back(id);
    }
    return path;
  }

  void SetServing(TierIndex tier, bool serving) {
    TierState state = {.serving = serving};
    state.load = {.latency = absl::Microseconds(100 * tier.value()), .bytes_per_second = 1e9};
    state.store = state.load;
    store_.directory.OnTierState(tier, state, store_.now);
  }

  void Collect() {
    store_.Collect();
    for (auto& [wait, reply] : store_.answers) {
      for (auto& [id, session] : sessions_) {
        for (auto& [number, request] : session.requests) {
          const auto found = request.waits.find(wait);
          if (found == request.waits.end()) continue;
          Serve(request, found->second, reply);
          request.waits.erase(found);
          ++waited_;
        }
      }
    }
    store_.answers.clear();
    for (const SessionId id : std::exchange(store_.overdue_sessions, {})) {
      ++overdue_;
      Close(id);
    }
  }

  // What a session gets is what was committed, for that very block.
  void Serve(Request& request, const AcquireRequest& wanted, const AcquireReply& reply) {
    ASSERT_GE(reply.first, wanted.held);
    ASSERT_LE(reply.kept, wanted.held);
    if (wanted.window == 0) {
      ASSERT_EQ(reply.first, wanted.held);
    } else {
      ASSERT_LE(reply.elsewhere.size(), 1);
      // A window as a whole, or what continues the held blocks.
      ASSERT_LE(reply.blocks.size(), wanted.window);
      ASSERT_TRUE(reply.first == wanted.held || reply.blocks.size() == wanted.window);
    }
    size_t end = reply.first + reply.blocks.size();
    for (const Elsewhere& run : reply.elsewhere) end += run.blocks;
    ASSERT_LE(end, request.path.size());
    left_out_ += reply.first > wanted.held ? 1 : 0;
    for (size_t i = 0; i < reply.blocks.size(); ++i) {
      const auto& block = reply.blocks[i];
      const uint64_t bytes = store_.BytesAt(block.extent);
      ASSERT_EQ(bytes, block.checksum) << "other bytes than those that were committed";
      ASSERT_TRUE(committed_.contains(bytes));
      ASSERT_TRUE(committed_[bytes] == request.path[reply.first + i]) << "another block's bytes";
      ASSERT_FALSE(purged_.contains(bytes)) << "served after a purge";
      request.pins.push_back({block.extent, bytes});
      from_others_ += by_others_.contains(bytes) ? 1 : 0;
    }
  }

  void Check() {
    ASSERT_EQ(store_.directory.CheckConsistency(), absl::OkStatus());
    for (uint8_t tier = 1; tier <= 2; ++tier) {
      uint64_t own = 0;
      for (uint32_t i = 0; i < kTenants; ++i) {
        const TierCounters counters = store_.directory.CountersOf(TenantId(i), TierIndex(tier));
        own += counters.blocks - counters.foreign;
      }
      ASSERT_LE(own, store_.tiers[tier].size()) << "another node's block is accounted for";
    }
    for (const auto& [id, session] : sessions_) {
      for (const auto& [number, request] : session.requests) {
        for (const Pin& pin : request.pins) {
          ASSERT_EQ(store_.BytesAt(pin.extent), pin.bytes) << "a pinned block was overwritten";
        }
      }
    }
    if (Roll(16) == 0) router_.Follow(store_.directory);
  }

  void Step() {
    const SessionId id(1 + Roll(kSessions) + generation_ * kSessions);
    const auto session = sessions_.find(id);
    if ((store_.directory.loads() > 0 && Roll(60) == 0) ||
        (store_.directory.stores() > 0 && Roll(300) == 0)) {
      Purge(TenantId(static_cast<uint32_t>(Roll(kTenants))));
      return;
    }
    switch (Roll(26)) {
      case 24:
      case 25:
        if (Roll(2) == 0) ChangeForeign();
        return;
      case 0:
        Open(id);
        return;
      case 1:
        if (Roll(6) == 0 && session != sessions_.end()) Close(id);
        return;
      case 2:
        store_.now += absl::Milliseconds(static_cast<int64_t>(Roll(3000)));
        store_.directory.Tick(store_.now);
        return;
      case 3:
        if (Roll(4) == 0) Operate();
        return;
      case 4: {
        const auto tier = TierIndex(static_cast<uint8_t>(1 + Roll(2)));
        auto& blocks = store_.tiers[tier.value()];
        if (Roll(3) != 0 || blocks.empty()) return;
        auto lost = blocks.begin();
        std::advance(lost, Roll(blocks.size()));
        store_.Lose(tier, BlockKey(lost->first));
        return;
      }
      case 5:
      case 6:
      case 7:
      case 8:
      case 9:
      case 10:
        PerformOne();
        return;
      default:
        if (session == sessions_.end()) {
          Open(id);
        } else {
          Use(id, session->second);
        }
    }
  }

  // Other nodes store, remove and damage blocks in the lowest tier, and this one notices, or does
  // not, or later.
  void ChangeForeign() {
    constexpr TierIndex kShared(2);
    auto& blocks = store_.foreign[kShared.value()];
    const uint64_t roll = Roll(8);
    if (roll < 3 || blocks.empty()) {
      const auto tenant = TenantId(static_cast<uint32_t>(Roll(kTenants)));
      for (const BlockIdentity& id : RollPath(tenant)) {
        const uint64_t bytes = ++last_bytes_;
        if (!store_.LeaveForeign(kShared, id, kBlock, bytes)) continue;
        committed_[bytes] = id;
        by_others_.insert(bytes);
        if (Roll(4) != 0) store_.TellForeign(kShared, id.key);
      }
      return;
    }
    auto block = blocks.begin();
    std::advance(block, Roll(blocks.size()));
    const BlockKey key = block->first;
    if (roll < 5) {
      store_.TellForeign(kShared, key);
    } else if (roll == 5) {
      block->second.bytes = 0;
    } else if (roll == 6) {
      blocks.erase(block);
    } else {
      store_.LoseForeign(kShared, key);
    }
  }

  void PerformOne() {
    if (store_.pending.empty()) return;
    static constexpr Fault kFaults[] = {Fault::kFailed, Fault::kLate, Fault::kMismatch};
    const Fault fault = Roll(5) == 0 ? kFaults[Roll(3)] : Fault::kNone;
    const size_t i = Roll(store_.pending.size());
    if (const auto* store = std::get_if<StoreBlock>(&store_.pending[i]);
        store != nullptr && fault == Fault::kNone) {
      ++demoted_;
      moved_down_ += store->from == kArenaTier ? 0 : 1;
    }
    if (const auto* load = std::get_if<LoadBlock>(&store_.pending[i]);
        load != nullptr && fault == Fault::kNone) {
      ++promoted_;
    }
    if (const auto* unmap = std::get_if<UnmapChunks>(&store_.pending[i])) {
      const auto session = sessions_.find(unmap->session);
      if (Roll(4) == 0) {
        store_.stubborn.push_back(unmap->session);
      } else if (session != sessions_.end()) {
        for (const ArenaChunkId chunk : unmap->chunks) session->second.mapped.erase(chunk.value());
      }
    }
    store_.Perform(i, fault);
  }

  void Operate() {
    const auto tenant = TenantId(static_cast<uint32_t>(Roll(kTenants)));
    const auto tier = TierIndex(static_cast<uint8_t>(Roll(3)));
    const Bytes bytes = kBlock * static_cast<int64_t>(Roll(30));
    switch (Roll(8)) {
      case 0:
        ASSERT_TRUE(store_.directory.SetBudget(tenant, tier, bytes, store_.now).ok());
        return;
      case 1:
        ASSERT_TRUE(store_.directory.SetCapacity(tier, bytes * 2, store_.now).ok());
        return;
      case 2:
        ASSERT_TRUE(store_.directory.Trim(tenant, tier, bytes, store_.now).ok());
        return;
      case 3:
        if (Roll(3) == 0) Purge(tenant);
        return;
      case 4:
        SetServing(TierIndex(static_cast<uint8_t>(1 + Roll(2))), Roll(3) != 0);
        return;
      default:
        ASSERT_TRUE(store_.directory.SetBudget(tenant, tier, kBlock * 24, store_.now).ok());
        ASSERT_TRUE(store_.directory.SetCapacity(tier, kBlock * 48, store_.now).ok());
    }
  }

  void Purge(TenantId tenant) {
    ASSERT_TRUE(store_.directory.Purge(tenant, store_.now).ok());
    ASSERT_TRUE(store_.directory.Purging(tenant));
    for (const auto& [bytes, id] : committed_) {
      if (id.tenant == NameOf(tenant.value())) purged_.insert(bytes);
    }
    for (const auto& [id, session] : sessions_) {
      if (session.tenant != tenant) continue;
      for (const auto& [key, block] : session.writing) {
        doomed_.insert(store_.BytesAt(block.second));
      }
    }
  }

  void Open(SessionId id) {
    const auto tenant = TenantId(static_cast<uint32_t>(Roll(kTenants)));
    const bool known = sessions_.contains(id);
    ASSERT_EQ(store_.directory.OpenSession(id, tenant, store_.now).ok(), !known);
    if (!known) sessions_[id].tenant = tenant;
  }

  void Close(SessionId id) {
    ASSERT_EQ(store_.directory.CloseSession(id, store_.now), absl::OkStatus());
    sessions_.erase(id);
    if (sessions_.empty()) ++generation_;
  }

  void Use(SessionId id, Session& session) {
    const uint64_t number = 1 + Roll(4);
    const auto request = session.requests.find(number);
    switch (Roll(13)) {
      case 0:
      case 1:
        Acquire(id, session, number);
        return;
      case 8:
        Hint(id, session);
        return;
      case 2:
        Reserve(id, session, number);
        return;
      case 3:
      case 4:
        Commit(id, session);
        return;
      case 5:
        if (session.writing.empty()) return;
        ASSERT_TRUE(
            store_.directory.Abort(id, {session.writing.begin()->first, BlockKey{9, 9}}, store_.now)
                .ok());
        session.writing.erase(session.writing.begin());
        return;
      case 6:
        if (request != session.requests.end()) Release(id, number, request->second);
        return;
      default:
        if (request != session.requests.end() && Roll(3) == 0 && !request->second.waits.empty()) {
          const WaitId wait = request->second.waits.begin()->first;
          store_.directory.CancelWait(id, wait, store_.now);
          request->second.waits.erase(wait);
          return;
        }
        EndRequest(id, session, number);
    }
  }

  CacheAction RollAction() {
    CacheAction action = {.kind = static_cast<CacheAction::Kind>(Roll(4)),
                          .until = store_.now + absl::Seconds(static_cast<int64_t>(Roll(10)))};
    if (Roll(2) == 0) action.half_life = absl::Seconds(2);
    if (Roll(2) == 0) action.budget = kBlock * static_cast<int64_t>(Roll(4));
    action.priority = static_cast<uint32_t>(Roll(3));
    return action;
  }

  void Hint(SessionId id, Session& session) {
    const std::vector<BlockIdentity> path = RollPath(session.tenant);
    BlockHint hint = {.action = RollAction()};
    if (Roll(3) == 0) {
      hint.conversation = cache::ConversationId(1 + Roll(5));
    } else {
      hint.ids = path;
      hint.first = Roll(path.size() + 1);
    }
    ASSERT_EQ(store_.directory.Hint(id, hint, store_.now).status(), absl::OkStatus());
  }

  static std::optional<absl::Duration> IdleOf(uint64_t roll) {
    if (roll == 0) return std::nullopt;
    return absl::Seconds(static_cast<int64_t>(roll * roll * roll) - 1);
  }

  void EndRequest(SessionId id, Session& session, uint64_t number) {
    session.requests.erase(number);
    RequestEnding ending = {.request = number,
                            .how = static_cast<cache::Ending>(Roll(3)),
                            .output_tokens = static_cast<int64_t>(Roll(1000)),
                            .expected_idle = IdleOf(Roll(4)),
                            .last_turn = Roll(8) == 0};
    if (Roll(4) == 0) ending.then = RollAction();
    ASSERT_TRUE(store_.directory.EndRequest(id, ending, store_.now).ok());
  }

  void Acquire(SessionId id, Session& session, uint64_t number) {
    auto& request = session.requests[number];
    if (request.path.empty()) request.path = RollPath(session.tenant);
    AcquireRequest wanted = {.request = number, .ids = request.path};
    wanted.conversation = cache::ConversationId(Roll(5));
    wanted.held = Roll(3) == 0 ? Roll(request.path.size() + 1) : 0;
    wanted.window = Roll(2) == 0 ? 1 + Roll(4) : 0;
    wanted.promote = Roll(2) == 0;
    if (Roll(2) == 0 && request.waits.size() < 2) {
      wanted.deadline = store_.now + absl::Seconds(static_cast<int64_t>(Roll(5)));
    }
    const auto reply = store_.directory.Acquire(id, wanted, store_.now);
    if (absl::IsResourceExhausted(reply.status())) return;
    ASSERT_EQ(reply.status(), absl::OkStatus());
    if (reply->wait.has_value()) {
      request.waits[*reply->wait] = wanted;
    } else {
      Serve(request, wanted, *reply);
    }
    Map(id, session);
  }

  void Map(SessionId id, Session& session) {
    const auto chunk = ArenaChunkId(static_cast<uint32_t>(Roll(5)));
    const bool granted = store_.directory.arena().state(chunk) == ArenaChunkState::kGranted &&
                         store_.directory.arena().tenant(chunk) == session.tenant;
    ASSERT_EQ(store_.directory.Map(id, {chunk}).ok(), granted);
    if (granted) session.mapped.insert(chunk.value());
  }

  void Reserve(SessionId id, Session& session, uint64_t number) {
    const auto request = session.requests.find(number);
    std::vector<BlockIdentity> path = request == session.requests.end() || Roll(4) == 0
                                          ? RollPath(session.tenant)
                                          : request->second.path;
    std::vector<ArenaLedger::Wanted> wanted;
    for (size_t i = Roll(path.size()); i < path.size(); ++i) wanted.push_back({path[i], kBlock});
    const auto reserved = store_.directory.Reserve(id, number, wanted, store_.now);
    ASSERT_EQ(reserved.status(), absl::OkStatus());
    ASSERT_LE(reserved->size(), wanted.size());
    for (size_t i = 0; i < reserved->size(); ++i) {
      if ((*reserved)[i].result != Reservation::kReserved) continue;
      session.writing[wanted[i].id.key] = {wanted[i].id, (*reserved)[i].extent};
      store_.BytesAt((*reserved)[i].extent) = ++last_bytes_;
    }
  }

  void Commit(SessionId id, Session& session) {
    std::vector<ArenaLedger::Committed> blocks;
    for (const auto& [key, block] : session.writing) {
      if (Roll(2) == 0) blocks.push_back({key, store_.BytesAt(block.second)});
    }
    const bool wrong = Roll(8) == 0;
    if (wrong) blocks.push_back({{999, 999}, 0});
    for (const auto& block : blocks) {
      if (wrong) break;
      committed_[block.checksum] = session.writing[block.key].first;
      if (doomed_.contains(block.checksum)) purged_.insert(block.checksum);
    }
    ASSERT_EQ(store_.directory.Commit(id, blocks, store_.now).ok(), !wrong);
    if (wrong) return;
    for (const auto& block : blocks) session.writing.erase(block.key);
  }

  void Release(SessionId id, uint64_t number, Request& request) {
    std::vector<ArenaExtent> extents;
    std::vector<Pin> left = request.pins;
    while (!left.empty() && Roll(4) != 0) {
      extents.push_back(left.back().extent);
      left.pop_back();
    }
    // Waits hold pins of their own, so one more of an extent may be there to release by a guess.
    ASSERT_EQ(store_.directory.Release(id, number, extents, store_.now), absl::OkStatus());
    request.pins = std::move(left);
  }

  void End() {
    while (!sessions_.empty()) Close(sessions_.begin()->first);
    for (uint8_t tier = 1; tier <= 2; ++tier) SetServing(TierIndex(tier), true);
    store_.PerformAll();
    for (uint32_t i = 0; i < kTenants; ++i) Purge(TenantId(i));
    store_.PerformAll();
    for (int i = 0; i < 3; ++i) {
      store_.now += absl::Seconds(30);
      store_.directory.Tick(store_.now);
      store_.PerformAll();
    }
    ASSERT_EQ(store_.directory.CheckConsistency(), absl::OkStatus());
    EXPECT_EQ(store_.directory.loads(), 0);
    EXPECT_EQ(store_.directory.stores(), 0);
    for (uint32_t i = 0; i < kTenants; ++i) {
      EXPECT_FALSE(store_.directory.Purging(TenantId(i)));
      const prefetch::PrefetchCounts prefetches = store_.directory.PrefetchesOf(TenantId(i));
      EXPECT_EQ(prefetches.fetched, prefetches.used + prefetches.wasted);
      prefetched_ += static_cast<uint64_t>(prefetches.fetched);
      for (uint8_t tier = 0; tier < 3; ++tier) {
        const TierCounters counters = store_.directory.CountersOf(TenantId(i), TierIndex(tier));
        EXPECT_EQ(counters.used, Bytes(0)) << "tier " << int{tier} << " leaked";
        EXPECT_EQ(counters.blocks, 0);
        EXPECT_EQ(counters.foreign, 0);
        EXPECT_LE(counters.promotions_wasted, counters.promotions_done);
      }
      ASSERT_TRUE(store_.directory.SetBudget(TenantId(i), kArenaTier, Bytes(0), store_.now).ok());
    }
    store_.PerformAll();
    EXPECT_EQ(store_.directory.arena().Count(ArenaChunkState::kFree), 5) << "a chunk leaked";
    EXPECT_TRUE(store_.tiers[1].empty() && store_.tiers[2].empty());
    EXPECT_TRUE(store_.directory.Snapshot().empty());
  }

  std::mt19937_64 random_;
  SimulatedStore store_;
  std::map<SessionId, Session> sessions_;
  uint64_t generation_ = 0;
  uint64_t last_bytes_ = 0;
  std::map<uint64_t, BlockIdentity> committed_;  // by bytes
  std::set<uint64_t> purged_;
  std::set<uint64_t> doomed_;
  EventFollower router_;
  uint64_t promoted_ = 0, demoted_ = 0, waited_ = 0, overdue_ = 0, prefetched_ = 0, moved_down_ = 0;
  uint64_t left_out_ = 0;
  std::set<uint64_t> by_others_;  // bytes
  uint64_t from_others_ = 0;
};

TEST(BlockDirectoryFuzz, RandomCallsAndFaultsNeitherLeakNorServeWhatIsWrong) {
  uint64_t promoted = 0, demoted = 0, waited = 0, overdue = 0, prefetched = 0, moved_down = 0;
  uint64_t left_out = 0, from_others = 0;
  for (uint64_t seed = 0; seed < 16 && !testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    Fuzzer fuzzer(seed);
    fuzzer.Run(4000);
    promoted += fuzzer.promoted();
    demoted += fuzzer.demoted();
    waited += fuzzer.waited();
    overdue += fuzzer.overdue();
    prefetched += fuzzer.prefetched();
    moved_down += fuzzer.moved_down();
    left_out += fuzzer.left_out();
    from_others += fuzzer.from_others();
  }
  EXPECT_GT(promoted, 80);
  EXPECT_GT(demoted, 300);
  EXPECT_GT(waited, 50);
  EXPECT_GT(overdue, 5);
  EXPECT_GT(prefetched, 5);
  EXPECT_GT(moved_down, 20) << "from one lower tier to the next";
  EXPECT_GT(left_out, 20) << "answers of a window alone";
  EXPECT_GT(from_others, 50) << "blocks that other nodes had stored";
}

}  // namespace
}  // namespace palimpsest::blocks
