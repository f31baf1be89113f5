// A node's memory, lower tiers and server for tests of the block directory: carries out its actions
// when it is told to, in any order, with whatever faults are asked for. Memory and tiers hold one
// number instead of a block's bytes, which is its checksum as well.
#ifndef PALIMPSEST_BROKER_CORE_BLOCKS_SIMULATED_STORE_H_
#define PALIMPSEST_BROKER_CORE_BLOCKS_SIMULATED_STORE_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "broker/core/blocks/block_directory.h"

namespace palimpsest::blocks {

enum class Fault {
  kNone,
  kFailed,    // an error; nothing happened
  kLate,      // DeadlineExceeded; a store has happened nevertheless
  kMismatch,  // the source has not the bytes that it should have
};

class SimulatedStore {
 public:
  struct Stored {
    BlockRecord record;
    uint64_t bytes = 0;
  };

  SimulatedStore(const DirectoryOptions& options, absl::Time start)
      : now(start),
        directory(options),
        tiers(options.lower.size() + 1),
        foreign(options.lower.size() + 1) {}

  // Takes the directory's actions into `pending`, answers into `answers`.
  void Collect() {
    for (BlockAction& action : directory.TakeActions()) {
      if (auto* done = std::get_if<AcquireDone>(&action)) {
        answers[done->wait] = std::move(done->reply);
      } else if (const auto* overdue = std::get_if<SessionOverdue>(&action)) {
        overdue_sessions.push_back(overdue->session);
      } else {
        pending.push_back(std::move(action));
      }
    }
  }

  // Carries out the i-th pending action.
  void Perform(size_t i, Fault fault = Fault::kNone) {
    const BlockAction action = std::move(pending[i]);
    pending.erase(pending.begin() + static_cast<ptrdiff_t>(i));
    std::visit([&](const auto& what) { Do(what, fault); }, action);
    Collect();
  }

  // All of them and what follows, without faults. UnmapChunks are answered if `unmap`.
  void PerformAll(bool unmap = true) {
    Collect();
    for (size_t i = 0; i < pending.size();) {
      if (!unmap && std::holds_alternative<UnmapChunks>(pending[i])) {
        ++i;
        continue;
      }
      Perform(i);
      i = 0;
    }
  }

  // A tier loses a block by itself: it expired, or was found to be corrupt.
  void Lose(TierIndex tier, const BlockKey& key) { Vanish(tiers[tier.value()], tier, key); }

  // Another node stores a block in a tier, unless that has it; whether and when this one finds it
  // is TellForeign's.
  bool LeaveForeign(TierIndex tier, const BlockIdentity& id, Bytes length, uint64_t bytes) {
    if (tiers[tier.value()].contains(id.key)) return false;
    const BlockRecord record = {.id = id, .length = length, .checksum = bytes};
    return foreign[tier.value()].emplace(id.key, Stored{record, bytes}).second;
  }
  void TellForeign(TierIndex tier, const BlockKey& key) {
    directory.OnForeign(tier, foreign[tier.value()].at(key).record, now);
    Collect();
  }
  // The other node removes it, and this one notices.
  void LoseForeign(TierIndex tier, const BlockKey& key) {
    Vanish(foreign[tier.value()], tier, key);
  }

  uint64_t& BytesAt(const ArenaExtent& extent) {
    return memory[{extent.chunk.value(), extent.offset.count()}];
  }

  absl::Time now;
  BlockDirectory directory;
  std::map<std::pair<uint32_t, int64_t>, uint64_t> memory;
  std::vector<std::map<BlockKey, Stored>> tiers;  // by TierIndex; T1's is empty
  // What other nodes have in them.
  std::vector<std::map<BlockKey, Stored>> foreign;
  std::vector<BlockAction> pending;
  std::map<WaitId, AcquireReply> answers;
  std::vector<SessionId> overdue_sessions;
  // Sessions that refuse to unmap.
  std::vector<SessionId> stubborn;
  std::map<TenantId, std::string> names;

 private:
  void Vanish(std::map<BlockKey, Stored>& blocks, TierIndex tier, const BlockKey& key) {
    const auto found = blocks.find(key);
    if (found == blocks.end()) return;
    const BlockRecord record = found->second.record;
    blocks.erase(found);
    directory.OnRemoved(tier, record, now);
    Collect();
  }

