#include "broker/blocks/tiers_config.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "broker/tier/directory/block_file.h"
#include "broker/tier/nvme/nvme_backend.h"

namespace palimpsest {
namespace {

constexpr Bytes kLeast = MiB(2);
constexpr Bytes kMost = GiB(1 << 20);
constexpr int64_t kForeign = 1 << 17;
constexpr int64_t kMostForeign = 1 << 24;
constexpr absl::Duration kYear = absl::Hours(24 * 365);

void CheckMultiple(ConfigReader& reader, absl::string_view key, Bytes value, Bytes unit) {
  if (value.count() % unit.count() != 0) {
    reader.Error(key, absl::StrCat("expected a multiple of ", unit.ToString()));
  }
}

DramTierConfig ReadDram(ConfigReader reader) {
  DramTierConfig dram;
  dram.chunk_bytes = reader.Size("chunk_bytes", kLeast, GiB(4), MiB(64));
  CheckMultiple(reader, "chunk_bytes", dram.chunk_bytes, kLeast);
  dram.bytes = reader.Size("bytes", dram.chunk_bytes, kMost);
  CheckMultiple(reader, "bytes", dram.bytes, dram.chunk_bytes);
  dram.unmap_deadline =
      reader.Duration("unmap_deadline", absl::Milliseconds(10), absl::Hours(1), absl::Seconds(10));
  return dram;
}

// What all tiers below T1 have in common.
LowerTierConfig ReadLower(ConfigReader& reader, absl::string_view name) {
  LowerTierConfig tier;
  tier.name = std::string(name);
  tier.bytes = reader.Size("bytes", kLeast, kMost);
  CheckMultiple(reader, "bytes", tier.bytes, kLeast);
  tier.store.capacity = tier.bytes;
  tier.store.store_bytes_per_second =
      reader.Size("store_bytes_per_second", Bytes(0), kMost, Bytes(0));
  tier.store.max_in_flight = static_cast<int>(reader.Int("depth", 1, 1024, 16));
  tier.store.remeasure_after = absl::Seconds(1);
  tier.store.max_stores_in_flight = (tier.store.max_in_flight + 1) / 2;
  tier.store.breaker.slow =
      reader.Duration("slow", absl::Milliseconds(1), absl::Hours(1), tier.store.breaker.slow);
  return tier;
}

// Of tiers that outlive the process.
void ReadKeeping(ConfigReader& reader, LowerTierConfig& tier) {
  tier.store.longest_life =
      reader.Duration("time_to_live", absl::Seconds(1), kYear, absl::Hours(24));
  tier.keys = reader.String("keys", "");
  // Nonce and tag, rounded up.
  if (!tier.keys.empty()) tier.header += KiB(4);
}

CxlOptions::Emulated ReadEmulated(ConfigReader reader) {
  CxlOptions::Emulated emulated;
  emulated.bytes_per_second =
      static_cast<double>(reader.Size("bytes_per_second", MiB(1), GiB(1 << 14)).count());
  emulated.latency = reader.Duration("latency", absl::ZeroDuration(), absl::Seconds(1));
  return emulated;
}

LowerTierConfig ReadCxl(ConfigReader reader) {
  LowerTierConfig tier = ReadLower(reader, "cxl");
  CxlOptions cxl;
  cxl.size = tier.bytes;
  const bool node = reader.Has("node");
  const bool path = reader.Has("path");
  const bool emulated = reader.Has("emulated");
  if (node + path + emulated != 1) {
    reader.Error("bytes",
                 "expected one of node (a NUMA node), path (a DAX device, or a folder of memory) "
                 "and emulated (its bytes_per_second and latency)");
  }
  if (node) cxl.node = static_cast<int>(reader.Int("node", 0, 1023));
  if (path) cxl.path = reader.String("path");
  if (emulated) cxl.emulated = ReadEmulated(reader.Map("emulated"));
  tier.medium = cxl;
  return tier;
}

LowerTierConfig ReadRemote(ConfigReader reader) {
  LowerTierConfig tier = ReadLower(reader, "remote");
  RemoteBackend::Options remote;
  remote.peer = reader.String("peer");
  remote.transports = reader.String("transports", remote.transports);
  remote.timeout =
      reader.Duration("timeout", absl::Milliseconds(10), absl::Hours(1), remote.timeout);
  tier.medium = remote;
  return tier;
}

PeerMemory::Options ReadLent(ConfigReader reader) {
  PeerMemory::Options lent;
  lent.bytes = reader.Size("bytes", kLeast, kMost);
  CheckMultiple(reader, "bytes", lent.bytes, kLeast);
  lent.listen = reader.String("listen");
  lent.transports = reader.String("transports", lent.transports);
  lent.max_peers = static_cast<int>(reader.Int("max_peers", 1, 1024, lent.max_peers));
  return lent;
}

LowerTierConfig ReadNvme(ConfigReader reader) {
  LowerTierConfig tier = ReadLower(reader, "nvme");
  ReadKeeping(reader, tier);
  FileDeviceOptions file;
  file.path = reader.String("path");
  file.size = tier.bytes;
  tier.store.capacity = NvmeBackend::CapacityOf(tier.bytes);
  if (tier.store.capacity == Bytes(0)) {
    reader.Error("bytes", absl::StrCat("a file of ", tier.bytes.ToString(),
                                       " has no room for blocks beside its own tables"));
  }
  tier.medium = file;
  return tier;
}

LowerTierConfig ReadDirectory(ConfigReader reader, const std::string& node) {
  LowerTierConfig tier = ReadLower(reader, "directory");
  ReadKeeping(reader, tier);
  DirectoryBackend::Options directory;
  directory.folder = reader.String("path");
  directory.node = reader.String("node", node);
  tier.store.foreign_blocks =
      static_cast<size_t>(reader.Int("foreign_blocks", 0, kMostForeign, kForeign));
  tier.store.foreign_period = reader.Duration("foreign_period", absl::Milliseconds(10),
                                              absl::Hours(24), tier.store.foreign_period);
  directory.foreign_blocks = tier.store.foreign_blocks;
  tier.header += Bytes(kBlockFilePage);
  tier.medium = directory;
  return tier;
}

}  // namespace

TiersConfig ReadTiers(ConfigReader tiers, const std::string& node) {
  TiersConfig config;
  config.dram = ReadDram(tiers.Map("dram"));
  Bytes above = config.dram.bytes;
  std::string above_name = "dram";
  const auto add = [&](absl::string_view key, LowerTierConfig tier) {
    if (tier.bytes < above) {
      tiers.Error(key, absl::StrCat("has ", tier.bytes.ToString(), ", less than ", above_name,
                                    " above it (", above.ToString(),
                                    "): what leaves one tier goes to the next, so expected at "
                                    "least as much"));
    }
    above = tier.bytes;
    above_name = std::string(key);
    config.lower.push_back(std::move(tier));
  };
  if (tiers.Has("cxl")) add("cxl", ReadCxl(tiers.Map("cxl")));
  // Another node's memory is faster than a disk here.
  if (tiers.Has("remote")) add("remote", ReadRemote(tiers.Map("remote")));
  if (tiers.Has("nvme")) add("nvme", ReadNvme(tiers.Map("nvme")));
  if (tiers.Has("directory")) add("directory", ReadDirectory(tiers.Map("directory"), node));
  if (tiers.Has("lend")) config.lent = ReadLent(tiers.Map("lend"));
  config.staging = tiers.Size("staging", MiB(2), GiB(64), MiB(256));
  CheckMultiple(tiers, "staging", config.staging, MiB(2));
  config.transfer_deadline =
      tiers.Duration("transfer_deadline", absl::Milliseconds(1), absl::Hours(1), absl::Seconds(10));
  config.policy = tiers.Choice<std::string>("policy",
                                            {{"predictive", "predictive"},
                                             {"lru", "lru"},
                                             {"lfu", "lfu"},
                                             {"arc", "arc"},
                                             {"s3fifo", "s3fifo"},
                                             {"tinylfu", "tinylfu"},
                                             {"gdsf", "gdsf"}},
                                            "predictive");
  return config;
}

SaidBudgets ReadBudgets(ConfigReader& tenant, const std::optional<TiersConfig>& tiers) {
  if (!tiers.has_value()) {
    if (tenant.Has("blocks")) {
      tenant.Map("blocks");
      tenant.Error("blocks", "only with tiers");
    }
    return {};
  }
  if (!tenant.Has("blocks")) return SaidBudgets(tiers->lower.size() + 1);
  ConfigReader reader = tenant.Map("blocks");
  SaidBudgets said;
  Bytes above;
  const auto read = [&](const std::string& key, Bytes most) {
    said.emplace_back();
    if (!reader.Has(key)) return;
    said.back() = reader.Size(key, Bytes(0), most);
    if (*said.back() < above) {
      reader.Error(key, "expected at least the budget in the tiers above it");
    }
    above = *said.back();
  };
  read("dram", tiers->dram.bytes);
  for (const LowerTierConfig& tier : tiers->lower) read(tier.name, tier.bytes);
  return said;
}

absl::StatusOr<std::vector<std::vector<Bytes>>> ShareBudgets(const TiersConfig& tiers,
                                                             absl::Span<const SaidBudgets> said) {
  std::vector<std::vector<Bytes>> budgets(said.size());
  for (size_t tier = 0; tier <= tiers.lower.size(); ++tier) {
    const Bytes whole = tier == 0 ? tiers.dram.bytes : tiers.lower[tier - 1].bytes;
    const std::string name = tier == 0 ? "dram" : tiers.lower[tier - 1].name;
    Bytes taken;
    int64_t sharing = 0;
    for (const SaidBudgets& tenant : said) {
      taken += tenant[tier].value_or(Bytes(0));
      sharing += tenant[tier].has_value() ? 0 : 1;
    }
    if (taken > whole) {
      return absl::InvalidArgumentError(absl::StrCat("the tenants' blocks.", name, " are ",
                                                     taken.ToString(), " together, of tiers.", name,
                                                     ".bytes ", whole.ToString()));
    }
    const Bytes share = sharing == 0 ? Bytes(0) : (whole - taken) / sharing;
    if (tier == 0 && sharing > 0 && share < tiers.dram.chunk_bytes) {
      return absl::InvalidArgumentError(absl::StrCat(sharing, " tenants share ",
                                                     (whole - taken).ToString(),
                                                     " of tiers.dram; expected at least "
                                                     "a chunk for each (tiers.dram.chunk_bytes, ",
                                                     tiers.dram.chunk_bytes.ToString(), ")"));
    }
    for (size_t i = 0; i < said.size(); ++i) budgets[i].push_back(said[i][tier].value_or(share));
  }
  return budgets;
}

}  // namespace palimpsest
