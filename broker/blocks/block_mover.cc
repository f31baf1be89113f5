#include "broker/blocks/block_mover.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/block_checksum.h"
#include "common/log.h"

namespace palimpsest {

using blocks::LoadBlock;
using blocks::StoreBlock;

BlockMover::BlockMover(const Options& options, Parts parts)
    : options_(options),
      parts_(std::move(parts)),
      beginning_(options.threads),
      ending_(options.threads) {
  for (TierStore* store : parts_.stores) tiers_.push_back(std::make_unique<Tier>(store));
  MutexLock lock(&shared_->mu);
  shared_->mover = this;
}

void BlockMover::Stop() {
  {
    MutexLock lock(&shared_->mu);
    shared_->mover = nullptr;
  }
  parts_.staging.Close();
  chunks_.Stop();
  beginning_.Stop();
  ending_.Stop();
}

TierStore::Done BlockMover::Then(absl::AnyInvocable<void(BlockMover&, absl::Status)> then) {
  return [shared = shared_, then = std::move(then)](absl::Status status) mutable {
    MutexLock lock(&shared->mu);
    BlockMover* const mover = shared->mover;
    if (mover == nullptr) return;
    mover->ending_.Push([mover, then = std::move(then), status = std::move(status)]() mutable {
      then(*mover, std::move(status));
    });
  };
}

absl::Duration BlockMover::Patience(absl::Time deadline) const {
  return std::max(deadline - parts_.clock.Now(), absl::ZeroDuration());
}

void BlockMover::Queue(const blocks::MakeChunk& make) {
  chunks_.Push([this, chunk = make.chunk] {
    parts_.listener.OnChunkMade(chunk, parts_.arena.Create(chunk));
  });
}

void BlockMover::Queue(const blocks::RetireChunk& retire) {
  chunks_.Push(
      [this, chunk = retire.chunk] {
        if (const absl::Status status = parts_.arena.Retire(chunk); !status.ok()) {
          Log(LogLevel::kError, "a chunk of DRAM cannot be given up",
              {{"chunk", chunk}, {"status", status}});
        }
        parts_.listener.OnChunkRetired(chunk);
      },
      /*urgent=*/true);
}

void BlockMover::Queue(const LoadBlock& load) {
  beginning_.Push([this, load] { Load(load); }, /*urgent=*/true);
}

void BlockMover::Queue(const StoreBlock& store) {
  Tier& tier = At(store.to);
  Storing storing{store, 0};
  {
    MutexLock lock(&tier.mu);
    storing.purges = tier.purges[store.record.id.tenant];
  }
  beginning_.Push([this, storing = std::move(storing)] { Store(storing); });
}

void BlockMover::Queue(const blocks::RemoveBlock& remove) {
  beginning_.Push([this, remove] { At(remove.tier).store->Remove(remove.key); }, /*urgent=*/true);
}

void BlockMover::Queue(const blocks::PurgeTier& purge, const std::string& tenant) {
  {
    MutexLock lock(&At(purge.tier).mu);
    ++At(purge.tier).purges[tenant];
  }
  beginning_.Push([this, purge, tenant] { Purge(purge, tenant); }, /*urgent=*/true);
}

void BlockMover::Load(const LoadBlock& load) {
  absl::StatusOr<PinnedBytes<std::byte>> buffer =
      parts_.staging.Await(load.record.length, Patience(load.deadline));
  if (!buffer.ok()) return parts_.listener.OnLoaded(load.transfer, buffer.status());
  const absl::Status accepted = At(load.from).store->Load(
      TierLoad{load.record.id, *buffer, load.deadline},
      Then([load, buffer = *buffer](BlockMover& mover, const absl::Status& status) {
        if (status.ok()) return mover.Arrive(load, buffer);
        mover.parts_.listener.OnLoaded(load.transfer, status);
      }));
  if (!accepted.ok()) parts_.listener.OnLoaded(load.transfer, accepted);
}

void BlockMover::Arrive(const LoadBlock& load, const PinnedBytes<std::byte>& from) {
  // The tier's store has compared the bytes with its own record; this one may be another.
  absl::Status status;
  if (BlockChecksum(load.record.id.key, from.bytes) != load.record.checksum) {
    status = absl::DataLossError("the block has another checksum than it was promoted for");
  } else {
    status = parts_.arena.Write(load.to, from.bytes);
  }
  parts_.listener.OnLoaded(load.transfer, status);
}

void BlockMover::Store(const Storing& storing) {
  const StoreBlock& block = storing.block;
  absl::StatusOr<PinnedBytes<std::byte>> buffer =
      parts_.staging.Await(block.record.length, Patience(block.deadline));
  if (!buffer.ok()) return parts_.listener.OnStoreDone(block.transfer, buffer.status());
  if (block.extent.has_value()) {
    const absl::Status read = parts_.arena.Read(*block.extent, buffer->bytes);
    if (!read.ok()) return parts_.listener.OnStoreDone(block.transfer, read);
    return HandOver(storing, *std::move(buffer));
  }
  const absl::Status accepted =
      At(block.from)
          .store->Load(
              TierLoad{block.record.id, *buffer, block.deadline},
              Then([storing, buffer = *buffer](BlockMover& mover, const absl::Status& status) {
                if (status.ok()) return mover.HandOver(storing, buffer);
                mover.parts_.listener.OnStoreDone(storing.block.transfer, status);
              }));
  if (!accepted.ok()) parts_.listener.OnStoreDone(block.transfer, accepted);
}

void BlockMover::HandOver(const Storing& storing, PinnedBytes<std::byte> from) {
  const StoreBlock& block = storing.block;
  Tier& tier = At(block.to);
  absl::Status accepted;
  {
    // A purge must not come in between.
    MutexLock lock(&tier.mu);
    if (tier.purges[block.record.id.tenant] != storing.purges) {
      accepted = absl::CancelledError("the tenant was purged meanwhile");
    } else {
      // The store compares the bytes with the record's checksum.
      accepted = tier.store->Store(
          TierStoring{block.record, {from.bytes, from.pin}, block.deadline},
          Then([transfer = block.transfer](BlockMover& mover, const absl::Status& status) {
            mover.parts_.listener.OnStoreDone(transfer, status);
          }));
      // Refused at once it is no other node's, but one of this node that is on its way out.
      if (absl::IsAlreadyExists(accepted)) accepted = absl::AbortedError(accepted.message());
    }
  }
  if (!accepted.ok()) parts_.listener.OnStoreDone(block.transfer, accepted);
}

void BlockMover::Purge(const blocks::PurgeTier& purge, const std::string& tenant) {
  Tier& tier = At(purge.tier);
  absl::Status accepted;
  {
    MutexLock lock(&tier.mu);
    accepted =
        tier.store->Purge(tenant, parts_.clock.Now() + options_.purge_deadline,
                          Then([id = purge.purge](BlockMover& mover, const absl::Status& status) {
                            mover.parts_.listener.OnPurged(id, status);
                          }));
  }
  if (!accepted.ok()) parts_.listener.OnPurged(purge.purge, accepted);
}

}  // namespace palimpsest
