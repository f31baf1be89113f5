// From what a client sent to what a worker gets: every field checked, the prompt as token ids, the
// defaults filled in that the router needs to know. Pure apart from drawing seeds and request ids.
#ifndef PALIMPSEST_ROUTER_SERVER_REQUEST_PREPARATION_H_
#define PALIMPSEST_ROUTER_SERVER_REQUEST_PREPARATION_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/ids.h"
#include "proto/palimpsest/v1/router.pb.h"
#include "router/server/model_catalog.h"
#include "router/server/prompt_parts.h"

namespace palimpsest::router {

struct PreparedRequest {
  const ServedModel* model = nullptr;
  std::vector<TokenId> prompt;
  // With max_tokens cut to what the context leaves, and always with a seed: another worker must be
  // able to continue the output.
  v1::SamplingParams sampling;
  std::string request_id;
  // Empty: not known.
  std::string conversation_id;
  std::vector<v1::PromptPart> parts;  // of the prompt, in tokens
  v1::RequestHints hints;
  std::vector<TokenId> tool_call_tokens;
};

struct TokenisedPrompt {
  std::vector<TokenId> ids;
  std::vector<v1::PromptPart> parts;  // in tokens, as far as known
};

// INVALID_ARGUMENT naming field, value and range; see sampling.proto.
absl::Status CheckSampling(const v1::SamplingParams& sampling, int32_t vocab_size);

// The ids of the request's text or chat. `max_tokens` bounds the prompt. `parts`: of the text, in
// bytes, not beyond its end.
absl::StatusOr<TokenisedPrompt> TokeniseText(const ServedModel& model, const std::string& text,
                                             int32_t max_tokens,
                                             absl::Span<const TextPart> parts = {});
absl::StatusOr<TokenisedPrompt> TokeniseChat(const ServedModel& model, const v1::Chat& chat,
                                             int32_t max_tokens);

// `max_sequence_tokens`: longest sequence of prompt and output that the model's workers serve.
absl::StatusOr<PreparedRequest> PrepareRequest(const ServedModel& model,
                                               const v1::GenerateRequest& request,
                                               int32_t max_sequence_tokens);

}  // namespace palimpsest::router

#endif  // PALIMPSEST_ROUTER_SERVER_REQUEST_PREPARATION_H_
