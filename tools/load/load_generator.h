// Sends scheduled requests to workers as a router would, whether or not earlier ones have been
// answered (an open loop), and notes when each token arrives. Only a turn of a conversation waits
// for the answer of the one before it, and is due some time after that.
//
// Requests are built beforehand, but for those that continue others; one thread sends each when it
// is due, gRPC's threads note what comes. There may be thousands of streams at a time.
//
// Threads: one at a time; Run blocks.
#ifndef PALIMPSEST_TOOLS_LOAD_LOAD_GENERATOR_H_
#define PALIMPSEST_TOOLS_LOAD_LOAD_GENERATOR_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "absl/types/span.h"
#include "proto/palimpsest/v1/worker.grpc.pb.h"
#include "tools/load/latency.h"
#include "tools/load/schedule.h"

namespace palimpsest::load {

struct LoadTarget {
  std::string address;  // of a worker
  std::string token;    // its router token
  int32_t vocabulary = 0;
};

struct LoadProgress {
  absl::Duration now;  // since the start
  int64_t requests = 0, sent = 0, ended = 0;
};

// Since the start.
struct LoadEnd {
  // What has not ended by then is given up and cancelled.
  absl::Duration cutoff;
  // Turns that continue others are not sent if they are due then or later.
  absl::Duration last_turn = absl::InfiniteDuration();
};

class LoadGenerator {
 public:
  explicit LoadGenerator(std::vector<LoadTarget> targets);
  ~LoadGenerator();

  // Sends schedule[i] to target i; greedy answers of exactly the scheduled lengths. Turns say to
  // which conversation they belong; a request that none continues is one of its own. One record for
  // each request that was sent, in the schedule's order: those that continue one that did not
  // finish have none. `progress` is called about once a second.
  std::vector<std::vector<RequestRecord>> Run(
      absl::Span<const std::vector<ScheduledRequest>> schedule, const LoadEnd& end,
      const std::function<void(const LoadProgress&)>& progress = nullptr);

 private:
  class Clock;
  class Calls;

  const std::vector<LoadTarget> targets_;
  std::vector<std::unique_ptr<v1::Worker::Stub>> stubs_;
  int64_t runs_ = 0;
};

}  // namespace palimpsest::load

#endif  // PALIMPSEST_TOOLS_LOAD_LOAD_GENERATOR_H_
