#include "broker/tier/tier_catalog.h"

#include <algorithm>
#include <cassert>

#include "absl/strings/str_cat.h"

namespace palimpsest {

TierCatalog::Entry* TierCatalog::Find(const BlockKey& key) {
  const auto found = entries_.find(key);
  return found == entries_.end() ? nullptr : found->second.get();
}

const TierCatalog::Entry* TierCatalog::Find(const BlockKey& key) const {
  const auto found = entries_.find(key);
  return found == entries_.end() ? nullptr : found->second.get();
}

absl::StatusOr<TierCatalog::Entry*> TierCatalog::Insert(const BlockRecord& record,
                                                        Bytes footprint) {
  std::unique_ptr<Entry>& slot = entries_[record.id.key];
  if (slot != nullptr) {
    return absl::AlreadyExistsError(slot->record.id == record.id
                                        ? "the block is here, or on its way in or out"
                                        : "another block has the same key");
  }
  slot = std::make_unique<Entry>();
  slot->record = record;
  slot->footprint = footprint;
  used_ += footprint;
  Tenant& tenant = tenants_[record.id.tenant];
  tenant.used += footprint;
  tenant.entries.insert(slot.get());
  return slot.get();
}

absl::StatusOr<TierCatalog::Entry*> TierCatalog::Add(const BlockRecord& record, Bytes footprint) {
  // Looked up before the budget: who stores a duplicate should not make room for it.
  if (!entries_.contains(record.id.key)) {
    if (footprint > capacity_ - used_) {
      return absl::ResourceExhaustedError(absl::StrCat("no room for ", footprint.ToString(), ": ",
                                                       used_.ToString(), " of ",
                                                       capacity_.ToString(), " are used"));
    }
    const Bytes limit = LimitOf(record.id.tenant);
    const Bytes used = UsedBy(record.id.tenant);
    if (footprint > limit - used) {
      return absl::ResourceExhaustedError(
          absl::StrCat("no room for ", footprint.ToString(), " of tenant ", record.id.tenant, ": ",
                       used.ToString(), " of its ", limit.ToString(), " are used"));
    }
  }
  return Insert(record, footprint);
}

absl::StatusOr<TierCatalog::Entry*> TierCatalog::Adopt(const StoredBlock& block, Bytes footprint) {
  absl::StatusOr<Entry*> entry = Insert(block.record, footprint);
  if (!entry.ok()) return entry;
  (*entry)->place = block.place;
  MakeReady(*entry);
  return entry;
}

void TierCatalog::MakeReady(Entry* entry) {
  entry->state = State::kReady;
  ++ready_;
  ++tenants_[entry->record.id.tenant].ready;
  expiries_.insert({entry->record.expiry, entry->record.id.key});
}

bool TierCatalog::Publish(Entry* entry, TierPlace place) {
  assert(entry->state == State::kWriting);
  entry->place = place;
  if (entry->condemned) {
    entry->state = State::kRemoving;
    removable_.push_back(entry);
    return false;
  }
  MakeReady(entry);
  return true;
}

void TierCatalog::EndLoad(Entry* entry) {
  assert(entry->loads > 0);
  if (--entry->loads == 0 && entry->state == State::kRemoving) removable_.push_back(entry);
}

bool TierCatalog::Condemn(Entry* entry, TierBackend::RemoveReason reason) {
  entry->condemned = true;
  if (reason == TierBackend::RemoveReason::kCorrupt) entry->reason = reason;
  if (entry->state != State::kReady) return false;
  entry->state = State::kRemoving;
  --ready_;
  --tenants_[entry->record.id.tenant].ready;
  expiries_.erase({entry->record.expiry, entry->record.id.key});
  if (entry->loads == 0) removable_.push_back(entry);
  return true;
}

TierCatalog::Entry* TierCatalog::TakeRemovable() {
  if (removable_.empty()) return nullptr;
  Entry* const entry = removable_.back();
  removable_.pop_back();
  return entry;
}

void TierCatalog::PutBack(Entry* entry) {
  assert(entry->state == State::kRemoving && entry->loads == 0);
  removable_.push_back(entry);
}

void TierCatalog::Drop(Entry* entry) {
  assert(entry->state != State::kReady && entry->loads == 0);
  const auto tenant = tenants_.find(entry->record.id.tenant);
  tenant->second.used -= entry->footprint;
  tenant->second.entries.erase(entry);
  if (tenant->second.entries.empty() && tenant->second.limit == kUnlimited) tenants_.erase(tenant);
  const BlockKey key = entry->record.id.key;
  entries_.erase(key);
}

void TierCatalog::Erase(Entry* entry) {
  used_ -= entry->footprint;
  Drop(entry);
}

void TierCatalog::Quarantine(Entry* entry) {
  quarantined_ += entry->footprint;
  Drop(entry);
}

void TierCatalog::AddQuarantined(Bytes footprint) {
  quarantined_ += footprint;
  used_ += footprint;
}

std::vector<TierCatalog::Entry*> TierCatalog::Expired(absl::Time now, size_t limit) const {
  std::vector<Entry*> expired;
  for (const auto& [expiry, key] : expiries_) {
    if (expiry > now || expired.size() == limit) break;
    expired.push_back(entries_.at(key).get());
  }
  return expired;
}

absl::Time TierCatalog::next_expiry() const {
  return expiries_.empty() ? absl::InfiniteFuture() : expiries_.begin()->first;
}

std::vector<TierCatalog::Entry*> TierCatalog::OfTenant(const std::string& tenant) const {
  const auto found = tenants_.find(tenant);
  if (found == tenants_.end()) return {};
  return {found->second.entries.begin(), found->second.entries.end()};
}

std::vector<BlockRecord> TierCatalog::Ready() const {
  std::vector<BlockRecord> records;
  records.reserve(ready_);
  for (const auto& [key, entry] : entries_) {
    if (entry->state == State::kReady) records.push_back(entry->record);
  }
  return records;
}

void TierCatalog::SetLimit(const std::string& tenant, Bytes limit) {
  tenants_[tenant].limit = limit;
}

Bytes TierCatalog::UsedBy(const std::string& tenant) const {
  const auto found = tenants_.find(tenant);
  return found == tenants_.end() ? Bytes(0) : found->second.used;
}

Bytes TierCatalog::LimitOf(const std::string& tenant) const {
  const auto found = tenants_.find(tenant);
  return found == tenants_.end() ? kUnlimited : found->second.limit;
}

uint64_t TierCatalog::ReadyOf(const std::string& tenant) const {
  const auto found = tenants_.find(tenant);
  return found == tenants_.end() ? 0 : found->second.ready;
}

absl::Status TierCatalog::CheckConsistency() const {
  Bytes used = quarantined_;
  uint64_t ready = 0;
  absl::flat_hash_map<std::string, Bytes> of_tenants;
  const absl::flat_hash_set<Entry*> removable(removable_.begin(), removable_.end());
  if (removable.size() != removable_.size()) {
    return absl::InternalError("a block is to be removed twice");
  }
  for (const auto& [key, entry] : entries_) {
    used += entry->footprint;
    of_tenants[entry->record.id.tenant] += entry->footprint;
    const bool is_ready = entry->state == State::kReady;
    ready += is_ready ? 1 : 0;
    if (is_ready != expiries_.contains({entry->record.expiry, key}) ||
        (is_ready && entry->condemned) || (entry->state == State::kWriting && entry->loads > 0)) {
      return absl::InternalError("a block's state and its lists disagree");
    }
    if (removable.contains(entry.get()) && (entry->state != State::kRemoving || entry->loads > 0)) {
      return absl::InternalError("a block in use is to be removed");
    }
  }
  if (used != used_ || ready != ready_ || expiries_.size() != ready) {
    return absl::InternalError(absl::StrCat("the tier counts ", used_.ToString(), " in ", ready_,
                                            " blocks, but has ", used.ToString(), " in ", ready));
  }
  for (const auto& [name, tenant] : tenants_) {
    if (tenant.used != of_tenants[name]) {
      return absl::InternalError(absl::StrCat("tenant ", name, " counts ", tenant.used.ToString(),
                                              ", but has ", of_tenants[name].ToString()));
    }
  }
  return absl::OkStatus();
}

}  // namespace palimpsest