  void Do(const MakeChunk& action, Fault fault) {
    directory.OnChunkMade(
        action.chunk,
        fault == Fault::kNone ? absl::OkStatus() : absl::ResourceExhaustedError("no memory"), now);
  }
  void Do(const RetireChunk& action, Fault) {
    memory.erase(memory.lower_bound({action.chunk.value(), 0}),
                 memory.lower_bound({action.chunk.value() + 1, 0}));
    directory.OnChunkRetired(action.chunk, now);
  }
  void Do(const UnmapChunks& action, Fault) {
    for (const SessionId session : stubborn) {
      if (session == action.session) return;
    }
    static_cast<void>(directory.OnUnmapped(action.session, action.chunks, now));
  }
  void Do(const SessionOverdue&, Fault) {}
  void Do(const AcquireDone&, Fault) {}

  void Do(const LoadBlock& action, Fault fault) {
    absl::Status status;
    const BlockKey& key = action.record.id.key;
    const bool own = tiers[action.from.value()].contains(key);
    auto& blocks = own ? tiers[action.from.value()] : foreign[action.from.value()];
    const auto found = blocks.find(key);
    if (fault == Fault::kFailed) {
      status = absl::UnavailableError("it failed");
    } else if (found == blocks.end() || found->second.record.id != action.record.id) {
      status = absl::NotFoundError("no such block");
      // A store forgets what another node had.
      if (found == blocks.end()) directory.OnRemoved(action.from, action.record, now);
    } else if (fault == Fault::kLate) {
      status = absl::DeadlineExceededError("late");
      BytesAt(action.to) = found->second.bytes;
    } else if (fault == Fault::kMismatch || found->second.bytes != action.record.checksum) {
      status = absl::DataLossError("wrong bytes");
      BytesAt(action.to) = 0;
      if (own) {
        Lose(action.from, key);
      } else {
        directory.OnRemoved(action.from, action.record, now);
      }
    } else {
      BytesAt(action.to) = found->second.bytes;
    }
    directory.OnLoaded(action.transfer, status, now);
  }

  void Do(const StoreBlock& action, Fault fault) {
    directory.OnStoreDone(action.transfer, Store(action, fault), now);
  }
  absl::Status Store(const StoreBlock& action, Fault fault) {
    uint64_t bytes = 0;
    if (action.extent.has_value()) {
      bytes = BytesAt(*action.extent);
    } else {
      const auto& from = tiers[action.from.value()];
      const auto found = from.find(action.record.id.key);
      if (found == from.end()) return absl::NotFoundError("no such block");
      bytes = found->second.bytes;
    }
    if (fault == Fault::kFailed) return absl::UnavailableError("it failed");
    if (fault == Fault::kMismatch || bytes != action.record.checksum) {
      return absl::DataLossError("wrong bytes");
    }
    auto& to = tiers[action.to.value()];
    if (to.contains(action.record.id.key) ||
        foreign[action.to.value()].contains(action.record.id.key)) {
      return absl::AlreadyExistsError("it is there");
    }
    to[action.record.id.key] = {action.record, bytes};
    directory.OnStored(action.to, action.record, now);
    return fault == Fault::kLate ? absl::DeadlineExceededError("late") : absl::OkStatus();
  }

  void Do(const RemoveBlock& action, Fault) { Lose(action.tier, action.key); }
  void Do(const PurgeTier& action, Fault fault) {
    if (fault != Fault::kNone) {
      directory.OnPurged(action.purge, absl::UnavailableError("it failed"), now);
      return;
    }
    std::vector<BlockKey> keys;
    for (const auto& [key, stored] : tiers[action.tier.value()]) {
      if (stored.record.id.tenant == names[action.tenant]) keys.push_back(key);
    }
    for (const BlockKey& key : keys) Lose(action.tier, key);
    // Those of other nodes are of an earlier generation now, which is known to whoever loads them.
    std::erase_if(foreign[action.tier.value()], [&](const auto& block) {
      return block.second.record.id.tenant == names[action.tenant];
    });
    directory.OnPurged(action.purge, absl::OkStatus(), now);
  }
};

}  // namespace palimpsest::blocks

#endif  // PALIMPSEST_BROKER_CORE_BLOCKS_SIMULATED_STORE_H_
