// The tiers of a node, as broker.yaml gives them:
//
//   tiers:                        # missing: no block store, and workers keep blocks in T0 alone
//     dram: {bytes: 8 GiB}        # T1, required
//     cxl: {bytes: 16 GiB, node: 2}
//     remote: {bytes: 32 GiB, peer: "10.0.0.3:7400"}    # another node's memory, that it lends
//     nvme: {bytes: 200 GiB, path: /var/lib/palimpsest/blocks, keys: /etc/palimpsest/keys}
//     directory: {bytes: 2 TiB, path: /mnt/lustre/palimpsest, foreign_blocks: 131072,
//                 foreign_period: 30s}    # of other nodes; 0: they are not looked for
//     lend: {bytes: 8 GiB, listen: "10.0.0.2:7400"}     # to other nodes' tier `remote`
//   tenants:
//     - blocks: {dram: 2 GiB, nvme: 50 GiB}   # budgets; an equal share of what is left otherwise
//
// A tier that is configured has at least as many bytes as those above it, and so has a budget:
// blocks that leave a tier go to the next one.
#ifndef PALIMPSEST_BROKER_BLOCKS_TIERS_CONFIG_H_
#define PALIMPSEST_BROKER_BLOCKS_TIERS_CONFIG_H_

#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "broker/tier/cxl/cxl_memory.h"
#include "broker/tier/directory/directory_backend.h"
#include "broker/tier/nvme/file_device.h"
#include "broker/tier/remote/peer_memory.h"
#include "broker/tier/remote/remote_backend.h"
#include "broker/tier/tier_store.h"
#include "common/bytes.h"
#include "common/yaml_config.h"

namespace palimpsest {

// T1.
struct DramTierConfig {
  Bytes bytes;  // a multiple of chunk_bytes
  Bytes chunk_bytes;
  // For a worker to unmap chunks that are revoked; then it is killed.
  absl::Duration unmap_deadline;
};

// T2 to T5.
struct LowerTierConfig {
  // As in the file: "cxl", "remote", "nvme", "directory".
  std::string name;
  // What the file says; of T3 the size of its file, which holds a little less of blocks.
  Bytes bytes;
  std::variant<CxlOptions, RemoteBackend::Options, FileDeviceOptions, DirectoryBackend::Options>
      medium;
  // Folder of the tenants' keys (TenantKeys); empty: blocks are not enciphered.
  std::string keys;
  // What a block takes beside its own bytes.
  Bytes header;
  // capacity is set.
  TierStore::Options store;
};

struct TiersConfig {
  DramTierConfig dram;
  std::vector<LowerTierConfig> lower;  // from the top: from fast to slow
  // Memory that other nodes keep blocks in.
  std::optional<PeerMemory::Options> lent;
  // Memory that blocks pass through on their way between tiers.
  Bytes staging;
  // For one block to go from a tier to another.
  absl::Duration transfer_deadline;
  // "lru", "lfu", "arc", "s3fifo", "tinylfu", "gdsf" or "predictive": which blocks leave T1.
  std::string policy;
};

// What a tenant's entry says of its budgets: of T1, then of the tiers in `lower`.
using SaidBudgets = std::vector<std::optional<Bytes>>;

// `tiers` is the map of that name. `node`: the broker's, which marks its files in a directory.
TiersConfig ReadTiers(ConfigReader tiers, const std::string& node);

// `tenant` is the tenant's map; reports `blocks` without tiers.
SaidBudgets ReadBudgets(ConfigReader& tenant, const std::optional<TiersConfig>& tiers);

// The budgets of each tenant: those that say none share equally what the others leave.
// InvalidArgument if they say more than there is, or less than a chunk of T1 is left for one.
absl::StatusOr<std::vector<std::vector<Bytes>>> ShareBudgets(const TiersConfig& tiers,
                                                             absl::Span<const SaidBudgets> said);

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_BLOCKS_TIERS_CONFIG_H_
