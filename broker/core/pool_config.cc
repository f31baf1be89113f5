#include "broker/core/pool_config.h"

#include <algorithm>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace palimpsest {
namespace {

// What serving takes at all.
uint64_t LeastSlabs(const TenantDemand& tenant) {
  return uint64_t{tenant.image_slabs} + tenant.config.workspace_slabs +
         uint64_t{tenant.config.sequence_slabs};
}

void CheckTenant(uint32_t pool_slabs, const TenantDemand& tenant,
                 std::vector<std::string>& problems) {
  const TenantConfig& config = tenant.config;
  const uint64_t minimum = LeastSlabs(tenant);
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

// What nobody else may keep from the tenant.
uint32_t KeptSlabs(const TenantDemand& tenant, MemoryPolicy policy) {
  const TenantConfig& config = tenant.config;
  if (config.floor_slabs > 0) return config.floor_slabs;
  return config.workspace_slabs + (policy == MemoryPolicy::kRemap ? 0 : tenant.image_slabs);
}

}  // namespace

absl::string_view MemoryPolicyName(MemoryPolicy policy) {
  switch (policy) {
    case MemoryPolicy::kRemap:
      return "remap";
    case MemoryPolicy::kStatic:
      return "static";
    case MemoryPolicy::kRecompute:
      return "recompute";
    case MemoryPolicy::kSwap:
      return "swap";
  }
  return "invalid";
}

std::vector<TenantDemand> WithDefaultFloors(uint32_t pool_slabs,
                                            std::vector<TenantDemand> tenants) {
  uint64_t sum = 0;
  for (const TenantDemand& tenant : tenants) {
    sum += tenant.floor_unsaid ? LeastSlabs(tenant) : KeptSlabs(tenant, MemoryPolicy::kRemap);
  }
  if (sum > pool_slabs) return tenants;
  for (TenantDemand& tenant : tenants) {
    if (!tenant.floor_unsaid) continue;
    tenant.config.floor_slabs = static_cast<uint32_t>(LeastSlabs(tenant));
    tenant.config.floor_by_default = true;
  }
  return tenants;
}

absl::Status ValidatePool(uint32_t pool_slabs, absl::Span<const TenantDemand> tenants,
                          MemoryPolicy policy) {
  std::vector<std::string> problems;
  std::set<std::string> names;
  std::vector<std::string> floors;
  uint64_t kept_sum = 0;
  uint32_t longest_best_effort = 0;
  if (pool_slabs == 0) problems.push_back("the pool has no slabs: set its size");
  for (const TenantDemand& tenant : tenants) {
    if (tenant.config.name.empty()) problems.push_back("a tenant has no name");
    if (!names.insert(tenant.config.name).second) {
      problems.push_back(
          absl::StrCat("tenant \"", tenant.config.name, "\" is configured twice: rename one"));
    }
    CheckTenant(pool_slabs, tenant, problems);
    const bool best_effort = tenant.config.floor_slabs == 0;
    const uint32_t kept = KeptSlabs(tenant, policy);
    kept_sum += kept;
    if (best_effort && policy == MemoryPolicy::kStatic) {
      problems.push_back(absl::StrCat("tenant \"", tenant.config.name,
                                      "\" has no floor, which is its share with memory_policy "
                                      "static: set one"));
    }
    if (best_effort && policy != MemoryPolicy::kRemap) {
      longest_best_effort = std::max(longest_best_effort, tenant.config.sequence_slabs);
    }
    if (kept == 0 && best_effort) continue;
    const absl::string_view what = !best_effort ? ""
                                   : policy == MemoryPolicy::kRemap
                                       ? " of workspace"
                                       : " of parameters and workspace";
    floors.push_back(absl::StrCat(tenant.config.name, " ", kept, what));
  }
  if (kept_sum > pool_slabs) {
    problems.push_back(absl::StrCat("the floors add up to ", kept_sum, " slabs (",
                                    absl::StrJoin(floors, ", "), "), the pool has ", pool_slabs,
                                    ": lower floors, set one to 0 (best effort) or enlarge the "
                                    "pool by ",
                                    kept_sum - pool_slabs, " slabs"));
  }
  if (kept_sum <= pool_slabs && pool_slabs - kept_sum < longest_best_effort) {
    problems.push_back(absl::StrCat(
        "floors and parameters that stay take ", kept_sum, " slabs (", absl::StrJoin(floors, ", "),
        ") and leave ", pool_slabs - kept_sum, " of the pool's ", pool_slabs,
        "; one longest sequence of a tenant without a floor takes ", longest_best_effort,
        ": enlarge the pool, lower floors or shorten sequences"));
  }
  if (problems.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrJoin(problems, "; "));
}

TenantConfig ConfigUnder(MemoryPolicy policy, const TenantDemand& tenant) {
  TenantConfig config = tenant.config;
  if (policy == MemoryPolicy::kRemap) return config;
  config.pinned = true;
  config.floor_slabs = KeptSlabs(tenant, policy);
  if (policy == MemoryPolicy::kStatic) config.quota_slabs = config.floor_slabs;
  return config;
}

}  // namespace palimpsest
