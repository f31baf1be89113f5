#include "router/server/request_preparation.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/random.h"
#include "common/text/utf8.h"
#include "worker/core/sampling_validation.h"

namespace palimpsest::router {
namespace {

constexpr size_t kMaxRequestId = 128;
constexpr int kMaxMessages = 4096;
// No token of a known vocabulary is longer, so longer texts cannot fit and are not worth splitting.
constexpr size_t kMaxBytesPerToken = 256;

absl::Status CheckIds(absl::string_view field, absl::Span<const TokenId> ids, int32_t vocab_size) {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] >= 0 && ids[i] < vocab_size) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        field, "[", i, "] is ", ids[i], ": expected a token id from 0 to ", vocab_size - 1));
  }
  return absl::OkStatus();
}

absl::Status TooLong(size_t tokens, int32_t max_tokens) {
  return absl::InvalidArgumentError(absl::StrCat("the prompt has ", tokens,
                                                 " tokens: this model takes at most ", max_tokens,
                                                 " and needs one more for its answer"));
}

absl::Status CheckSize(size_t bytes, int32_t max_tokens) {
  const size_t limit = static_cast<size_t>(max_tokens) * kMaxBytesPerToken;
  if (bytes <= limit) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "the prompt has ", bytes, " bytes, which cannot fit into ", max_tokens, " tokens"));
}

absl::StatusOr<std::string> RequestId(const std::string& given) {
  if (given.empty()) return absl::StrFormat("%016x", RandomSeed());
  if (given.size() > kMaxRequestId ||
      !std::all_of(given.begin(), given.end(), absl::ascii_isgraph)) {
    return absl::InvalidArgumentError(
        "request_id must be at most 128 printable ASCII characters without spaces");
  }
  return given;
}

absl::StatusOr<std::vector<TokenId>> PromptIds(const ServedModel& model,
                                               const v1::GenerateRequest& request,
                                               int32_t max_tokens) {
  switch (request.prompt_case()) {
    case v1::GenerateRequest::kText:
      return TokeniseText(model, request.text(), max_tokens);
    case v1::GenerateRequest::kChat:
      return TokeniseChat(model, request.chat(), max_tokens);
    case v1::GenerateRequest::kTokens: {
      const auto& ids = request.tokens().ids();
      const absl::Status valid = CheckIds("tokens.ids", absl::MakeConstSpan(ids.data(), ids.size()),
                                          model.folder->vocab_size);
      if (!valid.ok()) return valid;
      return std::vector<TokenId>(ids.begin(), ids.end());
    }
    case v1::GenerateRequest::PROMPT_NOT_SET:
      break;
  }
  return absl::InvalidArgumentError("the request must have a prompt: text, tokens or chat");
}

absl::StatusOr<std::vector<TokenId>> Encode(const ServedModel& model, const std::string& text,
                                            const EncodeOptions& options, int32_t max_tokens) {
  const absl::Status size = CheckSize(text.size(), max_tokens);
  if (!size.ok()) return size;
  return model.folder->tokenizer->Encode(text, options);
}

}  // namespace

absl::Status CheckSampling(const v1::SamplingParams& sampling, int32_t vocab_size) {
  for (const std::string& stop : sampling.stop()) {
    const absl::Status utf8 = CheckUtf8(stop, "a stop string");
    if (!utf8.ok()) return utf8;
  }
  SamplingFields fields;
  const auto copy = [](bool present, auto value, auto& field) {
    if (present) field = value;
  };
  copy(sampling.has_max_tokens(), sampling.max_tokens(), fields.max_tokens);
  copy(sampling.has_temperature(), sampling.temperature(), fields.temperature);
  copy(sampling.has_top_k(), sampling.top_k(), fields.top_k);
  copy(sampling.has_top_p(), sampling.top_p(), fields.top_p);
  copy(sampling.has_min_p(), sampling.min_p(), fields.min_p);
  copy(sampling.has_repetition_penalty(), sampling.repetition_penalty(), fields.repetition_penalty);
  copy(sampling.has_logprobs(), sampling.logprobs(), fields.logprobs);
  fields.stop.assign(sampling.stop().begin(), sampling.stop().end());
  fields.stop_token_ids.assign(sampling.stop_token_ids().begin(), sampling.stop_token_ids().end());
  return ValidateSampling(fields, vocab_size, /*drawn_seed=*/0).status();
}

absl::StatusOr<std::vector<TokenId>> TokeniseText(const ServedModel& model, const std::string& text,
                                                  int32_t max_tokens) {
  if (text.empty()) return absl::InvalidArgumentError("the prompt is empty");
  return Encode(model, text, {.parse_special = true, .add_special = true}, max_tokens);
}

absl::StatusOr<std::vector<TokenId>> TokeniseChat(const ServedModel& model, const v1::Chat& chat,
                                                  int32_t max_tokens) {
  if (model.folder->chat_template == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("model '", model.name, "' cannot render chats (",
                                                   model.folder->chat_template_status.message(),
                                                   "): send text or tokens"));
  }
  if (chat.messages().empty() || chat.messages_size() > kMaxMessages) {
    return absl::InvalidArgumentError(absl::StrCat("the chat has ", chat.messages_size(),
                                                   " messages: expected 1 to ", kMaxMessages));
  }
  std::vector<ChatTurn> turns;
  size_t bytes = 0;
  for (const v1::ChatMessage& message : chat.messages()) {
    bytes += message.role().size() + message.content().size();
    turns.push_back({message.role(), message.content()});
  }
  const absl::Status size = CheckSize(bytes, max_tokens);
  if (!size.ok()) return size;
  absl::StatusOr<ChatPrompt> prompt = model.folder->chat_template->Render(turns);
  if (!prompt.ok()) return prompt.status();
  return Encode(model, prompt->text, {.literal = prompt->literal}, max_tokens);
}

absl::StatusOr<PreparedRequest> PrepareRequest(const ServedModel& model,
                                               const v1::GenerateRequest& request,
                                               int32_t max_sequence_tokens) {
  PreparedRequest prepared;
  prepared.model = &model;
  absl::StatusOr<std::string> id = RequestId(request.request_id());
  if (!id.ok()) return id.status();
  prepared.request_id = *std::move(id);
  const absl::Status sampling = CheckSampling(request.sampling(), model.folder->vocab_size);
  if (!sampling.ok()) return sampling;
  const int32_t max_prompt = max_sequence_tokens - 1;
  absl::StatusOr<std::vector<TokenId>> prompt = PromptIds(model, request, max_prompt);
  if (!prompt.ok()) return prompt.status();
  if (prompt->empty()) return absl::InvalidArgumentError("the prompt has no tokens");
  if (prompt->size() > static_cast<size_t>(max_prompt)) return TooLong(prompt->size(), max_prompt);
  prepared.prompt = *std::move(prompt);

  const auto room =
      static_cast<uint32_t>(max_sequence_tokens) - static_cast<uint32_t>(prepared.prompt.size());
  prepared.sampling = request.sampling();
  prepared.sampling.set_max_tokens(
      request.sampling().has_max_tokens() ? std::min(room, request.sampling().max_tokens()) : room);
  if (!prepared.sampling.has_seed()) prepared.sampling.set_seed(RandomSeed());
  return prepared;
}

}  // namespace palimpsest::router
