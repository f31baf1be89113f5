// What the store knows of blocks that other nodes keep in the same tier.
#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "broker/tier/tier_store_core.h"

namespace palimpsest {
namespace {

constexpr absl::Duration kShortestRest = absl::Milliseconds(1);

}  // namespace

absl::StatusOr<const StoredBlock*> TierStore::Core::AdmitForeign(const TierLoad& request,
                                                                 absl::Time now) {
  const StoredBlock* const block = foreign_.Find(request.id.key);
  if (block == nullptr) return nullptr;
  TierCounters::Misses& misses = counters_.misses;
  if (block->record.id != request.id) {
    ++misses.collided;
    return absl::NotFoundError("another block has the same key");
  }
  if (block->record.expiry <= now) {
    ++misses.expired;
    ForgetForeign(request.id.key);
    Wake();
    return absl::NotFoundError("the block has expired");
  }
  if (block->record.length.count() != request.to.bytes.size()) {
    ++misses.refused;
    return absl::InvalidArgumentError(absl::StrCat("room for ", request.to.bytes.size(),
                                                   " bytes for a block of ",
                                                   block->record.length.count()));
  }
  return block;
}

void TierStore::Core::ForgetForeign(const BlockKey& key) {
  std::optional<BlockRecord> record = foreign_.Forget(key);
  if (record.has_value()) events_.push_back({Event::Kind::kRemoved, *std::move(record), Bytes(0)});
}

void TierStore::Core::ForgetForeignOf(const std::string& tenant) {
  for (const BlockKey& key : foreign_.OfTenant(tenant)) ForgetForeign(key);
}

bool TierStore::Core::LooksForForeign() const {
  return options_.foreign_blocks > 0 && backend_->shared() && !looking_ && !closing_ &&
         breaker_.allows() && queued_loads_.empty();
}

// What fails is told by those who load and store: a look neither opens a breaker nor keeps it
// closed.
void TierStore::Core::FinishDiscover(Completion completion, absl::Duration elapsed) {
  looking_ = false;
  Discovery& told = completion.discovery;
  const bool again = completion.status.ok() && !told.complete;
  next_look_ =
      completion.ended + (again ? std::max(elapsed, kShortestRest) : options_.foreign_period);
  for (const Discovery::Gone& gone : told.gone) {
    const StoredBlock* const block = foreign_.Find(gone.key);
    if (block != nullptr && block->record.id.tenant == gone.tenant) ForgetForeign(gone.key);
  }
  for (StoredBlock& block : told.found) TakeForeign(std::move(block), completion.ended);
}

void TierStore::Core::TakeForeign(StoredBlock block, absl::Time now) {
  BlockRecord& record = block.record;
  record.expiry = std::min(record.expiry, now + options_.longest_life);
  // One that is being written here will be refused by the medium, or take its place.
  const TierCatalog::Entry* const own = catalog_.Find(record.id.key);
  if (!CheckRecord(record).ok() || record.expiry <= now || purging_.contains(record.id.tenant) ||
      (own != nullptr && own->state != TierCatalog::State::kWriting)) {
    return;
  }
  BlockRecord copy = record;
  ForeignCatalog::Added result = foreign_.Add(std::move(block));
  for (BlockRecord& forgotten : result.forgotten) {
    events_.push_back({Event::Kind::kRemoved, std::move(forgotten), Bytes(0)});
  }
  if (result.added) events_.push_back({Event::Kind::kForeign, std::move(copy), Bytes(0)});
}

absl::Status TierStore::Core::CheckForeign() const {
  for (const BlockRecord& record : catalog_.Ready()) {
    if (foreign_.Find(record.id.key) != nullptr) {
      return absl::InternalError("a block is this node's and another one's at once");
    }
  }
  return foreign_.CheckConsistency();
}

}  // namespace palimpsest
