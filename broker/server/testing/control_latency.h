// Round trips on the control socket of a whole broker in this process, measured.
#ifndef PALIMPSEST_BROKER_SERVER_TESTING_CONTROL_LATENCY_H_
#define PALIMPSEST_BROKER_SERVER_TESTING_CONTROL_LATENCY_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace palimpsest {

struct ControlLatency {
  std::string name;
  absl::Duration p50;
  absl::Duration p99;
};

// `rounds` of each: GetStatus; and SetKvTarget answered by KvPressure on an attached session, which
// passes through the arbiter. Starts a broker of its own, whose packer is `worker/model/packer`
// below the working directory.
absl::StatusOr<std::vector<ControlLatency>> MeasureControlLatency(int rounds);

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_SERVER_TESTING_CONTROL_LATENCY_H_
