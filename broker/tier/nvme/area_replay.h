// What a metadata area says is stored: its snapshot, and the log behind it replayed. Pure.
#ifndef PALIMPSEST_BROKER_TIER_NVME_AREA_REPLAY_H_
#define PALIMPSEST_BROKER_TIER_NVME_AREA_REPLAY_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "broker/tier/nvme/nvme_format.h"
#include "broker/tier/tier_backend.h"

namespace palimpsest {

struct AreaContent {
  std::vector<StoredBlock> blocks;  // by place; no two overlap, all inside of the device
  absl::Time last_written = absl::InfinitePast();
  uint64_t log_frames = 0;
};

// `area` is the whole of it. The log ends at the first frame that is not valid, unless frames of a
// later batch follow. DataLoss for that, for a damaged snapshot, and for records that contradict
// each other: then nothing of the area can be trusted, since what is missing may be a removal.
absl::StatusOr<AreaContent> ReplayArea(const NvmeLayout& layout, const AreaHeader& header,
                                       absl::string_view area);

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_TIER_NVME_AREA_REPLAY_H_
