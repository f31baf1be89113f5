// What a client tells of its request's KV cache, which the block store hears of; it changes neither
// tokens nor steps. Pure; plain data.
#ifndef PALIMPSEST_WORKER_CORE_REQUEST_HINTS_H_
#define PALIMPSEST_WORKER_CORE_REQUEST_HINTS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "absl/types/span.h"
#include "common/ids.h"

namespace palimpsest {

// As in cache_hints.proto.
enum class BlockType : uint8_t {
  kUnknown,
  kSystemPrompt,
  kToolContext,
  kUserContext,
  kReasoning,
};

struct PromptPart {
  BlockType type = BlockType::kUnknown;
  int32_t tokens = 0;
};

// The type of each of the first `blocks` blocks of a prompt that consists of these parts and of
// text that is not known: that of most of its tokens, of several the one that comes first.
std::vector<BlockType> BlockTypes(absl::Span<const PromptPart> parts, int32_t block_tokens,
                                  size_t blocks);

struct CacheAction {
  enum class Kind : uint8_t { kRetain, kDemote, kPrefetch, kRelease };
  Kind kind = Kind::kRetain;
  // kRetain: how long; kPrefetch: until then. Zero: as long as may be, as soon as possible.
  absl::Duration time;
  // kRetain, each zero for no limit of the client's.
  absl::Duration half_life;
  uint64_t budget_bytes = 0;
  uint32_t priority = 0;
};

struct RequestHints {
  // 0: not known.
  uint64_t conversation = 0;
  std::vector<PromptPart> parts;
  std::optional<absl::Duration> expected_idle;
  bool last_turn = false;
  std::optional<CacheAction> then;  // when the request has ended
  // What makes of an output the call of a tool: one of these tokens, or one of these texts.
  std::vector<TokenId> tool_call_tokens;
  std::vector<std::string> tool_call_texts;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_CORE_REQUEST_HINTS_H_
