// From what a client says of its request's KV cache to the core's structs, with every bound of
// cache_hints.proto checked. Pure; thread-safe. InvalidArgument names the field, what came and what
// is expected.
#ifndef PALIMPSEST_WORKER_SERVER_HINT_CONVERSION_H_
#define PALIMPSEST_WORKER_SERVER_HINT_CONVERSION_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "google/protobuf/repeated_ptr_field.h"
#include "proto/palimpsest/v1/cache_hints.pb.h"
#include "worker/core/request_hints.h"

namespace palimpsest {

inline constexpr int kMaxPromptParts = 8192;
inline constexpr int kMaxToolCallTokens = 16;

// 1 to 128 printable ASCII characters without spaces.
absl::Status CheckName(absl::string_view field, absl::string_view name);

// The number under which the node's broker knows a conversation, never 0. Requires a checked name.
uint64_t ConversationNumber(absl::string_view conversation_id);

absl::StatusOr<CacheAction> ToCacheAction(const v1::CacheAction& action);

// `prompt_length`: what the parts may cover, in their unit.
absl::StatusOr<std::vector<PromptPart>> ToPromptParts(
    const google::protobuf::RepeatedPtrField<v1::PromptPart>& parts, size_t prompt_length);

// Of a request that may name its conversation; without its parts and tokens of tool calls.
absl::StatusOr<RequestHints> ToRequestHints(const v1::RequestHints& hints,
                                            const std::string& conversation_id);

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_SERVER_HINT_CONVERSION_H_
