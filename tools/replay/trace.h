// A recorded stream of requests, each with the path of blocks that its prompt consists of, in
// memory: what every trace format becomes before it is replayed.
#ifndef PALIMPSEST_TOOLS_REPLAY_TRACE_H_
#define PALIMPSEST_TOOLS_REPLAY_TRACE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "broker/core/cache/eviction_policy.h"
#include "common/block_key.h"

namespace palimpsest::replay {

inline constexpr size_t kMostRequests = 4'000'000;
inline constexpr size_t kMostAccesses = size_t{1} << 26;  // blocks of all paths

struct TraceRequest {
  absl::Duration arrival;
  cache::ConversationId conversation;  // 0: not known
  int64_t input_tokens = 0;
  int64_t output_tokens = 0;
  cache::Ending ending = cache::Ending::kUnknown;

  friend bool operator==(const TraceRequest&, const TraceRequest&) = default;
};

class Trace {
 public:
  Trace() = default;

  // The last block of a prompt may have fewer.
  int64_t block_tokens() const { return block_tokens_; }
  const std::vector<TraceRequest>& requests() const { return requests_; }  // by arrival
  // Blocks as numbers from 0 to distinct_blocks() - 1. Equal ones stand behind equal ones, and no
  // path has one twice.
  absl::Span<const uint32_t> path(size_t request) const {
    return absl::MakeConstSpan(blocks_).subspan(ends_[request],
                                                ends_[request + 1] - ends_[request]);
  }
  // The paths of all requests, one after another.
  absl::Span<const uint32_t> accesses() const { return blocks_; }
  uint32_t distinct_blocks() const { return distinct_blocks_; }

 private:
  friend class TraceBuilder;
  int64_t block_tokens_ = 1;
  std::vector<TraceRequest> requests_;
  std::vector<size_t> ends_ = {0};  // path i is [ends_[i], ends_[i + 1])
  std::vector<uint32_t> blocks_;
  uint32_t distinct_blocks_ = 0;
};

// Collects requests in any order.
class TraceBuilder {
 public:
  explicit TraceBuilder(int64_t block_tokens) { trace_.block_tokens_ = block_tokens; }

  // `names` are what the trace calls the blocks of the path. A block is known by its name and by
  // what stands before it, so whatever names are given, paths form trees; there is one for each
  // `root`. InvalidArgument if the path has more blocks than the input fills; OutOfRange above the
  // limits.
  absl::Status Add(const TraceRequest& request, uint32_t root, absl::Span<const uint64_t> names);

  // Sorted by arrival; requests that arrive together stay in order. Nothing may follow.
  Trace Build();

 private:
  Trace trace_;
  absl::flat_hash_map<BlockKey, uint32_t> blocks_;  // by parent or root, and name
};

}  // namespace palimpsest::replay

#endif  // PALIMPSEST_TOOLS_REPLAY_TRACE_H_
