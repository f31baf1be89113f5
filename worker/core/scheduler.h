// Decides what each step computes: continuous batching with chunked prefill over paged KV.
//
// A step takes the running sequences in order of arrival. Each decode gets its one token; what is
// left of the token budget goes to prompts, in chunks. Waiting sequences are admitted first come,
// first served, when all their blocks fit beside the running ones. When blocks run out, the
// youngest running sequence is preempted: it returns to the front of the queue with all its tokens
// and is computed again later (usually from the prefix cache). The oldest sequence is never
// preempted for another one, so it always finishes, and nothing starves.
//
// Pipeline: Schedule may be called again while steps are in flight, up to config.pipeline_depth. It
// then assumes that every sequence goes on whose number of tokens allows it: the chunk continues
// the token that the step before samples (SequenceChunk::token_from). All sequences take part, with
// stop strings and penalties too: if Commit finds that one has ended, or it was cancelled, what the
// later step samples for it is discarded. Steps take effect in order, so blocks are free for the
// next plan as soon as a sequence lets go of them, although steps in flight may still use them; but
// nobody else may touch memory before these are done, which is why GiveSlabs and Compact require
// that none is in flight. KV is published to the prefix cache by Commit, when it exists. A sequence
// that is preempted while in flight keeps the token, not the KV.
//
// Swapping (config.swap_blocks): a preempted sequence keeps its blocks until a SwapCopier has
// copied them to host memory, and has them copied back, unless the prefix cache still has them,
// before it runs again; it then joins the steps that follow behind the copies. Sequences are
// preempted a few steps before blocks run out, so that copies end in time, and come back when there
// is twice the room that would do for a new one, so that they stay. One for which host memory has
// no room is computed again. The caller starts what TakeTransfers gives, after each Schedule,
// before it submits the plan, and after each Commit and Abandon; it reports each end with
// OnTransferEnded.
//
// Block store (KvStore): full blocks of sequences that end, are preempted or have computed their
// prompt are copied to the store (offloader.h). A waiting sequence is looked up there when its turn
// comes near, by its whole chain of blocks; what the store has behind the T0 prefix is loaded if
// that is expected to end before computing would (load_choice.h), as KV that returns from host
// memory is: into blocks of its own, after which it is published for others. Until the store has
// answered others are admitted before the sequence. What fails, or does not have its checksum, is
// computed. So is what has not come, or not been answered, in the time that computing it would have
// taken, however long it was expected to take; a load that a step follows is not given up. With a
// sliding window only those blocks are asked for and loaded that the next token sees.
//
// Legal order: each plan with chunks is in flight until its Commit, oldest first, or until Abandon,
// which ends all of them. Not thread-safe. Does not block.
#ifndef PALIMPSEST_WORKER_CORE_SCHEDULER_H_
#define PALIMPSEST_WORKER_CORE_SCHEDULER_H_

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "common/ids.h"
#include "worker/core/block_keys.h"
#include "worker/core/block_manager.h"
#include "worker/core/kv_store.h"
#include "worker/core/kv_target.h"
#include "worker/core/load_choice.h"
#include "worker/core/offloader.h"
#include "worker/core/scheduler_config.h"
#include "worker/core/sequence.h"
#include "worker/core/step_plan.h"
#include "worker/core/swap_copier.h"
#include "worker/core/swap_space.h"
#include "worker/core/token_bytes.h"

