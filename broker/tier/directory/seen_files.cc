#include "broker/tier/directory/seen_files.h"

#include "absl/container/flat_hash_set.h"

namespace palimpsest {

void SeenFiles::Set(const BlockKey& key, const File& file) {
  const auto [entry, added] = folders_[FolderOf(key)].try_emplace(key);
  if (!added && !entry->second.own) --others_;
  if (!file.own) ++others_;
  entry->second = file;
}

void SeenFiles::SetOwn(const BlockKey& key) { Set(key, {.own = true}); }

void SeenFiles::SetTold(const BlockKey& key, const std::string& tenant, uint64_t generation,
                        absl::Time expiry) {
  const auto [index, added] =
      tenant_indices_.try_emplace(tenant, static_cast<uint32_t>(tenants_.size()));
  if (added) tenants_.push_back(tenant);
  Set(key, {.tenant = index->second, .generation = generation, .again = expiry});
}

void SeenFiles::SetUseless(const BlockKey& key, absl::Time until) { Set(key, {.again = until}); }

std::optional<Discovery::Gone> SeenFiles::Forget(const BlockKey& key) {
  auto& folder = folders_[FolderOf(key)];
  const auto found = folder.find(key);
  if (found == folder.end()) return std::nullopt;
  const File file = found->second;
  folder.erase(found);
  if (!file.own) --others_;
  if (file.tenant == kNobody) return std::nullopt;
  return Discovery::Gone{tenants_[file.tenant], key};
}

bool SeenFiles::IsDue(const File& file, const Generations& generations, absl::Time now) const {
  if (file.again <= now) return true;
  if (file.tenant == kNobody) return false;
  const auto current = generations.find(tenants_[file.tenant]);
  return current != generations.end() && current->second != file.generation;
}

SeenFiles::Listed SeenFiles::OnListed(size_t folder, absl::Span<const BlockKey> files,
                                      const Generations& generations, absl::Time now) {
  Listed listed;
  const absl::flat_hash_set<BlockKey> there(files.begin(), files.end());
  std::vector<BlockKey> left;
  for (const auto& [key, file] : folders_[folder]) {
    if (!there.contains(key)) left.push_back(key);
  }
  for (const BlockKey& key : left) {
    if (auto gone = Forget(key); gone.has_value()) listed.gone.push_back(*std::move(gone));
  }
  size_t unseen = 0;
  for (const BlockKey& key : there) {
    if (FolderOf(key) != folder) continue;
    const auto seen = folders_[folder].find(key);
    if (seen == folders_[folder].end()) {
      if (others_ + unseen >= limit_) continue;
      ++unseen;
    } else if (!IsDue(seen->second, generations, now)) {
      continue;
    }
    listed.due.push_back(key);
  }
  return listed;
}

}  // namespace palimpsest
