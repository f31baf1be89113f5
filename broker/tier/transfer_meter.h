// How long a transfer of n bytes takes: seconds = latency + n / bandwidth, fitted to the transfers
// seen, each weighing `kMemory` times as much as the one after which it came.
//
// Least squares over exponentially decayed sums. Where all transfers are of nearly the same size
// the slope is not determined: then the share of latency is kept as it was when it was, and the
// line goes through the mean.
//
// Pure logic; the caller serializes.
#ifndef PALIMPSEST_BROKER_TIER_TRANSFER_METER_H_
#define PALIMPSEST_BROKER_TIER_TRANSFER_METER_H_

#include <cstdint>

#include "absl/time/time.h"
#include "common/bytes.h"

namespace palimpsest {

class TransferMeter {
 public:
  // The last 1 / (1 - kMemory) transfers count most.
  static constexpr double kMemory = 31.0 / 32;

  // Requires bytes >= 1 and elapsed >= 0.
  void Record(Bytes bytes, absl::Duration elapsed);

  // False before the first transfer; the rest is then zero.
  bool measured() const { return transfers_ > 0; }
  absl::Duration latency() const { return absl::Seconds(latency_); }
  // Bytes per second of one transfer behind its latency.
  double bandwidth() const { return seconds_per_byte_ > 0 ? 1 / seconds_per_byte_ : 0; }
  absl::Duration Expect(Bytes bytes) const {
    return absl::Seconds(latency_ + seconds_per_byte_ * static_cast<double>(bytes.count()));
  }

 private:
  uint64_t transfers_ = 0;
  // Decayed sums over (bytes, seconds).
  double weight_ = 0, bytes_ = 0, seconds_ = 0, bytes_squared_ = 0, bytes_seconds_ = 0;
  double latency_ = 0;
  double seconds_per_byte_ = 0;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_TIER_TRANSFER_METER_H_
