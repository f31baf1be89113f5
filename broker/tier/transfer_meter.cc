#include "broker/tier/transfer_meter.h"

#include <algorithm>

namespace palimpsest {

void TransferMeter::Record(Bytes bytes, absl::Duration elapsed) {
  const auto x = static_cast<double>(bytes.count());
  const double y = absl::ToDoubleSeconds(elapsed);
  const auto add = [](double& sum, double value) { sum = sum * kMemory + value; };
  add(weight_, 1);
  add(bytes_, x);
  add(seconds_, y);
  add(bytes_squared_, x * x);
  add(bytes_seconds_, x * y);
  ++transfers_;

  const double mean_bytes = bytes_ / weight_;
  const double mean_seconds = seconds_ / weight_;
  const double variance = bytes_squared_ / weight_ - mean_bytes * mean_bytes;
  // A spread of a tenth of the mean tells a slope from noise.
  constexpr double kSpread = 0.1 * 0.1;
  double slope;
  if (variance > kSpread * mean_bytes * mean_bytes) {
    slope = (bytes_seconds_ / weight_ - mean_bytes * mean_seconds) / variance;
  } else {
    const double expected = latency_ + seconds_per_byte_ * mean_bytes;
    const double share_of_latency = expected > 0 ? latency_ / expected : 0;
    slope = mean_seconds * (1 - share_of_latency) / mean_bytes;
  }
  // Neither part of a duration is negative.
  seconds_per_byte_ = std::clamp(slope, 0.0, mean_seconds / mean_bytes);
  latency_ = mean_seconds - seconds_per_byte_ * mean_bytes;
}

}  // namespace palimpsest
