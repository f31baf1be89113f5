// Messages of the block store (block_store.proto) from and to what the worker's core speaks of.
// Everything from the broker is bounded here or by who uses it.
#ifndef PALIMPSEST_WORKER_BLOCKS_BLOCK_STORE_MESSAGES_H_
#define PALIMPSEST_WORKER_BLOCKS_BLOCK_STORE_MESSAGES_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "common/block_key.h"
#include "common/bytes.h"
#include "proto/palimpsest/v1/block_store.pb.h"
#include "worker/blocks/arena_map.h"
#include "worker/core/kv_store.h"

namespace palimpsest {

void SetKey(const BlockKey& key, v1::BlockKey& message);
void SetExtent(const ChunkExtent& extent, v1::BlockExtent& message);
ChunkExtent ExtentOf(const v1::BlockExtent& message);

v1::ReserveRequest ReserveMessage(uint64_t request, const BlockChain& chain, int32_t block_tokens,
                                  Bytes block_bytes);
// Blocks behind the most that a call may name are left out.
v1::AcquireRequest AcquireMessage(const StoreQuery& query, int32_t block_tokens);
v1::EndRequestRequest EndMessage(const StoreRequestEnd& end);
// The chain's blocks from `first` on.
v1::HintRequest DemoteMessage(const BlockChain& chain, int32_t first, int32_t block_tokens);
void SetAction(const CacheAction& action, v1::CacheAction& message);

ReservedBlock::Result ResultOf(v1::ReservedBlock::Result result);
// At most as many as a call may name.
int32_t CountOf(uint32_t blocks);
std::vector<LowerBlocks> LowerOf(const v1::AcquireResponse& response);
// InvalidArgument: no size that a chunk can have, or a token that cannot be one.
absl::StatusOr<Bytes> ChunkBytesOf(const v1::MapChunksResponse& response);

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_BLOCKS_BLOCK_STORE_MESSAGES_H_
