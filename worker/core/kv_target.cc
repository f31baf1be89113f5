#include "worker/core/kv_target.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace palimpsest {

absl::Status KvTargetPolicy::Config::Validate() const {
  if (low_water_slabs < 0 || high_water_slabs < low_water_slabs) {
    return absl::InvalidArgumentError(
        absl::StrCat("low- and high-water marks must satisfy 0 <= low <= high; got low ",
                     low_water_slabs, " and high ", high_water_slabs));
  }
  if (shrink_delay < absl::ZeroDuration()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the delay before the KV target shrinks must not "
                     "be negative; got ",
                     absl::FormatDuration(shrink_delay)));
  }
  return absl::OkStatus();
}

KvTargetPolicy::Target KvTargetPolicy::Update(const KvDemand& demand, absl::Time now) {
  const int32_t middle = (config_.low_water_slabs + config_.high_water_slabs + 1) / 2;
  const int32_t needed = std::min(demand.needed, config_.max_slabs);
  const int32_t wanted = std::clamp(demand.wanted, needed, config_.max_slabs);
  if (target_ < std::min(wanted + config_.low_water_slabs, config_.max_slabs)) {
    target_ = std::min(wanted + middle, config_.max_slabs);
    high_since_ = absl::InfiniteFuture();
  } else if (target_ <= wanted + config_.high_water_slabs) {
    high_since_ = absl::InfiniteFuture();
  } else if (high_since_ == absl::InfiniteFuture()) {
    high_since_ = now;
    peak_ = wanted;
  } else {
    peak_ = std::max(peak_, wanted);
    if (now - high_since_ >= config_.shrink_delay) {
      target_ = std::min(peak_ + middle, config_.max_slabs);
      high_since_ = absl::InfiniteFuture();
    }
  }
  return {target_, needed};
}

}  // namespace palimpsest
