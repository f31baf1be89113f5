#include "broker/blocks/block_messages.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"

namespace palimpsest {
namespace {

constexpr std::pair<v1::Tier, absl::string_view> kTierNames[] = {{v1::TIER_DRAM, "dram"},
                                                                 {v1::TIER_CXL, "cxl"},
                                                                 {v1::TIER_NVME, "nvme"},
                                                                 {v1::TIER_REMOTE, "remote"},
                                                                 {v1::TIER_DIRECTORY, "directory"}};

constexpr absl::Duration kYear = absl::Hours(24 * 365);
constexpr uint32_t kMostPriority = 100;

absl::Status CheckCount(absl::string_view what, int64_t count, int64_t most) {
  if (count >= 1 && count <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(count, " ", what, ", expected 1 to ", most));
}

absl::StatusOr<absl::Duration> CheckedSeconds(absl::string_view what, double seconds,
                                              absl::Duration most) {
  if (seconds >= 0 && seconds <= absl::ToDoubleSeconds(most)) return absl::Seconds(seconds);
  return absl::InvalidArgumentError(
      absl::StrCat(what, " is ", seconds, ", expected 0 to ", absl::ToDoubleSeconds(most)));
}

template <typename T>
absl::Status CheckDistinct(absl::string_view what, const std::vector<T>& values) {
  const absl::flat_hash_set<T> distinct(values.begin(), values.end());
  if (distinct.size() == values.size()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("a ", what, " is named twice"));
}

BlockKey KeyOf(const v1::BlockKey& key) { return {key.high(), key.low()}; }

void FillExtent(const ArenaExtent& extent, v1::BlockExtent& out) {
  out.set_chunk_id(extent.chunk.value());
  out.set_offset_bytes(static_cast<uint64_t>(extent.offset.count()));
  out.set_length_bytes(static_cast<uint64_t>(extent.length.count()));
}

v1::ReservedBlock::Result ResultOf(blocks::Reservation reservation) {
  switch (reservation) {
    case blocks::Reservation::kReserved:
      return v1::ReservedBlock::RESULT_RESERVED;
    case blocks::Reservation::kPresent:
      return v1::ReservedBlock::RESULT_PRESENT;
    case blocks::Reservation::kCollision:
      return v1::ReservedBlock::RESULT_COLLISION;
    case blocks::Reservation::kNoRoom:
      return v1::ReservedBlock::RESULT_NO_ROOM;
    case blocks::Reservation::kUnwanted:
      return v1::ReservedBlock::RESULT_UNWANTED;
  }
  return v1::ReservedBlock::RESULT_UNSPECIFIED;
}

cache::BlockType TypeOf(int type) {
  switch (type) {
    case v1::BLOCK_TYPE_SYSTEM_PROMPT:
      return cache::BlockType::kSystemPrompt;
    case v1::BLOCK_TYPE_TOOL_CONTEXT:
      return cache::BlockType::kToolContext;
    case v1::BLOCK_TYPE_USER_CONTEXT:
      return cache::BlockType::kUserContext;
    case v1::BLOCK_TYPE_REASONING:
      return cache::BlockType::kReasoning;
    default:
      return cache::BlockType::kUnknown;
  }
}

absl::StatusOr<blocks::CacheAction> ParseAction(const v1::CacheAction& action, absl::Time now) {
  using Kind = blocks::CacheAction::Kind;
  blocks::CacheAction parsed;
  switch (action.action_case()) {
    case v1::CacheAction::kRetain: {
      const v1::CacheAction::Retain& retain = action.retain();
      const auto until = CheckedSeconds("retain.seconds", retain.seconds(), kYear);
      if (!until.ok()) return until.status();
      const auto half_life =
          CheckedSeconds("retain.half_life_seconds", retain.half_life_seconds(), kYear);
      if (!half_life.ok()) return half_life.status();
      if (retain.priority() > kMostPriority) {
        return absl::InvalidArgumentError(absl::StrCat("retain.priority is ", retain.priority(),
                                                       ", expected 0 to ", kMostPriority));
      }
      parsed.kind = Kind::kRetain;
      if (*until > absl::ZeroDuration()) parsed.until = now + *until;
      if (*half_life > absl::ZeroDuration()) parsed.half_life = *half_life;
      constexpr uint64_t kMost = std::numeric_limits<int64_t>::max();
      if (retain.budget_bytes() > 0) {
        parsed.budget = Bytes(static_cast<int64_t>(std::min(retain.budget_bytes(), kMost)));
      }
      parsed.priority = retain.priority();
      return parsed;
    }
    case v1::CacheAction::kDemote:
      parsed.kind = Kind::kDemote;
      return parsed;
    case v1::CacheAction::kPrefetch: {
      const auto until = CheckedSeconds("prefetch.seconds", action.prefetch().seconds(), kYear);
      if (!until.ok()) return until.status();
      parsed.kind = Kind::kPrefetch;
      parsed.until = now + *until;
      return parsed;
    }
    case v1::CacheAction::kRelease:
      parsed.kind = Kind::kRelease;
      return parsed;
    case v1::CacheAction::ACTION_NOT_SET:
      break;
  }
  return absl::InvalidArgumentError(
      "the hint has no action, expected retain, demote, prefetch or release");
}

}  // namespace

absl::StatusOr<std::vector<BlockIdentity>> ParseChain(const v1::BlockChain& chain,
                                                      const std::string& tenant) {
  const int64_t tokens = chain.block_tokens();
  if (absl::Status status = CheckCount("tokens in a block", tokens, kMaxBlockTokens);
      !status.ok()) {
    return status;
  }
  const int64_t blocks = chain.keys_size() / 2;
  if (absl::Status status = CheckCount("blocks in a chain", blocks, kMaxCallBlocks); !status.ok()) {
    return status;
  }
  if (chain.keys_size() % 2 != 0 || chain.tokens_size() != blocks * tokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("a chain of ", chain.keys_size(), " halves of keys and ", chain.tokens_size(),
                     " tokens, expected two halves and ", tokens, " tokens for each block"));
  }
  std::vector<BlockIdentity> ids(static_cast<size_t>(blocks));
  absl::flat_hash_set<BlockKey> distinct;
  distinct.reserve(ids.size());
  BlockKey parent = KeyOf(chain.parent());
  const TokenId* next = chain.tokens().data();
  for (size_t i = 0; i < ids.size(); ++i) {
    BlockIdentity& id = ids[i];
    const int half = static_cast<int>(2 * i);
    id.key = {chain.keys(half), chain.keys(half + 1)};
    if (!distinct.insert(id.key).second) {
      return absl::InvalidArgumentError("a key is twice in a chain");
    }
    id.parent = std::exchange(parent, id.key);
    id.tokens.assign(next, next + tokens);
    next += tokens;
    id.tenant = tenant;
  }
  return ids;
}

