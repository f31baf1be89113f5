// How much KV cache a sequence takes, to the byte, and how much fits into memory. Pure integers;
// immutable once made, so usable from any thread.
//
// A layer group (layers whose KV lives equally long) keeps its tokens in blocks of its own:
//
//   all tokens      ceil(n / B) blocks for n tokens, B being block_tokens
//   a window of W   the token at hand and the W - 1 before it. These touch at most
//                   ceil((W - 1) / B) + 1 blocks; those behind are given up
//   chunks of C     the tokens since the last multiple of C: at most C / B blocks
//   a state         so many bytes, however many tokens there were
//
// A block is the KV of B tokens in all layers of its group. Where a group gives blocks up, what
// counts is the most that it has held so far, because that is what a sequence must find room for:
// it is prefilled or decoded token by token, and a token's block is there before the window's last
// one goes.
#ifndef PALIMPSEST_BROKER_CORE_SIZING_KV_SIZING_H_
#define PALIMPSEST_BROKER_CORE_SIZING_KV_SIZING_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "common/bytes.h"

namespace palimpsest {

// Which tokens a layer must keep.
struct KvReach {
  enum class Kind { kAll, kWindow, kChunk };
  Kind kind = Kind::kAll;
  int64_t tokens = 0;  // of the window or chunk

  friend bool operator==(const KvReach&, const KvReach&) = default;
};

struct KvGroup {
  int32_t layers = 0;
  Bytes token_bytes;  // of one token in one layer
  Bytes state_bytes;  // of one sequence in one layer
  KvReach reach;

  Bytes BlockBytes(int64_t block_tokens) const { return token_bytes * layers * block_tokens; }
  // The most blocks that a sequence holds until it has `tokens` tokens; a state has none.
  int64_t Blocks(int64_t tokens, int64_t block_tokens) const;
};

class KvSizing {
 public:
  // Longer sequences are not counted: what fits more has room for this many.
  static constexpr int64_t kMaxTokens = int64_t{1} << 26;
  static constexpr int64_t kMaxBlockTokens = 4096;

  // InvalidArgument if sizes are negative or so large that sums could overflow, if a sequence would
  // take nothing, or if chunks are not whole blocks.
  static absl::StatusOr<KvSizing> Create(std::vector<KvGroup> groups, int64_t block_tokens);

  const std::vector<KvGroup>& groups() const { return groups_; }
  int64_t block_tokens() const { return block_tokens_; }

  // What a sequence takes at most until it has `tokens` tokens, 0 to kMaxTokens. Never falls as
  // they grow; above 0 for one token.
  Bytes BytesFor(int64_t tokens) const;

  // The longest sequence that `memory` has room for: the largest t <= kMaxTokens with
  // BytesFor(t) <= memory. Requires memory >= 0.
  int64_t MaxTokens(Bytes memory) const;

  // How many sequences of `tokens` tokens, 1 to kMaxTokens, `memory` has room for. Requires
  // memory >= 0.
  int64_t MaxBatch(int64_t tokens, Bytes memory) const;

 private:
  KvSizing(std::vector<KvGroup> groups, int64_t block_tokens)
      : groups_(std::move(groups)), block_tokens_(block_tokens) {}

  std::vector<KvGroup> groups_;
  int64_t block_tokens_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_CORE_SIZING_KV_SIZING_H_
