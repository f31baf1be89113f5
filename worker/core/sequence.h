// One request as the scheduler sees it, and what it gets out of it.
#ifndef PALIMPSEST_WORKER_CORE_SEQUENCE_H_
#define PALIMPSEST_WORKER_CORE_SEQUENCE_H_

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "common/ids.h"
#include "common/strong_int.h"
#include "common/text/stop_matcher.h"
#include "worker/core/kv_store.h"
#include "worker/core/prefix_cache.h"
#include "worker/core/request_hints.h"
#include "worker/core/sampling.h"
#include "worker/core/swap_copier.h"

namespace palimpsest {

// Counts the sequences of one scheduler in order of arrival; never reused.
using SequenceId = StrongInt<struct SequenceIdTag, uint64_t>;

struct SequenceRequest {
  std::vector<TokenId> prompt;
  // How many tokens at the end of the prompt are output already; see WorkerGenerateRequest.
  int32_t output_offset = 0;
  SamplingParams params;
  RequestHints hints;
};

enum class FinishReason { kStopToken, kStopString, kLength, kCancelled };

struct SequenceUsage {
  int32_t prompt_tokens = 0;
  int32_t cached_tokens = 0;
  int32_t output_tokens = 0;
  int32_t preemptions = 0;
};

struct SequenceOutput {
  SequenceId id;
  // Absent when the sequence finished without another token.
  std::optional<SampledToken> token;
  // Set on a sequence's last output.
  std::optional<FinishReason> finish;
  // With kStopString: bytes at the end of the whole output that do not belong to it.
  int32_t stop_trim_bytes = 0;
  // Filled when `finish` is set.
  SequenceUsage usage;
};

// The scheduler's state of a sequence. Not copyable, as plans point into it.
struct Sequence {
  Sequence(SequenceId sequence_id, SequenceRequest request, int32_t longest)
      : id(sequence_id),
        tokens(std::move(request.prompt)),
        prompt_size(static_cast<int32_t>(tokens.size())),
        output_begin(prompt_size - request.output_offset),
        longest_size(longest),
        sampling{std::move(request.params), {}, 0},
        stops(sampling.params.stop),
        hints(std::move(request.hints)),
        tool_call_texts(hints.tool_call_texts) {}
  Sequence(const Sequence&) = delete;
  Sequence& operator=(const Sequence&) = delete;

  int32_t size() const { return static_cast<int32_t>(tokens.size()); }
  int32_t size_with_pending() const { return size() + pending; }
  // Tokens to compute that no step in flight computes. None if the token that is pending is the
  // last one by its number; whether it ends the sequence otherwise is not known.
  int32_t remaining() const {
    return pending > 0 && size_with_pending() >= longest_size ? 0 : size_with_pending() - submitted;
  }

  const SequenceId id;
  std::vector<TokenId> tokens;  // prompt and output
  const int32_t prompt_size;
  const int32_t output_begin;  // index of the first output token in `tokens`
  const int32_t longest_size;  // the sequence ends when it has so many tokens
  SamplingRequest sampling;
  StopMatcher stops;
  int64_t output_bytes = 0;  // that `stops` has seen
  SequenceUsage usage;
  RequestHints hints;
  StopMatcher tool_call_texts;
  bool calls_tool = false;
  bool started = false;  // was admitted at least once

  bool running = false;  // admitted and not preempted: has a place in the batch
  bool removed = false;  // ended; here only until the steps in flight that know it are done

  // Tokens that steps in flight sample: they follow those in `tokens`.
  int32_t pending = 0;
  int32_t steps_in_flight = 0;  // that have a chunk of the sequence
  int32_t last_chunk = -1;      // index of the newest of these chunks in its plan
  int32_t stay = 0;             // counts the times that its blocks were released

  // Tokens whose KV exists, and with those that steps in flight write. Below `computed` whole
  // blocks have been published up to `published`.
  int32_t computed = 0;
  int32_t submitted = 0;
  std::vector<BlockId> blocks;
  int32_t published = 0;
  int32_t left_window = 0;             // blocks before this one have been released
  PrefixCache::Node* chain = nullptr;  // of the last published block; pinned
  bool cacheable = true;               // false after a collision of keys
  std::vector<BlockKey> keys;          // of the sequence's full blocks, as far as known

  // Where its KV is, if it was preempted and not dropped (scheduler_swap.cc).
  enum class Swap : uint8_t {
    kNone,      // in its blocks, or to be computed
    kLeaving,   // waiting; its blocks are kept until they are copied
    kAway,      // waiting; in its slots
    kArriving,  // running; in its slots and on its way to its blocks
    kLoading,   // running; on its way to its blocks from the block store
  };
  bool arriving() const { return swap == Swap::kArriving || swap == Swap::kLoading; }
  Swap swap = Swap::kNone;
  SwapId transfer;              // kLeaving: 0 until it can begin; if arriving
  bool joins = false;           // if arriving: steps may follow behind the copies
  std::vector<SwapSlot> slots;  // of consecutive blocks from swapped_from on
  int32_t swapped_from = 0;
  int32_t swapped_tokens = 0;  // kAway, kArriving: the KV is that of the first so many tokens

  // What the block store has of its prefix (scheduler_store.cc). While kAsked or kAwaited others
  // are admitted before it.
  enum class Ask : uint8_t {
    kNone,
    kAsked,
    kAwaited,  // asked again, to have blocks brought up from lower tiers
    kAnswered,
  };
  bool awaits_store() const { return ask == Ask::kAsked || ask == Ask::kAwaited; }
  Ask ask = Ask::kNone;
  int32_t asks = 0;        // since it began to wait
  StoreCallId store_call;  // if awaits_store()
  // Until when the answer or, if kLoading, the copies are awaited.
  absl::Time give_up = absl::InfiniteFuture();
  int32_t asked_from = 0;           // blocks that T0 had when the store was asked
  std::vector<PinnedBlock> pinned;  // consecutive blocks from pinned_from on, to be loaded
  int32_t pinned_from = 0;          // asked_from, or more: what lies between is left of the window
  bool known_to_store = false;      // was named in a query
  bool prompt_offered = false;      // for offloading
  int32_t loaded_from = 0;          // kLoading: blocks before this one are there
  int32_t told_held = 0;            // blocks that T0 has, as the store was told
  // Of those, what the store has lost, to be offered again.
  int32_t lost_from = 0, lost_to = 0;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_CORE_SEQUENCE_H_
