// What a load generator sends, and when: requests of several tenants, drawn from traces. Pure and
// deterministic: the same options give the same requests on every machine.
//
// Arrivals of a tenant are a piece of the trace, stretched in time until it has the rate that is
// asked for. Stretching keeps the shape of the traffic: how many requests of a thousand come in
// bursts, and how long the silences are beside the bursts. (Leaving requests out until the rate
// fits would make bursty traffic ever smoother.) Pieces of different tenants begin far apart in the
// trace, so that their bursts do not coincide. The trace goes round.
//
// Request i of a tenant has the same lengths at every rate.
//
// Requests may be turns of conversations. Conversations arrive as requests do, whether or not
// others have ended; a turn follows when the one before it has been answered and the user, or a
// tool, has taken their time.
#ifndef PALIMPSEST_TOOLS_LOAD_SCHEDULE_H_
#define PALIMPSEST_TOOLS_LOAD_SCHEDULE_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/time/time.h"
#include "absl/types/span.h"
#include "tools/load/trace.h"

namespace palimpsest::load {

struct ScheduledRequest {
  absl::Duration due;  // since the start, or since the end of the one that it continues
  RequestLengths lengths;
  uint64_t seed = 0;  // of its prompt
  // The tokens of `system_seed` that stand before it, and before other requests with that seed.
  int32_t system_tokens = 0;
  uint64_t system_seed = 0;
  // The request of the same list whose whole prompt and answer stand before this one's prompt. It
  // comes earlier in the list, and nothing else continues it.
  std::optional<size_t> continues;

  friend bool operator==(const ScheduledRequest&, const ScheduledRequest&) = default;
};

struct ScheduleOptions {
  uint64_t seed = 0;
  // Of a measurement among several with one seed: prompts differ, so that none finds the KV of
  // another's.
  uint64_t point = 0;
  absl::Duration duration;
  // Requests a second of each tenant.
  std::vector<double> rates;
  // If not 0, all prompts have this length.
  int32_t prompt_tokens = 0;
};

// By tenant, ascending by due time, all within [0, duration). `arrivals` as ParseArrivals returns
// them, `lengths` not empty. A tenant has round(rate * duration) requests.
std::vector<std::vector<ScheduledRequest>> MakeSchedule(absl::Span<const absl::Duration> arrivals,
                                                        absl::Span<const RequestLengths> lengths,
                                                        const ScheduleOptions& options);

// How users talk to a model.
struct ConversationRules {
  int32_t system_tokens = 0;   // the same in front of all conversations of a tenant
  int32_t context_tokens = 0;  // of its own in front of each conversation, such as a document
  // Between an answer and the next turn: times of an exponential distribution with one of these
  // means. The first with this probability: the answer calls a tool, whose result is the turn.
  double tool_share = 0;
  absl::Duration tool_wait;
  absl::Duration human_wait;
};

// By tenant, conversation by conversation, the turns of each in order. Rates and counts are of
// conversations; conversation i of a tenant has the same turns and waits at every rate.
// `options.prompt_tokens` is not used.
std::vector<std::vector<ScheduledRequest>> MakeConversations(
    absl::Span<const absl::Duration> arrivals, absl::Span<const Conversation> conversations,
    const ScheduleOptions& options, const ConversationRules& rules);

// The seed of the b-th of what `a` is the seed of.
uint64_t MixSeeds(uint64_t a, uint64_t b);

// Uniformly random ids of 0 .. vocabulary - 1. A shorter prompt is the beginning of a longer one.
std::vector<int32_t> RandomPrompt(uint64_t seed, int32_t tokens, int32_t vocabulary);

}  // namespace palimpsest::load

#endif  // PALIMPSEST_TOOLS_LOAD_SCHEDULE_H_
