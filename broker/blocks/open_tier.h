// Opens a tier below T1 as the configuration describes it.
#ifndef PALIMPSEST_BROKER_BLOCKS_OPEN_TIER_H_
#define PALIMPSEST_BROKER_BLOCKS_OPEN_TIER_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "broker/blocks/tiers_config.h"
#include "broker/tier/tier_store.h"
#include "common/clock.h"

namespace palimpsest {

// What a test puts between a tier's store and its medium; `tier` as in the configuration.
using TierWrapper = std::function<std::unique_ptr<TierBackend>(
    const std::string& tier, std::unique_ptr<TierBackend> medium)>;

// Blocks until what an earlier process left in the tier is known. `tenants`: whose blocks of other
// nodes are looked for in a tier that they share, and who has keys, if the tier is enciphered.
// `wrap` may be null. `clock` and `observer` outlive the store. Errors begin with the tier's name.
absl::StatusOr<std::unique_ptr<TierStore>> OpenTier(const LowerTierConfig& config,
                                                    const std::vector<std::string>& tenants,
                                                    const TierWrapper& wrap, const Clock& clock,
                                                    TierStore::Observer* observer);

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_BLOCKS_OPEN_TIER_H_
