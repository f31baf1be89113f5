// The running node that a trace is sent to: one tenant's model behind its router, and what the
// broker counts of the tenant's blocks meanwhile.
//
// Threads: one at a time; the calls block. The Node outlives it.
#ifndef PALIMPSEST_TOOLS_PALCTL_REPLAY_TARGET_H_
#define PALIMPSEST_TOOLS_PALCTL_REPLAY_TARGET_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "tools/load/router_load.h"
#include "tools/palctl/commands.h"
#include "tools/palctl/node.h"
#include "tools/replay/client_hints.h"
#include "tools/replay/served_report.h"
#include "tools/replay/trace.h"

namespace palimpsest::palctl {

class ReplayTarget {
 public:
  // Asks the router. Empty names: the only tenant with a token, its only model; InvalidArgument if
  // there are several.
  static absl::StatusOr<ReplayTarget> Find(const Node& node, std::string tenant,
                                           const std::string& model);

  // Of prompt and answer together.
  int64_t most_tokens() const { return most_tokens_; }

  // Sends every request of a ServedTrace when it is due, with prompts of `report.salt`, the
  // conversations that the trace knows and these hints, and waits until `patience` after the last
  // one. Fills in what `report` says of what came back.
  absl::Status Send(const replay::Trace& trace, replay::Hints hints, absl::Duration patience,
                    const Terminal& terminal, replay::ServedReport& report) const;

 private:
  ReplayTarget(const Node& node, std::string tenant, load::RouterTarget router, int64_t most_tokens)
      : node_(&node),
        tenant_(std::move(tenant)),
        router_(std::move(router)),
        most_tokens_(most_tokens) {}

  // Since the broker's start, of the tenant in each tier below T0.
  absl::StatusOr<std::vector<replay::ServedTier>> Tiers() const;

  const Node* node_;
  std::string tenant_;
  load::RouterTarget router_;
  int64_t most_tokens_;
};

}  // namespace palimpsest::palctl

#endif  // PALIMPSEST_TOOLS_PALCTL_REPLAY_TARGET_H_
