// What one engine step computes and what comes out of it: the contract between the scheduler and a
// ModelRunner. Pure data.
//
// Ownership: a plan, and everything that its spans and pointers lead to, is read during
// ModelRunner::Submit only. A runner copies what the step needs later.
#ifndef PALIMPSEST_WORKER_CORE_STEP_PLAN_H_
#define PALIMPSEST_WORKER_CORE_STEP_PLAN_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/time/time.h"
#include "absl/types/span.h"
#include "common/bytes.h"
#include "common/ids.h"
#include "worker/core/sampling.h"

namespace palimpsest {

// Most steps in flight: one runs while the next is prepared. More would only delay what depends on
// the tokens.
inline constexpr int kMaxPipelineDepth = 2;

// Consecutive tokens of one sequence: a chunk of its prompt (prefill) or its last token (decode).
struct SequenceChunk {
  // New tokens, in order; never empty. Their KV is written by this step. With `token_from` it has
  // one entry, which only holds the place of a token that is not known yet.
  absl::Span<const TokenId> tokens;
  // Position of tokens[0], which is the number of tokens whose KV exists already.
  int32_t first_position = 0;
  // Blocks of positions 0 .. first_position + tokens.size() - 1, in order. Blocks that have left
  // the model's sliding window may be the null block (BlockId 0).
  absl::Span<const BlockId> block_table;
  // Absent for a prompt chunk that is not the last one. Otherwise the token after tokens.back() is
  // sampled from that token's logits.
  const SamplingRequest* sampling = nullptr;
  // -1: the tokens are given. Otherwise the token is the one that chunk `token_from` of the plan
  // submitted just before this one samples; that step is in flight, the chunk is the same
  // sequence's. `sampling->history` then ends before this token, and the runner appends it.
  int32_t token_from = -1;
};

struct StepPlan {
  std::vector<SequenceChunk> chunks;
  // KV of some chunks is still on its way from host memory; the gate says when a layer's is there.
  // A runner had better ask for it as late as it can.
  bool arriving = false;
};

// What a step took where a runner measured it; 0: it did not.
struct StepTimes {
  absl::Duration device;          // on the device, the step's copies included
  absl::Duration sampling;        // of that, choosing tokens from logits
  absl::Duration rotation_stall;  // waiting for rotating layers
};

// Of each KV head, number layer * kv_heads + KV head, as one token saw it (far_keys.h).
struct HeadSample {
  // The share of its attention weights that far keys got, mean over its query heads.
  std::vector<float> shares;
  // How far its output would move without far keys, relative to its length; at most 1.
  std::vector<float> effects;

  bool empty() const { return shares.empty(); }
};

struct StepResult {
  // One entry per chunk of the plan, in order; empty where the chunk sampled nothing.
  std::vector<std::optional<SampledToken>> sampled;
  StepTimes times;
  // A captured graph was replayed instead of kernels launched one by one.
  bool graph = false;
  // Copied into slots by the runner since the step before it, for whichever step.
  Bytes rotation_bytes;
  // Empty unless the step took a sample (head_sampler.h).
  HeadSample head_sample;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_CORE_STEP_PLAN_H_
