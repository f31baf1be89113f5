// Of blocks that lie in parts: what of them can be had, and when.
#ifndef PALIMPSEST_WORKER_BLOCKS_COMMON_LOWER_H_
#define PALIMPSEST_WORKER_BLOCKS_COMMON_LOWER_H_

#include <cstddef>
#include <vector>

#include "absl/types/span.h"
#include "worker/core/kv_store.h"

namespace palimpsest {

// Blocks behind the first `common` ones of these answers, each for one part of all blocks, that all
// have, each as slow as its slowest part. What an answer has in tier 1 takes no time.
std::vector<LowerBlocks> LowerOfAll(absl::Span<const AcquireAnswer* const> answers, size_t common);

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_BLOCKS_COMMON_LOWER_H_
