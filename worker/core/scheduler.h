// Decides what each step computes: continuous batching with chunked prefill over paged KV.
//
// A step takes the running sequences in order of arrival. Each decode gets its one token; what is
// left of the token budget goes to prompts, in chunks. Waiting sequences are admitted first come,
// first served, when all their blocks fit beside the running ones. When blocks run out, the
// youngest running sequence is preempted: it returns to the front of the queue with all its tokens
// and is computed again later (usually from the prefix cache). The oldest sequence is never
// preempted for another one, so it always finishes, and nothing starves.
//
// Legal order: Schedule, then exactly one of Commit or Abandon if the plan had chunks; everything
// else only outside such a pair (the step boundary). Not thread-safe. Does not block.
#ifndef PALIMPSEST_WORKER_CORE_SCHEDULER_H_
#define PALIMPSEST_WORKER_CORE_SCHEDULER_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/ids.h"
#include "worker/core/block_manager.h"
#include "worker/core/kv_geometry.h"
#include "worker/core/kv_target.h"
#include "worker/core/sequence.h"
#include "worker/core/step_plan.h"
#include "worker/core/token_bytes.h"

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

  int32_t max_sequences() const { return max_batch_sequences + queue_capacity; }

  absl::Status Validate() const;
};

struct SchedulerCounters {
  int64_t prompt_tokens = 0;  // of admitted sequences
  int64_t cached_tokens = 0;  // of those, taken from the prefix cache
  int64_t generated_tokens = 0;
  int64_t preemptions = 0;
};

class Scheduler {
 public:
  // `token_bytes` must outlive the scheduler. Requires a valid config. `key` is for tests.
  Scheduler(const SchedulerConfig& config, const TokenBytes* token_bytes,
            BlockKeyFunction key = ChainKey);

  // InvalidArgument: the prompt is empty, has ids outside the vocabulary or can never fit.
  // Thread-safe.
  absl::Status CheckRequest(const SequenceRequest& request) const;

  // Queues a sequence. As CheckRequest; ResourceExhausted: there are max_sequences() already.
  absl::StatusOr<SequenceId> Add(SequenceRequest request);

  // Ends a sequence with kCancelled. False if it is not there (any more).
  bool Cancel(SequenceId id);

  // Removes a sequence without an output, for when it can't go on. False if it is not there.
  bool Drop(SequenceId id);

  // Sends every running sequence back to the queue, for when nothing can run for a while: their
  // blocks are free for others and stay in the prefix cache as long as nobody takes them. Returns
  // how many.
  int32_t PreemptAll();

  void OnSlabsMapped(absl::Span<const RegionIndex> slabs) { blocks_.OnSlabsMapped(slabs); }

  struct Give {
    std::vector<RegionIndex> slabs;
    // To be done before the slabs are unmapped; no target is a source.
    std::vector<BlockMove> moves;
    int32_t preempted = 0;
  };

  // Frees `count` slabs (all, if fewer are mapped), those that cost least: moves blocks in use
  // elsewhere, preempts the youngest sequences if there is no room.
  Give GiveSlabs(int32_t count);

  // For when nothing can run. If the mapped slabs would hold what the next sequence needs, but for
  // the blocks that the holes between them cut: gives the slabs behind the holes, to be asked for
  // again (they are mapped at the lowest free places). Otherwise gives nothing.
  Give Compact();

  // The next step; without chunks if nothing can run. Valid until Commit or Abandon.
  const StepPlan& Schedule();
  // The plan was executed.
  void Commit(StepResult result);
  // The plan was not executed, or in part: its tokens will be computed again.
  void Abandon();

  // What happened to sequences since the last call, in order.
  std::vector<SequenceOutput> TakeOutputs();

  // How many KV slabs would serve the sequences that are there.
  KvDemand Demand() const;

  bool idle() const { return sequences_.empty(); }
  int32_t running() const { return static_cast<int32_t>(running_.size()); }
  int32_t waiting() const { return static_cast<int32_t>(waiting_.size()); }
  const BlockManager& blocks() const { return blocks_; }
  const SchedulerCounters& counters() const { return counters_; }
  // The longest sequence that Add accepts: as configured, or less if max_kv_slabs don't hold it.
  int32_t longest_sequence() const { return longest_sequence_; }

  // Aborts if the sequences and the blocks contradict each other.
  void CheckInvariants() const;

 private:
  struct Planned {
    Sequence* sequence;
    int32_t tokens;
  };

  int32_t PeakBlocks(int32_t tokens) const;
  int32_t LongestSequence() const;
  int32_t SlabsToHold(int32_t blocks) const;
  void ExtendKeys(Sequence& sequence, int32_t blocks);
  Give GiveThese(std::vector<RegionIndex> slabs);
  int64_t NeededBlocks() const;
  void ScheduleRunning(int32_t& budget, bool& stalled);
  bool AdmitNext(int32_t& budget);
  int32_t Fit(Sequence& sequence, int32_t tokens);
  void Plan(Sequence& sequence, int32_t tokens);
  void PreemptYoungest();
  void ReleaseBlocks(Sequence& sequence);
  void PublishFullBlocks(Sequence& sequence);
  void ReleaseBeforeWindow(Sequence& sequence);
  void AppendToken(Sequence& sequence, SampledToken token);
  std::optional<int32_t> MatchStops(Sequence& sequence, TokenId token);
  bool FinishIfDone(Sequence& sequence, SequenceOutput& output);
  void Remove(Sequence& sequence);
  void CheckBoundary() const;

  const SchedulerConfig config_;
  const TokenBytes* const token_bytes_;
  const BlockKeyFunction key_;
  BlockManager blocks_;
  const int32_t capacity_blocks_;  // with max_kv_slabs mapped
  const int32_t longest_sequence_;
  uint64_t next_id_ = 1;
  absl::flat_hash_map<SequenceId, std::unique_ptr<Sequence>> sequences_;
  // Both in order of arrival; every running sequence is older than every waiting one.
  std::vector<Sequence*> running_;
  std::deque<Sequence*> waiting_;
  bool in_flight_ = false;
  StepPlan plan_;
  std::vector<Planned> planned_;
  std::vector<SequenceOutput> outputs_;
  SchedulerCounters counters_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_CORE_SCHEDULER_H_
