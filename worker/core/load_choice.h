// Whether KV blocks that the block store has are loaded, awaited from lower tiers, or computed
// again: whatever is expected to end first. Pure functions of measured times.
#ifndef PALIMPSEST_WORKER_CORE_LOAD_CHOICE_H_
#define PALIMPSEST_WORKER_CORE_LOAD_CHOICE_H_

#include <cstdint>

#include "absl/time/time.h"
#include "absl/types/span.h"
#include "worker/core/kv_store.h"

namespace palimpsest {

// As measured; 0: not yet.
struct LoadCosts {
  // Computing a prompt's token at position p takes token_seconds + p * position_seconds.
  double token_seconds = 0;
  double position_seconds = 0;
  // Copying a block from tier 1, its checksum included.
  double block_seconds = 0;
  // From a call of the store to its answer.
  double answer_seconds = 0;
  // Tokens that a token sees, itself included; 0: all. A position counts as what is seen from it.
  int32_t window_tokens = 0;
};

// Of tokens first .. first + count - 1.
double ComputeSeconds(const LoadCosts& costs, int32_t first, int32_t count);

// What a sequence lacks, in blocks behind those it has.
struct LoadOffer {
  int32_t block_tokens = 0;
  int32_t first = 0;  // tokens that it has
  // Blocks behind those that lie left of the window of what is ready: computed or not needed.
  int32_t skipped = 0;
  int32_t ready = 0;   // blocks in tier 1, behind the skipped ones
  int32_t window = 0;  // blocks that are loaded for a prefix at most; 0: all
  absl::Span<const LowerBlocks> lower;
  // Blocks that are copied before these.
  int32_t queued = 0;
};

struct LoadChoice {
  // Blocks of `ready` to load; the rest is computed. With `patience` the store is asked again
  // first, to bring up what continues them.
  int32_t load = 0;
  // Waiting longer than this would have been for nothing.
  absl::Duration patience;
};

// Whether the store could save more than asking it costs. True where that is not known yet.
bool WorthAsking(const LoadCosts& costs, int32_t first, int32_t tokens);

// The end that saves most: s(e) = computing the blocks up to e - loading them - the wait for the
// last of them; nothing if no end saves time. Where costs are not known, what is ready is loaded
// (so they become known) and nothing is awaited. Among equals the shortest wait.
LoadChoice ChooseLoad(const LoadCosts& costs, const LoadOffer& offer);

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_CORE_LOAD_CHOICE_H_
