#include "worker/server/hint_conversion.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "common/text/utf8.h"
#include "xxhash.h"

namespace palimpsest {
namespace {

constexpr size_t kMaxName = 128;
constexpr absl::Duration kYear = absl::Hours(24 * 365);
constexpr uint32_t kMostPriority = 100;
constexpr int kMaxMarkers = 8;
constexpr size_t kMaxMarkerBytes = 64;

absl::StatusOr<absl::Duration> Seconds(absl::string_view field, double seconds) {
  if (seconds >= 0 && seconds <= absl::ToDoubleSeconds(kYear)) return absl::Seconds(seconds);
  return absl::InvalidArgumentError(
      absl::StrCat(field, " is ", seconds, ", expected 0 to ", absl::ToDoubleSeconds(kYear)));
}

absl::StatusOr<CacheAction> ToRetain(const v1::CacheAction::Retain& retain) {
  CacheAction action{.kind = CacheAction::Kind::kRetain};
  const auto time = Seconds("retain.seconds", retain.seconds());
  if (!time.ok()) return time.status();
  const auto half_life = Seconds("retain.half_life_seconds", retain.half_life_seconds());
  if (!half_life.ok()) return half_life.status();
  if (retain.priority() > kMostPriority) {
    return absl::InvalidArgumentError(
        absl::StrCat("retain.priority is ", retain.priority(), ", expected 0 to ", kMostPriority));
  }
  action.time = *time;
  action.half_life = *half_life;
  action.budget_bytes = retain.budget_bytes();
  action.priority = retain.priority();
  return action;
}

BlockType ToBlockType(v1::BlockType type) {
  switch (type) {
    case v1::BLOCK_TYPE_SYSTEM_PROMPT:
      return BlockType::kSystemPrompt;
    case v1::BLOCK_TYPE_TOOL_CONTEXT:
      return BlockType::kToolContext;
    case v1::BLOCK_TYPE_USER_CONTEXT:
      return BlockType::kUserContext;
    case v1::BLOCK_TYPE_REASONING:
      return BlockType::kReasoning;
    default:
      return BlockType::kUnknown;
  }
}

absl::Status CheckMarkers(const google::protobuf::RepeatedPtrField<std::string>& markers) {
  if (markers.size() > kMaxMarkers) {
    return absl::InvalidArgumentError(absl::StrCat("hints.tool_call_markers has ", markers.size(),
                                                   " entries, expected at most ", kMaxMarkers));
  }
  for (const std::string& marker : markers) {
    if (marker.empty() || marker.size() > kMaxMarkerBytes) {
      return absl::InvalidArgumentError(absl::StrCat("one of hints.tool_call_markers has ",
                                                     marker.size(), " bytes, expected 1 to ",
                                                     kMaxMarkerBytes));
    }
    if (absl::Status utf8 = CheckUtf8(marker, "one of hints.tool_call_markers"); !utf8.ok()) {
      return utf8;
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckName(absl::string_view field, absl::string_view name) {
  if (!name.empty() && name.size() <= kMaxName &&
      std::all_of(name.begin(), name.end(), absl::ascii_isgraph)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(field, " must be 1 to ", kMaxName,
                                                 " printable ASCII characters without spaces; got ",
                                                 name.size(), " bytes"));
}

uint64_t ConversationNumber(absl::string_view conversation_id) {
  return std::max<uint64_t>(XXH3_64bits(conversation_id.data(), conversation_id.size()), 1);
}

absl::StatusOr<CacheAction> ToCacheAction(const v1::CacheAction& action) {
  switch (action.action_case()) {
    case v1::CacheAction::kRetain:
      return ToRetain(action.retain());
    case v1::CacheAction::kDemote:
      return CacheAction{.kind = CacheAction::Kind::kDemote};
    case v1::CacheAction::kPrefetch: {
      const auto time = Seconds("prefetch.seconds", action.prefetch().seconds());
      if (!time.ok()) return time.status();
      return CacheAction{.kind = CacheAction::Kind::kPrefetch, .time = *time};
    }
    case v1::CacheAction::kRelease:
      return CacheAction{.kind = CacheAction::Kind::kRelease};
    case v1::CacheAction::ACTION_NOT_SET:
      break;
  }
  return absl::InvalidArgumentError(
      "there is no action: expected retain, demote, prefetch or release");
}

absl::StatusOr<std::vector<PromptPart>> ToPromptParts(
    const google::protobuf::RepeatedPtrField<v1::PromptPart>& parts, size_t prompt_length) {
  if (parts.size() > kMaxPromptParts) {
    return absl::InvalidArgumentError(absl::StrCat("the prompt has ", parts.size(),
                                                   " parts, expected at most ", kMaxPromptParts));
  }
  std::vector<PromptPart> result;
  result.reserve(static_cast<size_t>(parts.size()));
  size_t covered = 0;
  for (const v1::PromptPart& part : parts) {
    covered += part.length();
    if (part.length() == 0 || covered > prompt_length) {
      return absl::InvalidArgumentError(absl::StrCat(
          "parts[", result.size(), "] has length ", part.length(), " and ends at ", covered,
          ": expected at least 1, and no end behind the prompt's ", prompt_length));
    }
    result.push_back({ToBlockType(part.type()), static_cast<int32_t>(part.length())});
  }
  return result;
}

absl::StatusOr<RequestHints> ToRequestHints(const v1::RequestHints& hints,
                                            const std::string& conversation_id) {
  RequestHints result;
  if (!conversation_id.empty()) {
    if (absl::Status status = CheckName("conversation_id", conversation_id); !status.ok()) {
      return status;
    }
    result.conversation = ConversationNumber(conversation_id);
  }
  if (hints.has_expected_idle_seconds()) {
    const auto idle = Seconds("hints.expected_idle_seconds", hints.expected_idle_seconds());
    if (!idle.ok()) return idle.status();
    if (hints.last_turn()) {
      return absl::InvalidArgumentError(
          "hints has both expected_idle_seconds and last_turn: expected one at most");
    }
    result.expected_idle = *idle;
  }
  result.last_turn = hints.last_turn();
  if (hints.has_then()) {
    if (hints.then().has_prefetch()) {
      return absl::InvalidArgumentError(
          "hints.then is a prefetch: expected retain, demote or release; expected_idle_seconds "
          "brings blocks back in time");
    }
    const auto then = ToCacheAction(hints.then());
    if (!then.ok()) return then.status();
    result.then = *then;
  }
  if (absl::Status status = CheckMarkers(hints.tool_call_markers()); !status.ok()) return status;
  result.tool_call_texts.assign(hints.tool_call_markers().begin(), hints.tool_call_markers().end());
  return result;
}

}  // namespace palimpsest
