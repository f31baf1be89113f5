#include "broker/tier/foreign_catalog.h"

#include "absl/strings/str_cat.h"

namespace palimpsest {

const StoredBlock* ForeignCatalog::Find(const BlockKey& key) const {
  const auto found = blocks_.find(key);
  return found == blocks_.end() ? nullptr : &found->second.block;
}

ForeignCatalog::Added ForeignCatalog::Add(StoredBlock block) {
  Added result;
  const BlockKey key = block.record.id.key;
  if (const auto known = blocks_.find(key); known != blocks_.end()) {
    StoredBlock& before = known->second.block;
    if (before.record.id == block.record.id && before.record.length == block.record.length &&
        before.record.checksum == block.record.checksum) {
      expiries_.erase({before.record.expiry, key});
      expiries_.insert({block.record.expiry, key});
      before = std::move(block);
      return result;
    }
    result.forgotten.push_back(*Forget(key));
  }
  while (!blocks_.empty() && blocks_.size() >= limit_) {
    result.forgotten.push_back(*Forget(by_use_.begin()->second));
  }
  if (limit_ == 0) return result;
  result.added = true;
  by_use_.insert({++last_use_, key});
  expiries_.insert({block.record.expiry, key});
  blocks_.emplace(key, Entry{std::move(block), last_use_});
  return result;
}

void ForeignCatalog::Touch(const BlockKey& key) {
  const auto found = blocks_.find(key);
  if (found == blocks_.end()) return;
  by_use_.erase({found->second.used, key});
  found->second.used = ++last_use_;
  by_use_.insert({last_use_, key});
}

std::optional<BlockRecord> ForeignCatalog::Forget(BlockKey key) {
  const auto found = blocks_.find(key);
  if (found == blocks_.end()) return std::nullopt;
  BlockRecord record = std::move(found->second.block.record);
  by_use_.erase({found->second.used, key});
  expiries_.erase({record.expiry, key});
  blocks_.erase(found);
  return record;
}

std::vector<BlockKey> ForeignCatalog::Expired(absl::Time now, size_t limit) const {
  std::vector<BlockKey> expired;
  for (const auto& [expiry, key] : expiries_) {
    if (expiry > now || expired.size() == limit) break;
    expired.push_back(key);
  }
  return expired;
}

absl::Time ForeignCatalog::next_expiry() const {
  return expiries_.empty() ? absl::InfiniteFuture() : expiries_.begin()->first;
}

std::vector<BlockKey> ForeignCatalog::OfTenant(const std::string& tenant) const {
  std::vector<BlockKey> keys;
  for (const auto& [key, entry] : blocks_) {
    if (entry.block.record.id.tenant == tenant) keys.push_back(key);
  }
  return keys;
}

absl::Status ForeignCatalog::CheckConsistency() const {
  if (blocks_.size() > limit_ || by_use_.size() != blocks_.size() ||
      expiries_.size() != blocks_.size()) {
    return absl::InternalError(absl::StrCat(blocks_.size(), " foreign blocks of at most ", limit_,
                                            ", ", by_use_.size(), " by use, ", expiries_.size(),
                                            " by expiry"));
  }
  for (const auto& [key, entry] : blocks_) {
    if (entry.block.record.id.key != key || !by_use_.contains({entry.used, key}) ||
        !expiries_.contains({entry.block.record.expiry, key})) {
      return absl::InternalError("a foreign block is listed wrongly");
    }
  }
  return absl::OkStatus();
}

}  // namespace palimpsest
