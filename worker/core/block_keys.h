// The names of KV blocks: a chain of hashes that begins with everything that a block's bytes depend
// on beside its tokens, so that blocks of other models, types or layouts never meet.
#ifndef PALIMPSEST_WORKER_CORE_BLOCK_KEYS_H_
#define PALIMPSEST_WORKER_CORE_BLOCK_KEYS_H_

#include <cstdint>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "common/block_key.h"
#include "common/ids.h"

namespace palimpsest {

// The key of a full block that holds `tokens` behind a prefix with key `parent` (the root for the
// first block of a sequence).
using BlockKeyFunction = BlockKey (*)(const BlockKey& parent, absl::Span<const TokenId> tokens);

// The first 128 bits of SHA-256 over the parent's key and the tokens. Thread-safe.
BlockKey ChainKey(const BlockKey& parent, absl::Span<const TokenId> tokens);

struct BlockKeyRoot {
  // A secret of the tenant, the same on all nodes: keys tell nobody else which tokens they stand
  // for.
  absl::string_view salt;
  // Of the model's weights (ImageManifest.fingerprint).
  absl::string_view fingerprint;
  absl::string_view kv_dtype;
  // How a block's bytes are arranged, and what computed them.
  absl::string_view layout;
  int32_t block_tokens = 0;
};

// The first 128 bits of SHA-256 over all of it, each part with its length.
BlockKey RootKey(const BlockKeyRoot& root);

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_CORE_BLOCK_KEYS_H_
