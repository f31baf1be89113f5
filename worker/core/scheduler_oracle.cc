#include "worker/core/scheduler_oracle.h"

#include <algorithm>
#include <utility>

#include "worker/core/check.h"

namespace palimpsest {
namespace {

// Whether `output`, of which the last token is new, has come to its end.
bool Ends(const TokenBytes& bytes, const SequenceRequest& request,
          const std::vector<TokenId>& output, int32_t most, ExpectedOutput& expected) {
  const auto& stop_ids = request.params.stop_token_ids;
  const TokenId last = output.back();
  if ((last == kOracleEos && !request.params.ignore_eos) ||
      std::find(stop_ids.begin(), stop_ids.end(), last) != stop_ids.end()) {
    expected.reason = FinishReason::kStopToken;
    return true;
  }
  std::string text;
  for (TokenId token : output) text.append(std::string(bytes.BytesOf(token)));
  // The match that is complete first; of those that end together the longest.
  std::pair<size_t, size_t> first(std::string::npos, 0);  // end, start
  for (const std::string& stop : request.params.stop) {
    for (size_t at = text.find(stop); at != std::string::npos; at = text.find(stop, at + 1)) {
      first = std::min(first, {at + stop.size(), at});
    }
  }
  if (first.first != std::string::npos) {
    expected.reason = FinishReason::kStopString;
    expected.trim = static_cast<int32_t>(text.size() - first.second);
    return true;
  }
  return static_cast<int32_t>(output.size()) >= most;
}

}  // namespace

ExpectedOutput OutputAlone(const FakeModel::Config& model, const TokenBytes& bytes,
                           const SequenceRequest& request, int32_t longest) {
  ExpectedOutput expected;
  const auto begin = static_cast<int32_t>(request.prompt.size()) - request.output_offset;
  const int32_t room = longest - begin;
  const int32_t most =
      request.params.max_tokens == 0 ? room : std::min(request.params.max_tokens, room);
  const auto stream =
      FakeModel::Reference(model, request.prompt, request.output_offset, request.params,
                           std::max(0, most - request.output_offset));
  std::vector<TokenId> output(request.prompt.begin() + begin, request.prompt.end());
  if (!output.empty() && Ends(bytes, request, output, most, expected)) return expected;
  for (TokenId token : stream) {
    output.push_back(token);
    expected.tokens.push_back(token);
    if (Ends(bytes, request, output, most, expected)) return expected;
  }
  PALIMPSEST_CHECK(false && "the reference has no end");
  return expected;
}

}  // namespace palimpsest
