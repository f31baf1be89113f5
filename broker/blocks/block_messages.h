// What workers say to the block store: messages as the directory's types, or the reason why they
// are none, and answers. Pure.
#ifndef PALIMPSEST_BROKER_BLOCKS_BLOCK_MESSAGES_H_
#define PALIMPSEST_BROKER_BLOCKS_BLOCK_MESSAGES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "broker/core/arena/arena_ledger.h"
#include "broker/core/blocks/block_directory.h"
#include "common/block_identity.h"
#include "proto/palimpsest/v1/block_store.pb.h"

namespace palimpsest {

inline constexpr int kMaxCallBlocks = 16384;
inline constexpr int kMaxMappedChunks = 1024;
inline constexpr absl::Duration kLongestWait = absl::Seconds(60);

// The bounds are those that block_store.proto states; a message beyond them is InvalidArgument.

absl::StatusOr<std::vector<BlockIdentity>> ParseChain(const v1::BlockChain& chain,
                                                      const std::string& tenant);
absl::StatusOr<std::vector<ArenaLedger::Wanted>> ParseReserve(const v1::ReserveRequest& request,
                                                              const std::string& tenant,
                                                              Bytes chunk_bytes);
absl::StatusOr<std::vector<ArenaLedger::Committed>> ParseCommit(const v1::CommitRequest& request);
absl::StatusOr<std::vector<BlockKey>> ParseAbort(const v1::AbortRequest& request);
absl::StatusOr<std::vector<uint32_t>> ParseMapChunks(const v1::MapChunksRequest& request);
absl::StatusOr<std::vector<ArenaExtent>> ParseRelease(const v1::ReleaseRequest& request);
// `now`: what times count from.
absl::StatusOr<blocks::RequestEnding> ParseEnding(const v1::EndRequestRequest& request,
                                                  absl::Time now);
absl::StatusOr<blocks::RecomputeCost> ParseRecompute(const v1::SetRecomputeRequest& request);

// An Acquire whose spans point into it.
struct ParsedAcquire {
  std::vector<BlockIdentity> ids;
  std::vector<cache::BlockType> types;
  blocks::AcquireRequest request;
  absl::Duration wait;
};
absl::StatusOr<ParsedAcquire> ParseAcquire(const v1::AcquireRequest& request,
                                           const std::string& tenant);

// A hint whose span points into it.
struct ParsedHint {
  std::vector<BlockIdentity> ids;
  blocks::BlockHint hint;
};
absl::StatusOr<ParsedHint> ParseHint(const v1::HintRequest& request, const std::string& tenant,
                                     absl::Time now);

void FillReserved(const std::vector<blocks::Reserved>& reserved, v1::ReserveResponse& out);
// `tiers`: of each TierIndex.
void FillAcquired(const blocks::AcquireReply& reply, const std::vector<v1::Tier>& tiers,
                  v1::AcquireResponse& out);

// "dram", "cxl", ...: as in the configuration. TIER_UNSPECIFIED for a name that is none.
v1::Tier TierFromName(absl::string_view name);
// InvalidArgument for TIER_UNSPECIFIED and unknown numbers.
absl::StatusOr<std::string> TierName(v1::Tier tier);

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_BLOCKS_BLOCK_MESSAGES_H_
