#include "router/server/prompt_parts.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"

namespace palimpsest::router {
namespace {

// Pieces of the rendered text among which a message is looked for: between two messages a template
// writes at most its role, and what it makes of tools.
constexpr size_t kLookAhead = 8;

v1::BlockType TypeOf(const v1::ChatMessage& message) {
  if (message.type() != v1::BLOCK_TYPE_UNSPECIFIED) return message.type();
  const std::string& role = message.role();
  if (role == "system" || role == "developer") return v1::BLOCK_TYPE_SYSTEM_PROMPT;
  if (role == "user") return v1::BLOCK_TYPE_USER_CONTEXT;
  if (role == "assistant") return v1::BLOCK_TYPE_REASONING;
  if (role == "tool" || role == "function" || role == "ipython") {
    return v1::BLOCK_TYPE_TOOL_CONTEXT;
  }
  return v1::BLOCK_TYPE_UNSPECIFIED;
}

void Append(v1::BlockType type, std::vector<v1::PromptPart>& parts) {
  if (parts.empty() || parts.back().type() != type) parts.emplace_back().set_type(type);
  parts.back().set_length(parts.back().length() + 1);
}

}  // namespace

std::vector<TextPart> ChatParts(const v1::Chat& chat, const ChatPrompt& rendered) {
  std::vector<TextPart> parts;
  size_t next = 0;  // of rendered.literal
  for (const v1::ChatMessage& message : chat.messages()) {
    const absl::string_view content = absl::StripAsciiWhitespace(message.content());
    const size_t last = std::min(next + kLookAhead, rendered.literal.size());
    for (size_t i = next; i < last && !content.empty(); ++i) {
      const TextRange& range = rendered.literal[i];
      const absl::string_view piece =
          absl::string_view(rendered.text).substr(range.begin, range.end - range.begin);
      if (absl::StripAsciiWhitespace(piece) != content) continue;
      parts.push_back({TypeOf(message), range.end});
      next = i + 1;
      break;
    }
  }
  return parts;
}

std::vector<v1::PromptPart> TokenParts(const Tokenizer& tokenizer, absl::string_view text,
                                       absl::Span<const TokenId> ids,
                                       absl::Span<const TextPart> parts) {
  std::vector<v1::PromptPart> result;
  size_t begin = 0;  // of the token, in the text
  size_t part = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    while (part < parts.size() && parts[part].end <= begin) ++part;
    if (part == parts.size()) break;
    Append(parts[part].type, result);
    const absl::string_view bytes = tokenizer.TokenBytes(ids[i]);
    // A token that begins every text is not written in it.
    const bool added = i == 0 && tokenizer.IsSpecial(ids[0]) && !absl::StartsWith(text, bytes);
    if (!added) begin += bytes.size();
  }
  return result;
}

}  // namespace palimpsest::router
