// Sends scheduled requests to workers as a router would, whether or not earlier ones have been
// answered (an open loop), and notes when each token arrives.
//
// All requests are built beforehand; one thread sends each when it is due, gRPC's threads note what
// comes. There may be thousands of streams at a time.
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

class LoadGenerator {
 public:
  explicit LoadGenerator(std::vector<LoadTarget> targets);
  ~LoadGenerator();

  // Sends schedule[i] to target i; greedy answers of exactly the scheduled lengths. What has not
  // ended `cutoff` after the start is given up and cancelled. One record for each request, in the
  // schedule's order. `progress` is called about once a second.
  std::vector<std::vector<RequestRecord>> Run(
      absl::Span<const std::vector<ScheduledRequest>> schedule, absl::Duration cutoff,
      const std::function<void(const LoadProgress&)>& progress = nullptr);

 private:
  class Call;
  class Calls;

  const std::vector<LoadTarget> targets_;
  std::vector<std::unique_ptr<v1::Worker::Stub>> stubs_;
  int64_t runs_ = 0;
};

}  // namespace palimpsest::load

#endif  // PALIMPSEST_TOOLS_LOAD_LOAD_GENERATOR_H_