namespace palimpsest {

struct SchedulerCounters {
  int64_t prompt_tokens = 0;  // of admitted sequences
  int64_t cached_tokens = 0;  // of those, taken from the prefix cache
  int64_t generated_tokens = 0;
  int64_t discarded_tokens = 0;  // sampled for sequences that had ended
  int64_t preemptions = 0;
  int64_t swapped_preemptions = 0;  // of those, sequences whose KV was kept
  int64_t blocks_swapped_out = 0;
  int64_t blocks_swapped_in = 0;
  int64_t failed_transfers = 0;
  int64_t store_queries = 0;
  int64_t loads = 0;  // sequences whose prefix came from the block store
  int64_t blocks_loaded = 0;
  int64_t failed_loads = 0;
  int64_t promotions_awaited = 0;
  // Blocks that tier 1 had and that were computed because that was expected to be faster.
  int64_t blocks_recomputed = 0;
  int64_t late_answers = 0;  // of the store, that were not awaited any more
  int64_t late_loads = 0;
};

class Scheduler {
 public:
  // `token_bytes` and `store` must outlive the scheduler. Requires a valid config. Without a store
  // there are no tiers. `key` is for tests.
  Scheduler(const SchedulerConfig& config, const TokenBytes* token_bytes, KvStore* store = nullptr,
            BlockKeyFunction key = ChainKey);

  // As SchedulerConfig::CheckRequest. Thread-safe.
  absl::Status CheckRequest(const SequenceRequest& request) const {
    return config_.CheckRequest(request);
  }

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

  // Requires that no step and no transfer is in flight. Frees `count` slabs (all, if fewer are
  // mapped), those that cost least: moves blocks in use elsewhere, preempts the youngest sequences
  // if there is no room.
  Give GiveSlabs(int32_t count);

  // Requires that no step is in flight. Sends the sequences away that GiveSlabs(count) would have
  // no room for, so that their KV is kept if the transfers end before that.
  void MakeRoomToGive(int32_t count);

  // For when nothing can run; requires that no step and no transfer is in flight. If the mapped
  // slabs would hold what the next sequence needs, but for the blocks that the holes between them
  // cut: gives the slabs behind the holes, to be asked for again (they are mapped at the lowest
  // free places). Otherwise gives nothing.
  Give Compact();

  // The next step; without chunks if nothing can run, perhaps only until the next Commit. Requires
  // in_flight() < pipeline_depth. To be submitted before any other call.
  const StepPlan& Schedule();
  // The oldest step in flight was executed.
  void Commit(StepResult result);
  // The oldest step in flight was not executed, or in part, which voids those behind it: what they
  // were to compute will be planned again. None may be running any more.
  void Abandon();

  int32_t in_flight() const { return in_flight_; }

  // Transfers to be started now, in this order.
  std::vector<SwapTransfer> TakeTransfers();
  // A transfer that was taken has ended. If one failed that is awaited, no step may be in flight:
  // those that were are to be abandoned first.
  void OnTransferEnded(const SwapEnded& ended);
  // Some are to be started or have not ended.
  bool transferring() const { return !transfers_.empty(); }
  // Sequences wait for some of them.
  bool awaits_transfer() const;
  // How many blocks are copied in the time of a step. KV that comes back joins a step at once if it
  // is no more than that, and otherwise when all of it is there.
  void SetSwapOverlap(int32_t blocks) { swap_overlap_ = blocks; }

  // Hears what the block store has answered, goes on with what depends on it, and gives up what is
  // late. To be called when it wakes, at next_give_up(), and before Schedule; times never go back.
  // True if there was anything.
  bool PollStore(absl::Time now);
  absl::Time next_give_up() const;
  void SetLoadCosts(const LoadCosts& costs) { load_costs_ = costs; }
  // Zeros without a store.
  Offloader::Counters offload_counters() const {
    return offloader_.has_value() ? offloader_->counters() : Offloader::Counters();
  }

  // What happened to sequences since the last call, in order.
  std::vector<SequenceOutput> TakeOutputs();

  // How many KV slabs would serve the sequences that are there.
  KvDemand Demand() const;

  bool idle() const { return sequences_.empty(); }
  int32_t running() const { return static_cast<int32_t>(running_.size()); }
  int32_t waiting() const { return static_cast<int32_t>(waiting_.size()); }
  const BlockManager& blocks() const { return blocks_; }
  const SwapSpace& swap_space() const { return swap_space_; }
  const SchedulerCounters& counters() const { return counters_; }
  int32_t longest_sequence() const { return longest_sequence_; }

  // Aborts if the sequences and the blocks contradict each other.
  void CheckInvariants() const;

