// The limits of a scheduler, and what follows from them.
#ifndef PALIMPSEST_WORKER_CORE_SCHEDULER_CONFIG_H_
#define PALIMPSEST_WORKER_CORE_SCHEDULER_CONFIG_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "common/block_key.h"
#include "common/ids.h"
#include "worker/core/kv_geometry.h"
#include "worker/core/sequence.h"
#include "worker/core/step_plan.h"

namespace palimpsest {

struct SchedulerConfig {
  KvGeometry geometry;
  // Slabs that may be mapped at once; at most the region's.
  int32_t max_kv_slabs = 0;
  int32_t vocab_size = 0;
  // Longest sequence (prompt and output) in tokens.
  int32_t max_sequence_tokens = 0;
  // Tokens that a token sees, itself included; 0: all.
  int32_t sliding_window = 0;
  std::vector<TokenId> eos_token_ids;
  int32_t max_batch_sequences = 32;
  // Tokens of one step; at least max_batch_sequences, so that every decode takes part in every
  // step.
  int32_t max_step_tokens = 512;
  // Sequences that may wait beside a full batch.
  int32_t queue_capacity = 256;

  // The key before a sequence's first block (block_keys.h).
  BlockKey root_key;

  // KV blocks of preempted sequences that host memory holds; 0: all are computed again.
  int32_t swap_blocks = 0;

  // Steps that may be in flight; at most the runner's pipeline_depth().
  int32_t pipeline_depth = 1;

  int32_t max_sequences() const { return max_batch_sequences + queue_capacity; }

  // Blocks with max_kv_slabs mapped.
  int32_t capacity_blocks() const { return geometry.BlocksIn(max_kv_slabs); }
  // Full blocks before a token that it sees; 0: all.
  int32_t WindowBlocks() const {
    return sliding_window == 0 ? 0 : geometry.WindowBlocks(sliding_window);
  }
  // Most blocks that a sequence of `tokens` computed tokens holds at any time.
  int32_t PeakBlocks(int32_t tokens) const;
  // The longest sequence that can run: as configured, or less if max_kv_slabs don't hold it.
  int32_t LongestSequence() const;

  absl::Status Validate() const;
  // InvalidArgument: the prompt is empty, has ids outside the vocabulary or can never fit. Requires
  // a valid config.
  absl::Status CheckRequest(const SequenceRequest& request) const;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_CORE_SCHEDULER_CONFIG_H_
