// What a load generator saw, in numbers. Pure.
//
// Times of a request count from the moment at which the schedule wanted it sent, so that neither a
// slow server nor a late client hides waiting. TTFT: until the first token is at the client. TBT:
// each later token has the time since the token before it; tokens that come together have 0 but for
// the first of them. A request that was given up when the measurement ended counts with what it has
// waited until then, which is less than what it would have waited. Requests that failed are counted
// beside the percentiles, not in them.
#ifndef PALIMPSEST_TOOLS_LOAD_LATENCY_H_
#define PALIMPSEST_TOOLS_LOAD_LATENCY_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "absl/types/span.h"

namespace palimpsest::load {

enum class Outcome { kFinished, kFailed, kUnfinished };

// All times since the start of the measurement.
struct RequestRecord {
  absl::Duration due;
  absl::Duration sent;
  std::vector<absl::Duration> tokens;  // when each came, ascending
  absl::Duration end;                  // finished, failed or given up
  Outcome outcome = Outcome::kUnfinished;
  std::string error;         // of one that failed
  uint32_t preemptions = 0;  // these two are known when finished
  uint32_t cached_tokens = 0;
  uint32_t prompt_tokens = 0;
  uint64_t digest = 0;  // of the token ids that came
  size_t request = 0;   // its place in the schedule
};

// A request is good if it finished, its first token came within `ttft`, and of its later tokens at
// least 99 % came within `tbt` of the one before.
struct Objective {
  absl::Duration ttft;
  absl::Duration tbt;
};

bool IsGood(const RequestRecord& record, const Objective& objective);

// The smallest value that at least the share `q` of all values does not exceed (nearest rank); 0 if
// there are none. `sorted` ascends; 0 < q <= 1.
double Quantile(absl::Span<const double> sorted, double q);

// Seconds, and shares of 0 to 1.
struct LoadSummary {
  int64_t requests = 0, finished = 0, failed = 0, unfinished = 0, good = 0;
  double goodput = 0;        // good requests for each second of the window
  double goodput_share = 0;  // of all requests
  double ttft_p50 = 0, ttft_p90 = 0, ttft_p99 = 0, ttft_mean = 0;
  double tbt_p50 = 0, tbt_p90 = 0, tbt_p99 = 0, tbt_max = 0;
  int64_t output_tokens = 0;
  double output_tokens_per_second = 0;  // of the tokens that came within the window
  double makespan = 0;                  // until the last request's end
  int64_t prompt_tokens = 0;            // of the finished
  int64_t cached_tokens = 0;            // of these, whose KV was there or was loaded
  int64_t preempted = 0;                // finished requests that were preempted at least once
  double preempted_share = 0;           // of the finished
  double late_p99 = 0, late_max = 0;    // the client's own lateness
  uint64_t digest = 0;                  // of all outputs in the records' order
};

// `window`: how long requests arrived. Requests that were due within the first `warm_up` of it are
// left out, and so are tokens that came then; less than `window`.
LoadSummary Summarize(absl::Span<const RequestRecord> records, const Objective& objective,
                      absl::Duration window, absl::Duration warm_up = absl::ZeroDuration());

// Folds token ids into a digest; begin with kEmptyDigest.
inline constexpr uint64_t kEmptyDigest = 0xcbf29ce484222325;
uint64_t AddToDigest(uint64_t digest, uint64_t value);

}  // namespace palimpsest::load

#endif  // PALIMPSEST_TOOLS_LOAD_LATENCY_H_