 private:
  // A chunk in flight.
  struct Planned {
    Sequence* sequence;
    int32_t tokens;
    bool samples;
    int32_t stay;  // of the sequence; if it has changed, the KV is gone
  };
  using Step = std::vector<Planned>;

  // Waiting sequences that may be looked up in the store before their turn: it pins what it finds.
  static constexpr size_t kAsksAhead = 8;

  // Why the first waiting sequence was not admitted last time. Looking for its prefix again costs
  // time with every block of it, so this is done when there is room, or else every
  // kAdmissionInterval plans, since the cache may have more of it by then.
  struct Refusal {
    SequenceId id;
    int32_t needed_blocks = 0;
    int32_t plans_to_skip = 0;
  };

  // scheduler.cc: sequences and steps.
  void ScheduleRunning(int32_t& budget, bool& stalled);
  bool AdmitNext(int32_t& budget);
  // Whose turn it is; null: nobody's yet.
  Sequence* NextWaiting();
  bool RefusedLately(const Sequence& sequence);
  void Plan(Sequence& sequence, int32_t tokens);
  void AppendToken(Sequence& sequence, SampledToken token);
  std::optional<int32_t> MatchStops(Sequence& sequence, TokenId token);
  // A token of the output: whether that calls a tool.
  void WatchForToolCall(Sequence& sequence, TokenId token) const;
  bool FinishIfDone(Sequence& sequence, SequenceOutput& output);
  void Remove(Sequence& sequence, StoreRequestEnd::How how = StoreRequestEnd::How::kUnknown);
  void Sweep();
  void CheckFlights() const;

  struct Transfer {
    SwapTransfer copy;
    enum class Kind : uint8_t { kSwap, kLoad, kOffload };
    Kind kind = Kind::kSwap;
    SequenceId sequence;
    int64_t after = 0;  // steps that must have ended before it may begin
    bool taken = false;
    std::vector<StorePlace> places;  // kLoad: pinned until it has ended
  };

  // scheduler_swap.cc: KV that leaves for host memory and returns.
  bool swapping() const { return swap_space_.slots() > 0; }
  // Whether the sequence is to keep its KV although it is preempted.
  bool BeginLeaving(Sequence& sequence);
  // Makes the transfers of those that no step in flight writes any more.
  void StartLeaving();
  // Blocks that come free when everything has left; more if others share them.
  int32_t LeavingBlocks() const;
  // Blocks of `match` and fresh ones that KV is copied to from host memory.
  void Return(Sequence& sequence, const BlockManager::Match& match);
  // Preempts before blocks run out.
  void PreemptAhead();
  int32_t BlocksAhead(const Sequence& sequence) const;
  // Takes part in steps.
  bool Ready(const Sequence& sequence) const;
  void AddTransfer(Transfer::Kind kind, SwapTransfer::Direction direction, Sequence& sequence,
                   std::vector<SwapMove> moves, int64_t after);
  void FinishSwap(const Transfer& transfer, bool succeeded);
  // Its KV is not kept in host memory any more.
  void DropSlots(Sequence& sequence);
  void CheckSwaps(const Sequence& sequence) const;
  // Adds the blocks that transfers hold, and compares the slots that are held.
  void CheckTransfers(absl::flat_hash_map<BlockId, int32_t>& references) const;

