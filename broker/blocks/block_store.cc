#include "broker/blocks/block_store.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "broker/blocks/open_tier.h"
#include "broker/blocks/policy_maker.h"
#include "common/log.h"

namespace palimpsest {
namespace {

using blocks::BlockAction;
using blocks::TierIndex;

// How often the tiers' state is looked at.
constexpr absl::Duration kPollPeriod = absl::Milliseconds(100);
constexpr size_t kMostLoads = 64;
constexpr size_t kMostStores = 32;

absl::Status Stopped() { return absl::UnavailableError("the block store is shutting down"); }

Bytes LargestBlock(const BlockStore::Options& options) {
  Bytes largest(1);
  for (const BlockStore::Tenant& tenant : options.tenants) {
    largest = std::max(largest, tenant.block_bytes);
  }
  return largest;
}

// What of a tier with `bytes` is left for tenants: not what its checks need, nor headers of blocks.
Bytes Usable(Bytes bytes, const LowerTierConfig& tier, const BlockStore::Options& options) {
  const Bytes whole = bytes - std::min(bytes / 8, BlockStore::kMostCheckBytes);
  const Bytes block = RoundUp(LargestBlock(options), KiB(4));
  return block * (whole / (block + tier.header));
}

blocks::DirectoryOptions DirectoryOptionsFor(const BlockStore::Options& options) {
  const TiersConfig& tiers = options.tiers;
  blocks::DirectoryOptions out;
  out.arena.max_chunks = static_cast<uint32_t>(tiers.dram.bytes / tiers.dram.chunk_bytes);
  out.arena.chunk_bytes = tiers.dram.chunk_bytes;
  for (const LowerTierConfig& tier : tiers.lower) {
    out.lower.push_back(
        {.name = tier.name, .capacity = Usable(tier.store.capacity, tier, options)});
  }
  // Those that begin hold staging memory until they end.
  const auto buffers = static_cast<size_t>(
      std::max<int64_t>(tiers.staging / RoundUp(LargestBlock(options), KiB(4)), 2));
  out.max_stores = std::clamp<size_t>(buffers / 3, 1, kMostStores);
  out.max_loads = std::clamp<size_t>(buffers - out.max_stores, 1, kMostLoads);
  out.transfer_deadline = tiers.transfer_deadline;
  out.unmap_deadline = tiers.dram.unmap_deadline;
  out.memory_back_off = options.memory_back_off;
  out.events = options.events;
  return out;
}

// As a TransferMeter says it: a bandwidth of 0 cannot be told from an infinite one.
blocks::TransferCost CostOf(absl::Duration latency, double bandwidth) {
  constexpr double kInfinite = 1e18;
  return {latency, bandwidth > 0 ? bandwidth : kInfinite};
}

absl::Status CheckBlocksFit(const BlockStore::Options& options) {
  for (const BlockStore::Tenant& tenant : options.tenants) {
    for (const auto& [name, size] : {std::pair("dram.chunk_bytes", options.tiers.dram.chunk_bytes),
                                     std::pair("staging", options.tiers.staging)}) {
      if (tenant.block_bytes <= size) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("a block of tenant ", tenant.name, " has ", tenant.block_bytes.ToString(),
                       ", more than tiers.", name, " (", size.ToString(), "): raise it"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<BlockStore>> BlockStore::Open(Options options, const Clock& clock,
                                                             HandOverTable& hand_overs) {
  if (absl::Status fits = CheckBlocksFit(options); !fits.ok()) return fits;
  const blocks::DirectoryOptions directory = DirectoryOptionsFor(options);
  if (absl::Status valid = directory.Validate(); !valid.ok()) return valid;
  DramArena::Options arena;
  arena.max_chunks = directory.arena.max_chunks;
  arena.chunk_bytes = directory.arena.chunk_bytes;
  arena.maker = options.chunk_maker;
  std::unique_ptr<BlockStore> store(new BlockStore(std::move(options), clock, hand_overs));
  auto opened = DramArena::Open(arena);
  if (!opened.ok()) return opened.status();
  store->arena_ = *std::move(opened);
  auto staging = StagingPool::Make(store->options_.tiers.staging);
  if (!staging.ok()) return staging.status();
  store->staging_ = *std::move(staging);
  if (const auto& lent = store->options_.tiers.lent; lent.has_value()) {
    auto memory = PeerMemory::Start(*lent);
    if (!memory.ok()) {
      return absl::Status(memory.status().code(),
                          absl::StrCat("tiers.lend: ", memory.status().message()));
    }
    store->lent_ = *std::move(memory);
    Log(LogLevel::kInfo, "memory is lent to other nodes",
        {{"bytes", lent->bytes}, {"address", store->lent_->address()}});
  }
  if (absl::Status added = store->AddTenants(); !added.ok()) return added;
  if (absl::Status tiers = store->OpenTiers(); !tiers.ok()) return tiers;
  return store;
}

BlockStore::BlockStore(Options options, const Clock& clock, HandOverTable& hand_overs)
    : options_(std::move(options)),
      clock_(clock),
      hand_overs_(hand_overs),
      directory_(DirectoryOptionsFor(options_)) {}

absl::Status BlockStore::AddTenants() {
  MutexLock lock(&mu_);
  for (uint32_t i = 0; i < options_.tenants.size(); ++i) {
    const Tenant& tenant = options_.tenants[i];
    blocks::BlockTenant added;
    added.id = TenantId(i);
    added.name = tenant.name;
    std::vector<size_t> capacity;
    for (size_t tier = 0; tier < tenant.budgets.size(); ++tier) {
      const Bytes budget =
          tier == 0 ? tenant.budgets[tier]
                    : Usable(tenant.budgets[tier], options_.tiers.lower[tier - 1], options_);
      added.budgets.push_back(budget);
      capacity.push_back(
          static_cast<size_t>(budget / RoundUp(std::max(tenant.block_bytes, Bytes(1)), KiB(4))));
    }
    added.policy = MakePolicies(options_.tiers.policy, std::move(capacity));
    if (absl::Status status = directory_.AddTenant(added, clock_.Now()); !status.ok()) {
      return status;
    }
  }
  return absl::OkStatus();
}

absl::Status BlockStore::OpenTiers() {
  std::vector<TierStore*> stores;
  std::vector<std::string> names;
  for (const Tenant& tenant : options_.tenants) names.push_back(tenant.name);
  for (size_t i = 0; i < options_.tiers.lower.size(); ++i) {
    const LowerTierConfig& tier = options_.tiers.lower[i];
    observers_.push_back(std::make_unique<Observer>(*this, TierIndex(static_cast<uint8_t>(i + 1))));
    auto opened = OpenTier(tier, names, options_.tier_wrapper, clock_, observers_.back().get());
    if (!opened.ok()) return opened.status();
    stores.push_back(stores_.emplace_back(*std::move(opened)).get());
  }
  mover_ = std::make_unique<BlockMover>(
      BlockMover::Options{}, BlockMover::Parts{clock_, *arena_, *staging_, stores, *this});
  {
    MutexLock lock(&mu_);
    open_ = true;
  }
  for (size_t i = 0; i < stores.size(); ++i) {
    // Under the lock: what happens after this look at the records comes after it here, too.
    Decide([&](absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
      const std::vector<BlockRecord> found = stores[i]->Records();
      Log(LogLevel::kInfo, "tier opened",
          {{"tier", options_.tiers.lower[i].name}, {"blocks", found.size()}});
      directory_.OnRecovered(TierIndex(static_cast<uint8_t>(i + 1)), found, now);
    });
  }
  ticker_ = std::thread([this] { TickLoop(); });
  return absl::OkStatus();
}

BlockStore::~BlockStore() {
  Stop();
  // Their threads still ask whether this has stopped.
  stores_.clear();
}

void BlockStore::Stop() {
  absl::flat_hash_map<blocks::WaitId, Waiter> waiters;
  Effect announce;
  {
    MutexLock lock(&mu_);
    if (std::exchange(stopping_, true)) return;
    announce = Announce();
    waiters.swap(waiters_);
    changed_.SignalAll();
  }
  for (auto& [id, waiter] : waiters) waiter.done(Stopped());
  announce();
  if (ticker_.joinable()) ticker_.join();
  if (mover_ != nullptr) mover_->Stop();
}

void BlockStore::Collect(absl::Time now, std::vector<Effect>& effects) {
  if (!open_) return;
  const absl::Time next = directory_.Tick(now);
  for (BlockAction& action : directory_.TakeActions()) Take(std::move(action), effects);
  if (directory_.events().last() != announced_ && !listeners_.empty()) {
    effects.push_back(Announce());
  }
  if (next < next_tick_) changed_.SignalAll();
  next_tick_ = next;
}

BlockStore::Effect BlockStore::Announce() {
  announced_ = directory_.events().last();
  std::erase_if(listeners_, [](const auto& listener) { return listener.expired(); });
  return [listeners = listeners_] {
    for (const std::weak_ptr<BlockEventListener>& listener : listeners) {
      if (const auto alive = listener.lock()) alive->OnBlockEvents();
    }
  };
}

void BlockStore::Take(BlockAction action, std::vector<Effect>& effects) {
  std::visit(
      [&](auto& typed) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
        using Action = std::decay_t<decltype(typed)>;
        if constexpr (std::is_same_v<Action, blocks::AcquireDone>) {
          effects.push_back(Answer(std::move(typed)));
        } else if constexpr (std::is_same_v<Action, blocks::UnmapChunks>) {
          effects.push_back(AskToUnmap(typed));
        } else if constexpr (std::is_same_v<Action, blocks::SessionOverdue>) {
          effects.push_back(KillOverdue(typed));
        } else if constexpr (std::is_same_v<Action, blocks::PurgeTier>) {
          mover_->Queue(typed, options_.tenants[typed.tenant.value()].name);
        } else {
          mover_->Queue(typed);
        }
      },
      action);
}

BlockStore::Effect BlockStore::Answer(blocks::AcquireDone done) {
  const auto found = waiters_.find(done.wait);
  if (found == waiters_.end()) return [] {};
  AcquireDone answer = std::move(found->second.done);
  waiters_.erase(found);
  return [answer = std::move(answer), reply = std::move(done.reply)]() mutable {
    answer(std::move(reply));
  };
}

BlockStore::Effect BlockStore::AskToUnmap(const blocks::UnmapChunks& unmap) {
  const auto found = sessions_.find(unmap.session);
  if (found == sessions_.end()) return [] {};
  v1::BrokerMessage message;
  v1::UnmapChunks& out = *message.mutable_unmap_chunks();
  for (const ArenaChunkId chunk : unmap.chunks) out.add_chunk_ids(chunk.value());
  out.set_deadline_seconds(
      absl::ToDoubleSeconds(std::max(unmap.deadline - clock_.Now(), absl::ZeroDuration())));
  return [stream = found->second.session.stream, message = std::move(message)]() mutable {
    stream->Send(std::move(message));
  };
}

BlockStore::Effect BlockStore::KillOverdue(const blocks::SessionOverdue& overdue) {
  const auto found = sessions_.find(overdue.session);
  if (found == sessions_.end()) return [] {};
  return [session = found->second.session, why = overdue.why] {
    Log(LogLevel::kWarning, "worker killed",
        {{"session", session.id}, {"pid", session.process->pid()}, {"why", why}});
    if (const absl::Status killed = session.process->Kill(); !killed.ok()) {
      Log(LogLevel::kError, "a worker cannot be killed; its chunks stay",
          {{"pid", session.process->pid()}, {"error", killed}});
    }
  };
}

void BlockStore::TickLoop() {
  while (true) {
    PollTiers();
    MutexLock lock(&mu_);
    if (stopping_) return;
    const absl::Duration nap = std::min(next_tick_ - clock_.Now(), kPollPeriod);
    if (nap > absl::ZeroDuration()) changed_.WaitWithTimeout(&mu_, nap);
    if (stopping_) return;
  }
}

void BlockStore::PollTiers() {
  std::vector<blocks::TierState> states;
  for (const auto& store : stores_) {
    const TierStatus status = store->status();
    blocks::TierState& state = states.emplace_back();
    // It closes when the first probe has measured the tier.
    state.serving = status.breaker == CircuitBreaker::State::kClosed;
    state.load = CostOf(status.load_latency, status.load_bandwidth);
    state.store = CostOf(status.store_latency, status.store_bandwidth);
  }
  Decide([&](absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    for (size_t i = 0; i < states.size(); ++i) {
      directory_.OnTierState(TierIndex(static_cast<uint8_t>(i + 1)), states[i], now);
    }
    states_ = std::move(states);
  });
}

void BlockStore::OnStored(TierIndex tier, const BlockRecord& record) {
  if (record.id.key.high == check_keys_) return;
  Decide([&](absl::Time now)
             ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { directory_.OnStored(tier, record, now); });
}

void BlockStore::OnForeign(TierIndex tier, const BlockRecord& record) {
  Decide([&](absl::Time now)
             ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { directory_.OnForeign(tier, record, now); });
}

void BlockStore::OnRemoved(TierIndex tier, const BlockRecord& record) {
  if (record.id.key.high == check_keys_) return;
  Decide([&](absl::Time now)
             ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { directory_.OnRemoved(tier, record, now); });
}

void BlockStore::OnChunkMade(ArenaChunkId chunk, const absl::Status& status) {
  if (!status.ok()) {
    Log(LogLevel::kWarning, "no memory for a chunk of DRAM",
        {{"chunk", chunk}, {"status", status}});
  }
  Decide([&](absl::Time now)
             ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { directory_.OnChunkMade(chunk, status, now); });
}

void BlockStore::OnChunkRetired(ArenaChunkId chunk) {
  Decide([&](absl::Time now)
             ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { directory_.OnChunkRetired(chunk, now); });
}

void BlockStore::OnLoaded(blocks::TransferId transfer, const absl::Status& status) {
  Decide([&](absl::Time now)
             ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { directory_.OnLoaded(transfer, status, now); });
}

void BlockStore::OnStoreDone(blocks::TransferId transfer, const absl::Status& status) {
  Decide([&](absl::Time now)
             ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { directory_.OnStoreDone(transfer, status, now); });
}

void BlockStore::OnPurged(blocks::PurgeId purge, const absl::Status& status) {
  Decide([&](absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    directory_.OnPurged(purge, status, now);
    changed_.SignalAll();
  });
}

// Sessions.

std::string BlockStore::Attached(const Session& session) {
  std::string token = Token::Random().ToBytes().substr(0, kTokenBytes);
  Decide([&](absl::Time now, std::vector<Effect>& effects) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    Close(session.id, now, effects);
    const absl::Status opened = directory_.OpenSession(session.id, session.tenant, now);
    if (!opened.ok()) {
      Log(LogLevel::kError, "a session has no block store",
          {{"session", session.id}, {"status", opened}});
      return;
    }
    sessions_[session.id] = Known{session, token};
  });
  return token;
}

void BlockStore::ChunksUnmapped(SessionId session, const SessionStream& stream,
                                absl::Span<const uint32_t> chunks) {
  Decide([&](absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const auto found = sessions_.find(session);
    if (found == sessions_.end() || found->second.session.stream.get() != &stream) return;
    for (const uint32_t chunk : chunks) {
      // Where an answer crossed the worker's it still uses the chunk, and will say so once more.
      const ArenaChunkId id(chunk);
      (void)directory_.OnUnmapped(session, {&id, 1}, now);
    }
  });
}

void BlockStore::Ended(SessionId session) {
  Decide([&](absl::Time now, std::vector<Effect>& effects)
             ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { Close(session, now, effects); });
}

void BlockStore::Close(SessionId session, absl::Time now, std::vector<Effect>& effects) {
  if (sessions_.erase(session) == 0) return;
  (void)directory_.CloseSession(session, now);
  for (auto waiter = waiters_.begin(); waiter != waiters_.end();) {
    const auto next = std::next(waiter);
    if (waiter->second.session == session) {
      effects.emplace_back([done = std::move(waiter->second.done)]() mutable {
        done(absl::UnauthenticatedError("the session has ended, or was attached again"));
      });
      waiters_.erase(waiter);
    }
    waiter = next;
  }
}

}  // namespace palimpsest
