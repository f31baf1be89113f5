#include "tools/replay/served_trace.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "tools/load/schedule.h"

namespace palimpsest::replay {
namespace {

// A prompt's tokens where blocks of `before` tokens become blocks of `after`: what the last block
// has of a whole one, rounded up.
int64_t Scaled(int64_t tokens, int64_t before, int64_t after) {
  const int64_t rest = tokens % before;
  return tokens / before * after + (rest * after + before - 1) / before;
}

}  // namespace

absl::StatusOr<ServedTrace> MakeServedTrace(const Trace& trace, const ServedTraceOptions& options) {
  const int64_t block_tokens =
      options.block_tokens == 0 ? trace.block_tokens() : options.block_tokens;
  TraceBuilder builder(block_tokens);
  ServedTrace served;
  absl::Duration start;
  size_t count = 0;
  int64_t all_tokens = 0;
  for (size_t i = 0; i < trace.requests().size(); ++i) {
    if (options.requests > 0 && count == options.requests) break;
    TraceRequest request = trace.requests()[i];
    request.input_tokens = Scaled(request.input_tokens, trace.block_tokens(), block_tokens);
    request.output_tokens = std::clamp<int64_t>(request.output_tokens, 1, options.most_output);
    if (request.input_tokens == 0 ||
        request.input_tokens + request.output_tokens > options.most_tokens) {
      ++served.too_long;
      continue;
    }
    if (count == 0) start = request.arrival;
    request.arrival = (request.arrival - start) / options.speed;
    all_tokens += request.input_tokens;
    if (all_tokens > kMostServedTokens) {
      return absl::OutOfRangeError(absl::StrCat("the prompts have more than ", kMostServedTokens,
                                                " tokens: send fewer requests (--requests)"));
    }
    const absl::Span<const uint32_t> path = trace.path(i);
    const absl::Status added =
        builder.Add(request, 0, std::vector<uint64_t>(path.begin(), path.end()));
    if (!added.ok()) return added;
    ++count;
  }
  if (count == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("no request of the trace has a prompt and an answer of at most ",
                     options.most_tokens, " tokens together: make its blocks, of ", block_tokens,
                     " tokens, smaller (--block-tokens)"));
  }
  served.trace = builder.Build();
  return served;
}

std::vector<int32_t> ServedPrompt(const Trace& trace, size_t request, uint64_t salt,
                                  int32_t vocabulary) {
  // Of numbers that no block has.
  constexpr uint64_t kOwn = uint64_t{1} << 32;
  std::vector<int32_t> prompt;
  int64_t left = trace.requests()[request].input_tokens;
  prompt.reserve(static_cast<size_t>(left));
  const auto add = [&](uint64_t number, int64_t most) {
    const int64_t tokens = std::min(most, left);
    const std::vector<int32_t> ids =
        load::RandomPrompt(load::MixSeeds(salt, number), static_cast<int32_t>(tokens), vocabulary);
    prompt.insert(prompt.end(), ids.begin(), ids.end());
    left -= tokens;
  };
  for (const uint32_t block : trace.path(request)) add(block, trace.block_tokens());
  if (left > 0) add(kOwn + request, left);
  return prompt;
}

}  // namespace palimpsest::replay
