// Opens a tier below T1 as the configuration describes it.
#ifndef PALIMPSEST_BROKER_BLOCKS_OPEN_TIER_H_
#define PALIMPSEST_BROKER_BLOCKS_OPEN_TIER_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "broker/blocks/tiers_config.h"
#include "broker/tier/tier_store.h"
#include "common/clock.h"

namespace palimpsest {

// Blocks until what an earlier process left in the tier is known. `tenants`: who has keys, if the
// tier is enciphered. `clock` and `observer` outlive the store. Errors begin with the tier's name.
absl::StatusOr<std::unique_ptr<TierStore>> OpenTier(const LowerTierConfig& config,
                                                    const std::vector<std::string>& tenants,
                                                    const Clock& clock,
                                                    TierStore::Observer* observer);

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_BLOCKS_OPEN_TIER_H_
