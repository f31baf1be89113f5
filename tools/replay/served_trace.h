// A trace as it is sent to a running node: which of its requests, when, and with which tokens. Pure
// and deterministic.
//
// Traces name blocks and are silent about what is in them, so the tokens are made up: a block has
// the same ones wherever it stands. What prompts of the trace have in common, those that are sent
// have in common too, and nothing else.
#ifndef PALIMPSEST_TOOLS_REPLAY_SERVED_TRACE_H_
#define PALIMPSEST_TOOLS_REPLAY_SERVED_TRACE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "tools/replay/trace.h"

namespace palimpsest::replay {

struct ServedTraceOptions {
  size_t requests = 0;  // the first so many of those that fit the model; 0: all
  double speed = 1;     // arrivals follow each other so many times as fast
  // What a block of the trace becomes, so that prompts fit a model that is smaller than those the
  // trace was recorded with; 0: as many tokens as it has.
  int64_t block_tokens = 0;
  int64_t most_output = 1;  // answers are cut to so many tokens
  int64_t most_tokens = 0;  // of prompt and answer together: what the model can have
};

struct ServedTrace {
  // What is sent, from its first arrival on: a simulated replay of it says what to expect.
  Trace trace;
  size_t too_long = 0;  // requests that were left out since the model cannot have them
};

// All prompts together have at most so many tokens, as they are made before the first one is sent.
inline constexpr int64_t kMostServedTokens = int64_t{1} << 27;

// InvalidArgument if nothing is left to send; OutOfRange above kMostServedTokens.
absl::StatusOr<ServedTrace> MakeServedTrace(const Trace& trace, const ServedTraceOptions& options);

// The prompt of a request of ServedTrace::trace: ids of 0 .. vocabulary - 1. Prompts of different
// `salt` have nothing in common. What is in no block of the path is the request's own.
std::vector<int32_t> ServedPrompt(const Trace& trace, size_t request, uint64_t salt,
                                  int32_t vocabulary);

}  // namespace palimpsest::replay

#endif  // PALIMPSEST_TOOLS_REPLAY_SERVED_TRACE_H_
