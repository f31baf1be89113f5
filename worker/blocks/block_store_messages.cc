#include "worker/blocks/block_store_messages.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "common/random.h"

namespace palimpsest {
namespace {

// block_store.proto: blocks that a call may name.
constexpr size_t kMaxBlocks = 16384;
constexpr uint64_t kPage = 4096;
constexpr uint64_t kMaxChunkBytes = uint64_t{1} << 40;

void SetChain(const BlockChain& chain, int32_t block_tokens, v1::BlockChain& message) {
  const size_t blocks = std::min(chain.keys.size(), kMaxBlocks);
  SetKey(chain.parent, *message.mutable_parent());
  message.set_block_tokens(static_cast<uint32_t>(block_tokens));
  for (size_t i = 0; i < blocks; ++i) {
    message.add_keys(chain.keys[i].high);
    message.add_keys(chain.keys[i].low);
  }
  const auto end = chain.tokens.begin() + static_cast<ptrdiff_t>(blocks * block_tokens);
  message.mutable_tokens()->Add(chain.tokens.begin(), end);
}

v1::BlockType ToProto(BlockType type) {
  switch (type) {
    case BlockType::kUnknown:
      return v1::BLOCK_TYPE_UNSPECIFIED;
    case BlockType::kSystemPrompt:
      return v1::BLOCK_TYPE_SYSTEM_PROMPT;
    case BlockType::kToolContext:
      return v1::BLOCK_TYPE_TOOL_CONTEXT;
    case BlockType::kUserContext:
      return v1::BLOCK_TYPE_USER_CONTEXT;
    case BlockType::kReasoning:
      return v1::BLOCK_TYPE_REASONING;
  }
  return v1::BLOCK_TYPE_UNSPECIFIED;
}

}  // namespace

void SetKey(const BlockKey& key, v1::BlockKey& message) {
  message.set_high(key.high);
  message.set_low(key.low);
}

void SetExtent(const ChunkExtent& extent, v1::BlockExtent& message) {
  message.set_chunk_id(extent.chunk);
  message.set_offset_bytes(extent.offset_bytes);
  message.set_length_bytes(extent.length_bytes);
}

ChunkExtent ExtentOf(const v1::BlockExtent& message) {
  return {message.chunk_id(), message.offset_bytes(), message.length_bytes()};
}

v1::ReserveRequest ReserveMessage(uint64_t request, const BlockChain& chain, int32_t block_tokens,
                                  Bytes block_bytes) {
  v1::ReserveRequest message;
  SetChain(chain, block_tokens, *message.mutable_chain());
  message.set_block_bytes(static_cast<uint64_t>(block_bytes.count()));
  message.set_request_id(request);
  return message;
}

v1::AcquireRequest AcquireMessage(const StoreQuery& query, int32_t block_tokens) {
  v1::AcquireRequest message;
  SetChain(query.chain, block_tokens, *message.mutable_chain());
  message.set_held_blocks(
      static_cast<uint32_t>(std::min<size_t>(static_cast<size_t>(query.held), kMaxBlocks)));
  message.set_window_blocks(static_cast<uint32_t>(std::max(query.window, 0)));
  message.set_request_id(query.request);
  message.set_conversation_id(query.conversation);
  for (size_t i = 0; i < std::min(query.types.size(), kMaxBlocks); ++i) {
    message.add_types(ToProto(query.types[i]));
  }
  message.set_input_tokens(static_cast<uint32_t>(query.input_tokens));
  if (query.wait > absl::ZeroDuration()) {
    message.set_promote(true);
    message.set_wait_seconds(absl::ToDoubleSeconds(query.wait));
  }
  return message;
}

v1::EndRequestRequest EndMessage(const StoreRequestEnd& end) {
  v1::EndRequestRequest message;
  message.set_request_id(end.request);
  using How = StoreRequestEnd::How;
  message.set_ending(end.how == How::kEndOfTurn  ? v1::REQUEST_ENDING_END_OF_TURN
                     : end.how == How::kToolCall ? v1::REQUEST_ENDING_TOOL_CALL
                                                 : v1::REQUEST_ENDING_UNSPECIFIED);
  message.set_output_tokens(static_cast<uint32_t>(std::max(end.output_tokens, 0)));
  if (end.expected_idle.has_value()) {
    message.set_expected_idle_seconds(absl::ToDoubleSeconds(*end.expected_idle));
  }
  message.set_last_turn(end.last_turn);
  if (end.then.has_value()) SetAction(*end.then, *message.mutable_then());
  return message;
}

v1::HintRequest DemoteMessage(const BlockChain& chain, int32_t first, int32_t block_tokens) {
  v1::HintRequest message;
  SetChain(chain, block_tokens, *message.mutable_chain());
  message.set_first_block(
      static_cast<uint32_t>(std::min<size_t>(static_cast<size_t>(first), kMaxBlocks)));
  message.mutable_action()->mutable_demote();
  return message;
}

void SetAction(const CacheAction& action, v1::CacheAction& message) {
  switch (action.kind) {
    case CacheAction::Kind::kRetain: {
      v1::CacheAction::Retain& retain = *message.mutable_retain();
      retain.set_seconds(absl::ToDoubleSeconds(action.time));
      retain.set_half_life_seconds(absl::ToDoubleSeconds(action.half_life));
      retain.set_budget_bytes(action.budget_bytes);
      retain.set_priority(action.priority);
      return;
    }
    case CacheAction::Kind::kDemote:
      message.mutable_demote();
      return;
    case CacheAction::Kind::kPrefetch:
      message.mutable_prefetch()->set_seconds(absl::ToDoubleSeconds(action.time));
      return;
    case CacheAction::Kind::kRelease:
      message.mutable_release();
      return;
  }
}

ReservedBlock::Result ResultOf(v1::ReservedBlock::Result result) {
  switch (result) {
    case v1::ReservedBlock::RESULT_RESERVED:
      return ReservedBlock::Result::kReserved;
    case v1::ReservedBlock::RESULT_PRESENT:
      return ReservedBlock::Result::kPresent;
    case v1::ReservedBlock::RESULT_NO_ROOM:
      return ReservedBlock::Result::kNoRoom;
    default:
      return ReservedBlock::Result::kRefused;
  }
}

int32_t CountOf(uint32_t blocks) {
  return static_cast<int32_t>(std::min<uint32_t>(blocks, kMaxBlocks));
}

std::vector<LowerBlocks> LowerOf(const v1::AcquireResponse& response) {
  std::vector<LowerBlocks> result;
  for (const v1::LowerBlocks& lower : response.lower()) {
    const double seconds = lower.expected_seconds();
    result.push_back({CountOf(lower.blocks()), std::isnan(seconds)
                                                   ? std::numeric_limits<double>::infinity()
                                                   : std::max(seconds, 0.0)});
  }
  return result;
}

absl::StatusOr<Bytes> ChunkBytesOf(const v1::MapChunksResponse& response) {
  const uint64_t size = response.chunk_bytes();
  if (size == 0 || size > kMaxChunkBytes || size % kPage != 0 ||
      !Token::FromBytes(response.token()).has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the broker offers a chunk of ", size, " bytes with a token of ",
                     response.token().size(), "; expected whole pages and a token"));
  }
  return Bytes(static_cast<int64_t>(size));
}

}  // namespace palimpsest