absl::StatusOr<std::vector<ArenaLedger::Wanted>> ParseReserve(const v1::ReserveRequest& request,
                                                              const std::string& tenant,
                                                              Bytes chunk_bytes) {
  if (absl::Status status =
          CheckCount("bytes in a block",
                     static_cast<int64_t>(std::min<uint64_t>(request.block_bytes(),
                                                             std::numeric_limits<int64_t>::max())),
                     chunk_bytes.count());
      !status.ok()) {
    return status;
  }
  auto ids = ParseChain(request.chain(), tenant);
  if (!ids.ok()) return ids.status();
  std::vector<ArenaLedger::Wanted> wanted;
  wanted.reserve(ids->size());
  for (BlockIdentity& id : *ids) {
    wanted.push_back({std::move(id), Bytes(static_cast<int64_t>(request.block_bytes()))});
  }
  return wanted;
}

absl::StatusOr<std::vector<ArenaLedger::Committed>> ParseCommit(const v1::CommitRequest& request) {
  if (absl::Status status = CheckCount("blocks", request.blocks_size(), kMaxCallBlocks);
      !status.ok()) {
    return status;
  }
  std::vector<ArenaLedger::Committed> committed;
  std::vector<BlockKey> keys;
  for (const v1::CommittedBlock& block : request.blocks()) {
    committed.push_back({KeyOf(block.key()), block.checksum()});
    keys.push_back(committed.back().key);
  }
  if (absl::Status status = CheckDistinct("block", keys); !status.ok()) return status;
  return committed;
}

