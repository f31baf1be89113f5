#include "router/server/request_preparation.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/random.h"
#include "common/text/utf8.h"
#include "worker/core/sampling_validation.h"
#include "worker/server/hint_conversion.h"

namespace palimpsest::router {
namespace {

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
  if (absl::Status status = CheckName("request_id", given); !status.ok()) return status;
  return given;
}

absl::StatusOr<TokenisedPrompt> PromptOf(const ServedModel& model,
                                         const v1::GenerateRequest& request, int32_t max_tokens) {
  switch (request.prompt_case()) {
    case v1::GenerateRequest::kText: {
      const auto checked = ToPromptParts(request.parts(), request.text().size());
      if (!checked.ok()) return checked.status();
      std::vector<TextPart> parts;
      size_t end = 0;
      for (const v1::PromptPart& part : request.parts()) {
        parts.push_back({part.type(), end += part.length()});
      }
      return TokeniseText(model, request.text(), max_tokens, parts);
    }
    case v1::GenerateRequest::kChat:
      if (!request.parts().empty()) {
        return absl::InvalidArgumentError(
            "a chat has no parts: expected the type of each message in it");
      }
      return TokeniseChat(model, request.chat(), max_tokens);
    case v1::GenerateRequest::kTokens: {
      const auto& ids = request.tokens().ids();
      const absl::Status valid = CheckIds("tokens.ids", absl::MakeConstSpan(ids.data(), ids.size()),
                                          model.folder->vocab_size);
      if (!valid.ok()) return valid;
      const auto checked = ToPromptParts(request.parts(), static_cast<size_t>(ids.size()));
      if (!checked.ok()) return checked.status();
      return TokenisedPrompt{{ids.begin(), ids.end()},
                             {request.parts().begin(), request.parts().end()}};
    }
    case v1::GenerateRequest::PROMPT_NOT_SET:
      break;
  }
  return absl::InvalidArgumentError("the request must have a prompt: text, tokens or chat");
}

absl::StatusOr<TokenisedPrompt> Encode(const ServedModel& model, const std::string& text,
                                       const EncodeOptions& options, int32_t max_tokens,
                                       absl::Span<const TextPart> parts) {
  const absl::Status size = CheckSize(text.size(), max_tokens);
  if (!size.ok()) return size;
  const Tokenizer& tokenizer = *model.folder->tokenizer;
  auto ids = tokenizer.Encode(text, options);
  if (!ids.ok()) return ids.status();
  TokenisedPrompt prompt{*std::move(ids), {}};
  prompt.parts = TokenParts(tokenizer, text, prompt.ids, parts);
  return prompt;
}

// The client's markers that are tokens; without any, of a chat, those that are in use.
std::vector<TokenId> ToolCallTokens(const ServedModel& model, const v1::GenerateRequest& request) {
  static constexpr absl::string_view kCommon[] = {"<tool_call>", "<|python_tag|>", "[TOOL_CALLS]",
                                                  "<|tool_calls_section_begin|>",
                                                  "<｜tool▁calls▁begin｜>"};
  const auto& given = request.hints().tool_call_markers();
  std::vector<TokenId> tokens;
  const auto add = [&](absl::string_view name) {
    if (const auto id = model.folder->tokenizer->Find(name)) tokens.push_back(*id);
  };
  for (const std::string& marker : given) add(marker);
  if (!given.empty() || !request.has_chat()) return tokens;
  for (const absl::string_view name : kCommon) add(name);
  return tokens;
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

absl::StatusOr<TokenisedPrompt> TokeniseText(const ServedModel& model, const std::string& text,
                                             int32_t max_tokens, absl::Span<const TextPart> parts) {
  if (text.empty()) return absl::InvalidArgumentError("the prompt is empty");
  return Encode(model, text, {.parse_special = true, .add_special = true, .literal = {}},
                max_tokens, parts);
}

absl::StatusOr<TokenisedPrompt> TokeniseChat(const ServedModel& model, const v1::Chat& chat,
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
  return Encode(model, prompt->text, {.literal = prompt->literal}, max_tokens,
                ChatParts(chat, *prompt));
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
  const absl::Status hints = ToRequestHints(request.hints(), request.conversation_id()).status();
  if (!hints.ok()) return hints;
  const int32_t max_prompt = max_sequence_tokens - 1;
  absl::StatusOr<TokenisedPrompt> prompt = PromptOf(model, request, max_prompt);
  if (!prompt.ok()) return prompt.status();
  const size_t size = prompt->ids.size();
  if (size == 0) return absl::InvalidArgumentError("the prompt has no tokens");
  if (size > static_cast<size_t>(max_prompt)) return TooLong(size, max_prompt);
  prepared.prompt = std::move(prompt->ids);
  prepared.parts = std::move(prompt->parts);
  prepared.conversation_id = request.conversation_id();
  prepared.hints = request.hints();
  prepared.tool_call_tokens = ToolCallTokens(model, request);

  const auto room =
      static_cast<uint32_t>(max_sequence_tokens) - static_cast<uint32_t>(prepared.prompt.size());
  prepared.sampling = request.sampling();
  prepared.sampling.set_max_tokens(
      request.sampling().has_max_tokens() ? std::min(room, request.sampling().max_tokens()) : room);
  if (!prepared.sampling.has_seed()) prepared.sampling.set_seed(RandomSeed());
  return prepared;
}

}  // namespace palimpsest::router