  // scheduler_store.cc: what goes to the block store and comes from there.
  // What of T0 the pinned blocks need before them: from this block on.
  int32_t FirstNeeded(const Sequence& sequence) const;
  // How long computing these blocks would take; infinite if that is not known.
  absl::Duration TimeToCompute(int32_t first_block, int32_t blocks) const;
  void GiveUpLate();
  void GiveUpLoad(Sequence& sequence);
  // How many blocks may be copied in steps that follow them.
  int32_t Overlap(Transfer::Kind kind, const Sequence& sequence) const;
  void AskAhead();
  // Looks the sequence's prefix up in the store, unless that was done.
  void Ask(Sequence& sequence);
  void Query(Sequence& sequence, int32_t held, absl::Duration wait);
  void OnStoreEvent(const ReserveAnswer& answer);
  void OnStoreEvent(const AcquireAnswer& answer);
  void OnStoreEvent(const PlacesWanted& event);
  void OnStoreEvent(const StoreLost& event);
  void OnAcquired(Sequence& sequence, const AcquireAnswer& answer);
  // Keeps the first `count` pinned blocks.
  void ReleasePinned(Sequence& sequence, size_t count);
  // Which of the pinned blocks continue `match`. False: T0 has lost what came before them since the
  // store was asked, so that it is asked anew.
  bool FitPinned(Sequence& sequence, const BlockManager::Match& match);
  // Blocks of `match` and fresh ones that the pinned ones are copied to.
  void Load(Sequence& sequence, const BlockManager::Match& match);
  void FinishLoad(const Transfer& transfer, const SwapEnded& ended);
  // Keeps the first so many blocks; no step in flight writes behind them.
  void CutBack(Sequence& sequence, int32_t blocks);
  void Offer(Sequence& sequence);
  void NoteLost(Sequence& sequence, const AcquireAnswer& answer);
  // It has ended: offers what it leaves, gives back what it holds.
  void LeaveStore(Sequence& sequence, StoreRequestEnd::How how);
  // Tells the store of the end of requests for which nothing is asked or copied any more.
  void EndStoreRequests();
  // An answer is awaited or blocks are loaded for the request.
  bool IsCopiedFor(const StoreRequestEnd& end) const;
  // A request of the conversation begins: the store is to hear of its last one's end first.
  void EndStoreRequestsOf(uint64_t conversation);
  int32_t OffloadedHeld() const { return offloader_.has_value() ? offloader_->held_blocks() : 0; }

  // scheduler_memory.cc: blocks and slabs.
  int32_t Fit(Sequence& sequence, int32_t tokens);
  void ExtendKeys(Sequence& sequence, int32_t blocks);
  void PublishFullBlocks(Sequence& sequence);
  void ReleaseBeforeWindow(Sequence& sequence);
  // Its blocks up to `count` are not there, and nobody needs them.
  void SkipTo(Sequence& sequence, int32_t count);
  void ReleaseBlocks(Sequence& sequence);
  void PreemptYoungest();
  void PreemptNow();
  void InsertWaiting(Sequence& sequence);
  Give GiveThese(std::vector<RegionIndex> slabs);
  int64_t NeededBlocks() const;
  int32_t SlabsToHold(int32_t blocks) const;

  const SchedulerConfig config_;
  const TokenBytes* const token_bytes_;
  const BlockKeyFunction key_;
  BlockManager blocks_;
  const int32_t capacity_blocks_;
  const int32_t longest_sequence_;
  uint64_t next_id_ = 1;
  absl::flat_hash_map<SequenceId, std::unique_ptr<Sequence>> sequences_;
  // Both in order of arrival; every running sequence is older than every waiting one, but for those
  // that waited for the block store.
  std::vector<Sequence*> running_;
  std::deque<Sequence*> waiting_;
  Refusal refusal_;
  // Removed, but known to steps in flight.
  std::vector<std::unique_ptr<Sequence>> ended_;
  StepPlan plan_;  // the last one
  int32_t in_flight_ = 0;
  int64_t ended_steps_ = 0;
  std::array<Step, kMaxPipelineDepth> steps_;  // the first in_flight_ of them, oldest first
  SwapSpace swap_space_;
  std::vector<Transfer> transfers_;
  uint64_t next_transfer_ = 1;
  int32_t swap_overlap_ = 0;
  KvStore* const store_;
  std::optional<Offloader> offloader_;
  uint64_t next_store_call_ = 1;
  absl::flat_hash_map<StoreCallId, SequenceId> asking_;
  std::vector<StoreRequestEnd> ended_requests_;  // the store has not been told of
  LoadCosts load_costs_;
  absl::Time now_ = absl::UnixEpoch();  // of the last PollStore
  std::vector<SequenceOutput> outputs_;
  SchedulerCounters counters_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_CORE_SCHEDULER_H_
