// The tiers of a replay, and what it takes to have a block's KV from each: measured elsewhere
// (`palctl doctor`, `palctl bench`) and written down in YAML.
//
//   first_token: 20ms            # of any request, beside loading and computing its prompt
//   recompute: {per_token: 60us, per_token_and_position: 4ns}
//   announce: 50ms               # requests are known so long before they run; default: not at all
//   tiers:                       # from the one that requests run in down
//     - {name: T0, blocks: 3000}
//     - {name: T1, blocks: 10000, latency: 30us, bytes_per_second: 50e9}
//     - {name: T3, blocks: 50000, latency: 200us, bytes_per_second: 5e9, prefetch: 2e9}
#ifndef PALIMPSEST_TOOLS_REPLAY_TIER_COSTS_H_
#define PALIMPSEST_TOOLS_REPLAY_TIER_COSTS_H_

#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "common/bytes.h"

namespace palimpsest::replay {

struct ReplayTier {
  std::string name;
  size_t blocks = 0;
  absl::Duration latency;                // of a load, whatever its size
  double bytes_per_second = 0;           // 0: nothing has to be loaded, as from the first tier
  double store_bytes_per_second = 0;     // into it
  double prefetch_bytes_per_second = 0;  // of its link that prefetches may use

  absl::Duration Load(Bytes bytes) const {
    return bytes_per_second == 0 ? absl::ZeroDuration()
                                 : latency + Transfer(bytes, bytes_per_second);
  }
  absl::Duration Store(Bytes bytes) const {
    return store_bytes_per_second == 0 ? absl::ZeroDuration()
                                       : Transfer(bytes, store_bytes_per_second);
  }

 private:
  static absl::Duration Transfer(Bytes bytes, double rate) {
    return absl::Seconds(static_cast<double>(bytes.count()) / rate);
  }
};

struct TierCosts {
  std::vector<ReplayTier> tiers;
  absl::Duration first_token;
  // Linear layers cost the same for each token, attention grows with its position.
  absl::Duration per_token;
  absl::Duration per_token_and_position;
  absl::Duration announce;

  // To compute tokens [first, last) of a prompt.
  absl::Duration Recompute(int64_t first, int64_t last) const;
  size_t blocks() const;  // of all tiers
};

// InvalidArgument with one line for each error.
absl::StatusOr<TierCosts> ParseTierCosts(absl::string_view yaml, absl::string_view file_name);
absl::StatusOr<TierCosts> ReadTierCosts(const std::string& file);

}  // namespace palimpsest::replay

#endif  // PALIMPSEST_TOOLS_REPLAY_TIER_COSTS_H_