absl::StatusOr<std::vector<BlockKey>> ParseAbort(const v1::AbortRequest& request) {
  if (absl::Status status = CheckCount("keys", request.keys_size(), kMaxCallBlocks); !status.ok()) {
    return status;
  }
  std::vector<BlockKey> keys;
  for (const v1::BlockKey& key : request.keys()) keys.push_back(KeyOf(key));
  return keys;
}

absl::StatusOr<std::vector<uint32_t>> ParseMapChunks(const v1::MapChunksRequest& request) {
  if (absl::Status status = CheckCount("chunks", request.chunk_ids_size(), kMaxMappedChunks);
      !status.ok()) {
    return status;
  }
  std::vector<uint32_t> chunks(request.chunk_ids().begin(), request.chunk_ids().end());
  if (absl::Status status = CheckDistinct("chunk", chunks); !status.ok()) return status;
  return chunks;
}

absl::StatusOr<std::vector<ArenaExtent>> ParseRelease(const v1::ReleaseRequest& request) {
  if (absl::Status status = CheckCount("places", request.extents_size(), kMaxCallBlocks);
      !status.ok()) {
    return status;
  }
  std::vector<ArenaExtent> extents;
  for (const v1::BlockExtent& extent : request.extents()) {
    constexpr uint64_t kMost = std::numeric_limits<int64_t>::max();
    if (extent.offset_bytes() > kMost || extent.length_bytes() > kMost) {
      return absl::InvalidArgumentError(absl::StrCat("an extent of ", extent.length_bytes(),
                                                     " bytes at ", extent.offset_bytes(),
                                                     ", expected one that Acquire answered"));
    }
    extents.push_back({ArenaChunkId(extent.chunk_id()),
                       Bytes(static_cast<int64_t>(extent.offset_bytes())),
                       Bytes(static_cast<int64_t>(extent.length_bytes()))});
  }
  return extents;
}

absl::StatusOr<blocks::RequestEnding> ParseEnding(const v1::EndRequestRequest& request,
                                                  absl::Time now) {
  blocks::RequestEnding ending;
  ending.request = request.request_id();
  ending.how = request.ending() == v1::REQUEST_ENDING_END_OF_TURN ? cache::Ending::kEndOfTurn
               : request.ending() == v1::REQUEST_ENDING_TOOL_CALL ? cache::Ending::kToolCall
                                                                  : cache::Ending::kUnknown;
  ending.output_tokens = request.output_tokens();
  if (request.has_expected_idle_seconds()) {
    const auto idle =
        CheckedSeconds("expected_idle_seconds", request.expected_idle_seconds(), kYear);
    if (!idle.ok()) return idle.status();
    ending.expected_idle = *idle;
  }
  ending.last_turn = request.last_turn();
  if (request.has_then()) {
    if (request.then().has_prefetch()) {
      return absl::InvalidArgumentError(
          "`then` is a prefetch, which is for later: expected retain, demote or release");
    }
    const auto then = ParseAction(request.then(), now);
    if (!then.ok()) return then.status();
    ending.then = *then;
  }
  return ending;
}

absl::StatusOr<blocks::RecomputeCost> ParseRecompute(const v1::SetRecomputeRequest& request) {
  const auto first = CheckedSeconds("first_seconds", request.first_seconds(), absl::Hours(1));
  if (!first.ok()) return first.status();
  const auto per_position =
      CheckedSeconds("per_position_seconds", request.per_position_seconds(), absl::Hours(1));
  if (!per_position.ok()) return per_position.status();
  return blocks::RecomputeCost{*first, *per_position};
}

absl::StatusOr<ParsedAcquire> ParseAcquire(const v1::AcquireRequest& request,
                                           const std::string& tenant) {
  auto ids = ParseChain(request.chain(), tenant);
  if (!ids.ok()) return ids.status();
  const auto wait = CheckedSeconds("wait_seconds", request.wait_seconds(), kLongestWait);
  if (!wait.ok()) return wait.status();
  if (request.request_id() == 0) {
    return absl::InvalidArgumentError("request_id is 0, expected the worker's own number");
  }
  if (request.held_blocks() > ids->size() ||
      static_cast<size_t>(request.types_size()) > ids->size()) {
    return absl::InvalidArgumentError(
        absl::StrCat(request.held_blocks(), " held blocks and ", request.types_size(),
                     " types, expected at most the chain's ", ids->size()));
  }
  ParsedAcquire parsed;
  parsed.ids = *std::move(ids);
  for (const int type : request.types()) parsed.types.push_back(TypeOf(type));
  parsed.wait = *wait;
  blocks::AcquireRequest& out = parsed.request;
  out.request = request.request_id();
  out.conversation = cache::ConversationId(request.conversation_id());
  out.input_tokens = request.input_tokens() > 0
                         ? request.input_tokens()
                         : static_cast<int64_t>(request.chain().tokens_size());
  out.ids = parsed.ids;
  out.types = parsed.types;
  out.held = request.held_blocks();
  out.window = request.window_blocks();
  out.promote = request.promote();
  return parsed;
}

