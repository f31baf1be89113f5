// Sends requests with given prompts to a router as its clients do, each when it is due, whether or
// not earlier ones have been answered (an open loop), and notes when each token arrives.
//
// All requests are built beforehand; the caller's thread sends them, gRPC's threads note what
// comes.
#ifndef PALIMPSEST_TOOLS_LOAD_ROUTER_LOAD_H_
#define PALIMPSEST_TOOLS_LOAD_ROUTER_LOAD_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "absl/types/span.h"
#include "proto/palimpsest/v1/router.grpc.pb.h"
#include "tools/load/latency.h"
#include "tools/load/load_generator.h"

namespace palimpsest::load {

struct RouterTarget {
  v1::Router::Stub* stub = nullptr;
  std::string token;  // the tenant's
  std::string model;  // of the tenant's; empty: its only one
  int32_t vocabulary = 0;
};

struct PromptRequest {
  absl::Duration due;  // since the start
  std::vector<int32_t> prompt;
  int32_t output_tokens = 0;
  std::string conversation;  // empty: none
  v1::RequestHints hints;
};

// Greedy answers of exactly the asked lengths. `requests` ascend by `due`. What has not ended
// `cutoff` after the start is given up and cancelled. One record for each request, in their order.
// `progress` is called about once a second. Blocks.
std::vector<RequestRecord> RunRouterLoad(
    const RouterTarget& target, absl::Span<const PromptRequest> requests, absl::Duration cutoff,
    const std::function<void(const LoadProgress&)>& progress = nullptr);

}  // namespace palimpsest::load

#endif  // PALIMPSEST_TOOLS_LOAD_ROUTER_LOAD_H_
