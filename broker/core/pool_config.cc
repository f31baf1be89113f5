#include "broker/core/pool_config.h"

#include <set>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace palimpsest {
namespace {

void CheckTenant(uint32_t pool_slabs, const TenantDemand& tenant,
                 std::vector<std::string>& problems) {
  const TenantConfig& config = tenant.config;
  const uint64_t minimum =
      uint64_t{tenant.image_slabs} + config.workspace_slabs + uint64_t{config.sequence_slabs};
  const std::string parts =
      absl::StrCat(minimum, " slabs (parameters ", tenant.image_slabs, " + workspace ",
                   config.workspace_slabs, " + one longest sequence ", config.sequence_slabs, ")");
  const std::string who = absl::StrCat("tenant \"", config.name, "\"");
  if (config.quota_slabs > pool_slabs) {
    problems.push_back(absl::StrCat(who, " has a quota of ", config.quota_slabs,
                                    " slabs, the pool has ", pool_slabs,
                                    ": lower the quota or enlarge the pool"));
  }
  if (minimum > config.quota_slabs) {
    problems.push_back(absl::StrCat(who, " needs ", parts, ", its quota is ", config.quota_slabs,
                                    ": raise the quota or shorten its longest sequence"));
  }
  if (minimum > pool_slabs) {
    problems.push_back(absl::StrCat(who, " needs ", parts, ", the pool has ", pool_slabs,
                                    ": enlarge the pool or shorten its longest sequence"));
  }
  if (config.floor_slabs > config.quota_slabs) {
    problems.push_back(absl::StrCat(who, " has a floor of ", config.floor_slabs,
                                    " slabs above its quota of ", config.quota_slabs,
                                    ": raise the quota or lower the floor"));
  }
  if (config.floor_slabs == 0 && config.pinned) {
    problems.push_back(absl::StrCat(who, " is pinned without a floor: set a floor of at least ",
                                    parts, " or drop the pin"));
  }
  if (config.floor_slabs != 0 && config.floor_slabs < minimum) {
    problems.push_back(
        absl::StrCat(who, " has a floor of ", config.floor_slabs, " slabs but needs ", parts,
                     " to serve at all: raise the floor, or set it to 0 for ", "best effort"));
  }
}

}  // namespace

absl::Status ValidatePool(uint32_t pool_slabs, absl::Span<const TenantDemand> tenants) {
  std::vector<std::string> problems;
  std::set<std::string> names;
  std::vector<std::string> floors;
  uint64_t kept_sum = 0;
  if (pool_slabs == 0) problems.push_back("the pool has no slabs: set its size");
  for (const TenantDemand& tenant : tenants) {
    if (tenant.config.name.empty()) problems.push_back("a tenant has no name");
    if (!names.insert(tenant.config.name).second) {
      problems.push_back(
          absl::StrCat("tenant \"", tenant.config.name, "\" is configured twice: rename one"));
    }
    CheckTenant(pool_slabs, tenant, problems);
    const bool best_effort = tenant.config.floor_slabs == 0;
    const uint32_t kept = best_effort ? tenant.config.workspace_slabs : tenant.config.floor_slabs;
    kept_sum += kept;
    if (kept == 0 && best_effort) continue;
    floors.push_back(
        absl::StrCat(tenant.config.name, " ", kept, best_effort ? " of workspace" : ""));
  }
  if (kept_sum > pool_slabs) {
    problems.push_back(absl::StrCat("the floors add up to ", kept_sum, " slabs (",
                                    absl::StrJoin(floors, ", "), "), the pool has ", pool_slabs,
                                    ": lower floors, set one to 0 (best effort) or enlarge the "
                                    "pool by ",
                                    kept_sum - pool_slabs, " slabs"));
  }
  if (problems.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrJoin(problems, "; "));
}

}  // namespace palimpsest
