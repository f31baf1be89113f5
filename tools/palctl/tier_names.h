// Tiers as people write them.
#ifndef PALIMPSEST_TOOLS_PALCTL_TIER_NAMES_H_
#define PALIMPSEST_TOOLS_PALCTL_TIER_NAMES_H_

#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "proto/palimpsest/v1/block_store.pb.h"

namespace palimpsest::palctl {

// "dram", "cxl", ...
inline std::string TierName(v1::Tier tier) {
  return absl::AsciiStrToLower(absl::StripPrefix(v1::Tier_Name(tier), "TIER_"));
}

// TIER_UNSPECIFIED for what is none.
inline v1::Tier TierFromName(const std::string& name) {
  v1::Tier tier = v1::TIER_UNSPECIFIED;
  v1::Tier_Parse(absl::StrCat("TIER_", absl::AsciiStrToUpper(name)), &tier);
  return tier;
}

inline std::vector<std::string> TierNames() {
  return {"dram", "cxl", "nvme", "remote", "directory"};
}

}  // namespace palimpsest::palctl

#endif  // PALIMPSEST_TOOLS_PALCTL_TIER_NAMES_H_
