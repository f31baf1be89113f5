// What the parts of a prompt are, from the text that it was made of to its tokens: a hint for how
// blocks are kept, which may be off by a few tokens where a tokenizer rewrites text. Pure.
#ifndef PALIMPSEST_ROUTER_SERVER_PROMPT_PARTS_H_
#define PALIMPSEST_ROUTER_SERVER_PROMPT_PARTS_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "common/ids.h"
#include "common/text/chat_template.h"
#include "common/text/tokenizer.h"
#include "proto/palimpsest/v1/router.pb.h"

namespace palimpsest::router {

// The text from the end of the part before to `end`, in bytes.
struct TextPart {
  v1::BlockType type = v1::BLOCK_TYPE_UNSPECIFIED;
  size_t end = 0;
};

// What each message of `chat` became of the prompt that `rendered` is, with what the template wrote
// before it. Messages whose text the template has rewritten beyond trimming belong to the one
// behind them.
std::vector<TextPart> ChatParts(const v1::Chat& chat, const ChatPrompt& rendered);

// The parts of `ids`, the tokens of `text`: each token is of the part that its first byte is in.
// Neighbours of one type are one part.
std::vector<v1::PromptPart> TokenParts(const Tokenizer& tokenizer, absl::string_view text,
                                       absl::Span<const TokenId> ids,
                                       absl::Span<const TextPart> parts);

}  // namespace palimpsest::router

#endif  // PALIMPSEST_ROUTER_SERVER_PROMPT_PARTS_H_
