// Which of several workers gets a request. Pure.
#ifndef PALIMPSEST_ROUTER_CORE_PLACEMENT_H_
#define PALIMPSEST_ROUTER_CORE_PLACEMENT_H_

#include <cstddef>
#include <cstdint>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "common/ids.h"
#include "common/strong_int.h"

namespace palimpsest::router {

// A worker in the order of the router's configuration, from 0.
using WorkerId = StrongInt<struct RouterWorkerIdTag, uint32_t>;

// A worker's load as last polled from it.
struct PolledLoad {
  int32_t running_sequences = 0;
  int32_t waiting_sequences = 0;
  int32_t kv_blocks_free = 0;
  int32_t kv_blocks_cached = 0;
  int32_t max_sequence_tokens = 0;  // 0: it has not answered yet
};

struct PlacementCandidate {
  WorkerId worker;
  // It had the last turn of the request's conversation.
  bool had_last_turn = false;
  // Requests that this router sent to it and that have not finished.
  int32_t outstanding = 0;
  PolledLoad load;
  // Counts the router's placements; the larger, the more recently this worker was chosen.
  uint64_t last_chosen = 0;
};

struct PlacementRequest {
  absl::Span<const TokenId> prompt;
  // The client's name for the conversation; empty: not known.
  absl::string_view conversation;
};

class PlacementPolicy {
 public:
  virtual ~PlacementPolicy() = default;

  // An index into `candidates`, which is not empty.
  virtual size_t Choose(const PlacementRequest& request,
                        absl::Span<const PlacementCandidate> candidates) const = 0;
};

// Fewest outstanding requests first (the router's own count, which is never stale), of which
// whoever had the conversation's last turn is forgiven a few: it need not compute the prompt again.
// Then the fewest sequences waiting at the worker; then the most KV blocks that are free or hold
// only reusable content; then the one that was chosen longest ago.
class LeastOutstanding : public PlacementPolicy {
 public:
  static constexpr int32_t kForgiven = 4;

  size_t Choose(const PlacementRequest& request,
                absl::Span<const PlacementCandidate> candidates) const override;
};

}  // namespace palimpsest::router

#endif  // PALIMPSEST_ROUTER_CORE_PLACEMENT_H_