absl::StatusOr<ParsedHint> ParseHint(const v1::HintRequest& request, const std::string& tenant,
                                     absl::Time now) {
  ParsedHint parsed;
  const auto action = ParseAction(request.action(), now);
  if (!action.ok()) return action.status();
  parsed.hint.action = *action;
  size_t blocks = 0;
  switch (request.about_case()) {
    case v1::HintRequest::kChain: {
      auto ids = ParseChain(request.chain(), tenant);
      if (!ids.ok()) return ids.status();
      parsed.ids = *std::move(ids);
      blocks = parsed.ids.size();
      break;
    }
    case v1::HintRequest::kConversationId:
      parsed.hint.conversation = cache::ConversationId(request.conversation_id());
      break;
    case v1::HintRequest::ABOUT_NOT_SET:
      break;
  }
  if (parsed.ids.empty() && parsed.hint.conversation == cache::ConversationId(0)) {
    return absl::InvalidArgumentError(
        "the hint has neither a chain nor a conversation that is not 0");
  }
  if (request.first_block() > blocks) {
    return absl::InvalidArgumentError(absl::StrCat("first_block is ", request.first_block(),
                                                   ", expected at most the chain's ", blocks));
  }
  parsed.hint.ids = parsed.ids;
  const bool all = parsed.hint.action.kind == blocks::CacheAction::Kind::kPrefetch;
  parsed.hint.first = all ? 0 : request.first_block();
  return parsed;
}

void FillReserved(const std::vector<blocks::Reserved>& reserved, v1::ReserveResponse& out) {
  for (const blocks::Reserved& block : reserved) {
    v1::ReservedBlock& filled = *out.add_blocks();
    filled.set_result(ResultOf(block.result));
    if (block.result == blocks::Reservation::kReserved) {
      FillExtent(block.extent, *filled.mutable_extent());
    }
  }
}

void FillAcquired(const blocks::AcquireReply& reply, const std::vector<v1::Tier>& tiers,
                  v1::AcquireResponse& out) {
  out.mutable_blocks()->Reserve(static_cast<int>(reply.blocks.size()));
  for (const ArenaLedger::Acquired& block : reply.blocks) {
    v1::PinnedBlock& pinned = *out.add_blocks();
    FillExtent(block.extent, *pinned.mutable_extent());
    pinned.set_checksum(block.checksum);
  }
  for (const blocks::Elsewhere& elsewhere : reply.elsewhere) {
    v1::LowerBlocks& lower = *out.add_lower();
    lower.set_tier(tiers[elsewhere.tier.value()]);
    lower.set_blocks(elsewhere.blocks);
    lower.set_expected_seconds(absl::ToDoubleSeconds(elsewhere.expected));
  }
  out.set_first_block(static_cast<uint32_t>(reply.first));
  out.set_kept_blocks(static_cast<uint32_t>(reply.kept));
}

v1::Tier TierFromName(absl::string_view name) {
  for (const auto& [tier, known] : kTierNames) {
    if (known == name) return tier;
  }
  return v1::TIER_UNSPECIFIED;
}

absl::StatusOr<std::string> TierName(v1::Tier tier) {
  for (const auto& [known, name] : kTierNames) {
    if (known == tier) return std::string(name);
  }
  return absl::InvalidArgumentError(absl::StrCat("tier ", static_cast<int>(tier),
                                                 ", expected TIER_DRAM, TIER_CXL, TIER_NVME, "
                                                 "TIER_REMOTE or TIER_DIRECTORY"));
}

}  // namespace palimpsest
