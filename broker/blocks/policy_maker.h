// Eviction policies by the names that broker.yaml gives them.
#ifndef PALIMPSEST_BROKER_BLOCKS_POLICY_MAKER_H_
#define PALIMPSEST_BROKER_BLOCKS_POLICY_MAKER_H_

#include <cstddef>
#include <vector>

#include "absl/strings/string_view.h"
#include "broker/core/blocks/block_directory.h"

namespace palimpsest {

// `capacity`: about how many blocks each tier holds of the tenant, from T1 on; what policies with
// queues divide. Requires a name of tiers_config.h.
blocks::PolicyMaker MakePolicies(absl::string_view name, std::vector<size_t> capacity);

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_BLOCKS_POLICY_MAKER_H_
