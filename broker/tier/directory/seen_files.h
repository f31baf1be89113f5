// The files of a directory tier that a node has looked at, by name, so that it reads the header of
// each but once. It forgets files that are gone, and looks again at those of which it might have
// something else to tell: whose time is over, or whose tenant was purged.
//
// 50 to 110 bytes a file. Pure logic; the caller serializes.
#ifndef PALIMPSEST_BROKER_TIER_DIRECTORY_SEEN_FILES_H_
#define PALIMPSEST_BROKER_TIER_DIRECTORY_SEEN_FILES_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "broker/tier/tier_backend.h"

namespace palimpsest {

class SeenFiles {
 public:
  // Files are kept in so many folders, by the first digits of their names.
  static constexpr int kFolderBits = 12;
  static constexpr size_t kFolders = size_t{1} << kFolderBits;
  static size_t FolderOf(const BlockKey& key) { return key.high >> (64 - kFolderBits); }

  // `limit`: of files that are not this node's; more are not looked at.
  explicit SeenFiles(size_t limit) : limit_(limit) {}

  using Generations = absl::flat_hash_map<std::string, uint64_t>;

  // This node wrote it: there is no need to look.
  void SetOwn(const BlockKey& key);
  // A block of another node, which is told.
  void SetTold(const BlockKey& key, const std::string& tenant, uint64_t generation,
               absl::Time expiry);
  // There is nothing to tell of it until then.
  void SetUseless(const BlockKey& key, absl::Time until);
  // Whether it was told, and is no longer.
  std::optional<Discovery::Gone> Forget(const BlockKey& key);

  struct Listed {
    std::vector<BlockKey> due;  // to be looked at
    std::vector<Discovery::Gone> gone;
  };
  // These files are in the folder, and no others. `generations`: of all tenants of whom something
  // is told, those that are known.
  Listed OnListed(size_t folder, absl::Span<const BlockKey> files, const Generations& generations,
                  absl::Time now);

  // Of whom something was told.
  const std::vector<std::string>& tenants() const { return tenants_; }
  // Files that are not this node's.
  size_t others() const { return others_; }

 private:
  static constexpr uint32_t kNobody = UINT32_MAX;
  struct File {
    bool own = false;
    uint32_t tenant = kNobody;  // of a block that is told: an index of tenants_
    uint64_t generation = 0;
    absl::Time again = absl::InfiniteFuture();
  };

  void Set(const BlockKey& key, const File& file);
  bool IsDue(const File& file, const Generations& generations, absl::Time now) const;

  const size_t limit_;
  std::array<absl::flat_hash_map<BlockKey, File>, kFolders> folders_;
  size_t others_ = 0;
  std::vector<std::string> tenants_;
  absl::flat_hash_map<std::string, uint32_t> tenant_indices_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_TIER_DIRECTORY_SEEN_FILES_H_
