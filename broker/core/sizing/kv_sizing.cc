#include "broker/core/sizing/kv_sizing.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace palimpsest {
namespace {

// Bounds of one token and of all states over all layers. With them the largest sum,
// kMostTokenBytes * (kMaxTokens + kMaxBlockTokens) + kMostStateBytes, is below 2^62.
constexpr Bytes kMostTokenBytes = GiB(16);
constexpr Bytes kMostStateBytes = GiB(1 << 20);
constexpr int64_t kMostLayers = 1 << 12;
constexpr int64_t kMostReach = int64_t{1} << 32;

constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

absl::Status Refuse(absl::string_view what, int64_t most, int64_t got) {
  return absl::InvalidArgumentError(
      absl::StrCat("KV sizing: ", what, ": expected 0 to ", most, ", got ", got));
}

absl::Status Check(const KvGroup& group, int64_t block_tokens) {
  const KvReach& reach = group.reach;
  if (group.layers < 0 || group.layers > kMostLayers) {
    return Refuse("layers of a group", kMostLayers, group.layers);
  }
  if (group.token_bytes < Bytes(0) || group.token_bytes > kMostTokenBytes) {
    return Refuse("bytes of a token in a layer", kMostTokenBytes.count(),
                  group.token_bytes.count());
  }
  if (group.state_bytes < Bytes(0) || group.state_bytes > kMostStateBytes) {
    return Refuse("bytes of a layer's state", kMostStateBytes.count(), group.state_bytes.count());
  }
  if (reach.kind == KvReach::Kind::kAll) return absl::OkStatus();
  if (reach.tokens < 1 || reach.tokens > kMostReach) {
    return absl::InvalidArgumentError(absl::StrCat("KV sizing: window: expected 1 to ", kMostReach,
                                                   " tokens, got ", reach.tokens));
  }
  if (reach.kind == KvReach::Kind::kChunk && reach.tokens % block_tokens != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("KV sizing: block_tokens is ", block_tokens, ", expected a divisor of ",
                     reach.tokens, ", the tokens that layers of chunked attention keep"));
  }
  return absl::OkStatus();
}

}  // namespace

int64_t KvGroup::Blocks(int64_t tokens, int64_t block_tokens) const {
  if (token_bytes == Bytes(0)) return 0;
  const int64_t all = CeilDiv(tokens, block_tokens);
  switch (reach.kind) {
    case KvReach::Kind::kAll:
      return all;
    case KvReach::Kind::kWindow:
      return std::min(all, CeilDiv(reach.tokens - 1, block_tokens) + 1);
    case KvReach::Kind::kChunk:
      return std::min(all, reach.tokens / block_tokens);
  }
  return all;
}

absl::StatusOr<KvSizing> KvSizing::Create(std::vector<KvGroup> groups, int64_t block_tokens) {
  if (block_tokens < 1 || block_tokens > kMaxBlockTokens) {
    return absl::InvalidArgumentError(absl::StrCat("KV sizing: block_tokens: expected 1 to ",
                                                   kMaxBlockTokens, ", got ", block_tokens));
  }
  Bytes token, state;
  for (const KvGroup& group : groups) {
    if (absl::Status status = Check(group, block_tokens); !status.ok()) return status;
    token += group.token_bytes * group.layers;
    state += group.state_bytes * group.layers;
    if (token > kMostTokenBytes) {
      return Refuse("bytes of a token in all layers", kMostTokenBytes.count(), token.count());
    }
    if (state > kMostStateBytes) {
      return Refuse("bytes of a sequence's state", kMostStateBytes.count(), state.count());
    }
  }
  if (token + state == Bytes(0)) {
    return absl::InvalidArgumentError(
        "KV sizing: no layer keeps anything of a sequence; expected attention or recurrent layers");
  }
  return KvSizing(std::move(groups), block_tokens);
}

Bytes KvSizing::BytesFor(int64_t tokens) const {
  assert(tokens >= 0 && tokens <= kMaxTokens);
  if (tokens == 0) return Bytes(0);
  Bytes sum;
  for (const KvGroup& group : groups_) {
    sum += group.state_bytes * group.layers +
           group.BlockBytes(block_tokens_) * group.Blocks(tokens, block_tokens_);
  }
  return sum;
}

int64_t KvSizing::MaxTokens(Bytes memory) const {
  assert(memory >= Bytes(0));
  // Between `fits` and `too_many` blocks of tokens the border is found by halving: BytesFor is the
  // same over a block and never falls.
  const auto tokens = [this](int64_t blocks) {
    return std::min(blocks * block_tokens_, kMaxTokens);
  };
  int64_t fits = 0, too_many = CeilDiv(kMaxTokens, block_tokens_) + 1;
  while (too_many - fits > 1) {
    const int64_t middle = fits + (too_many - fits) / 2;
    (BytesFor(tokens(middle)) <= memory ? fits : too_many) = middle;
  }
  return tokens(fits);
}

int64_t KvSizing::MaxBatch(int64_t tokens, Bytes memory) const {
  assert(tokens >= 1 && memory >= Bytes(0));
  return memory / BytesFor(tokens);
}

}  // namespace palimpsest
