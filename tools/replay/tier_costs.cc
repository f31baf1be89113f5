#include "tools/replay/tier_costs.h"

#include "absl/strings/str_cat.h"
#include "common/yaml_config.h"
#include "tools/replay/replayer.h"

namespace palimpsest::replay {
namespace {

constexpr size_t kMostTiers = 6;
constexpr double kMostBytesPerSecond = 1e13;
constexpr absl::Duration kLongest = absl::Minutes(1);

ReplayTier ReadTier(ConfigReader& reader, bool first) {
  ReplayTier tier;
  tier.name = reader.String("name");
  if (tier.name.empty() || tier.name.size() > 40) reader.Error("name", "expected 1 to 40 bytes");
  tier.blocks = static_cast<size_t>(reader.Int("blocks", 1, int64_t{kMostBlocks}));
  if (first) return tier;
  tier.latency = reader.Duration("latency", absl::ZeroDuration(), kLongest, absl::ZeroDuration());
  tier.bytes_per_second = reader.Double("bytes_per_second", 1, kMostBytesPerSecond);
  tier.store_bytes_per_second =
      reader.Double("store_bytes_per_second", 1, kMostBytesPerSecond, tier.bytes_per_second);
  tier.prefetch_bytes_per_second = reader.Double("prefetch", 0, kMostBytesPerSecond, 0.0);
  return tier;
}

absl::StatusOr<TierCosts> Read(YamlConfig yaml) {
  ConfigReader root = yaml.root();
  TierCosts costs;
  const absl::Duration none = absl::ZeroDuration();
  costs.first_token = root.Duration("first_token", none, kLongest, none);
  ConfigReader recompute = root.Map("recompute");
  costs.per_token = recompute.Duration("per_token", none, kLongest);
  costs.per_token_and_position = recompute.Duration("per_token_and_position", none, kLongest, none);
  costs.announce = root.Duration("announce", none, kLongest, none);
  for (ConfigReader& tier : root.Maps("tiers", kMostTiers)) {
    costs.tiers.push_back(ReadTier(tier, costs.tiers.empty()));
  }
  if (costs.tiers.empty()) root.Error("tiers", "expected at least one tier");
  if (costs.blocks() > kMostBlocks) {
    root.Error("tiers", absl::StrCat("expected at most ", kMostBlocks, " blocks together"));
  }
  const absl::Status status = yaml.Finish();
  if (!status.ok()) return status;
  return costs;
}

}  // namespace

absl::Duration TierCosts::Recompute(int64_t first, int64_t last) const {
  const auto tokens = static_cast<double>(last - first);
  const double position = static_cast<double>(first + last) / 2;
  return tokens * per_token + tokens * position * per_token_and_position;
}

size_t TierCosts::blocks() const {
  size_t blocks = 0;
  for (const ReplayTier& tier : tiers) blocks += tier.blocks;
  return blocks;
}

absl::StatusOr<TierCosts> ParseTierCosts(absl::string_view yaml, absl::string_view file_name) {
  absl::StatusOr<YamlConfig> config = YamlConfig::Parse(yaml, file_name);
  if (!config.ok()) return config.status();
  return Read(*std::move(config));
}

absl::StatusOr<TierCosts> ReadTierCosts(const std::string& file) {
  absl::StatusOr<YamlConfig> config = YamlConfig::ReadFile(file);
  if (!config.ok()) return config.status();
  return Read(*std::move(config));
}

}  // namespace palimpsest::replay
