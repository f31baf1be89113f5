// Which cached KV block goes next: the interface of every eviction policy, run alike by the broker
// for each of its tiers and by `palctl replay` over a trace.
//
// A policy is told what happens and answers one question, ChooseVictim. It does no I/O and has no
// clock: times come with the calls and never go back. It keeps no keys: blocks are handles, small
// dense numbers that its owner assigns, so that what a policy knows of a block is an array element.
//
// Who owns what. The owner of a policy (PrefixCache here) holds the table of keys, decides what is
// cached and tells the policy, which never changes that by itself. A handle is *known* from the
// first request that names its block (or OnExtend) until OnForget; then it may come to mean another
// block. A known block is cached or not; one that is not is history (a ghost), of which the owner
// keeps as much as it was told to.
//
// Order of calls, for one request:
//
//   OnRequest(request, access)      once, before anything of it is stored
//   for each block to be stored, in prefix order:
//     while there is no room: victim = ChooseVictim(now, block, may_refuse)
//                                   none: this block and those behind it are not stored
//       OnEvict(victim)
//     OnInsert(request, block, parent)
//   OnRequestEnd(end)               once; other requests may come between
//
// Blocks computed beyond the prompt (while decoding) are announced by OnExtend before the end and
// inserted likewise. A tier that stores what requests leave behind inserts after OnRequestEnd. The
// owner may evict at any time (a revoke, a time to live), asking with `block` = kNoBlock or not
// asking at all.
//
// A cached block is *evictable* when it has no cached child and no running request uses it (under
// Discipline::kPlain: always). The owner says so by OnEvictable and OnPinned, at each change; a new
// block is not evictable until OnEvictable. Only evictable blocks may be victims. Along a cached
// prefix this concerns its last block alone, so a request costs two of these calls, not two a
// block.
//
// Complexity: every call O(log cached) at most, OnRequest that a block of its path; amortised where
// a policy says so. Threads: none; the owner serializes.
#ifndef PALIMPSEST_BROKER_CORE_CACHE_EVICTION_POLICY_H_
#define PALIMPSEST_BROKER_CORE_CACHE_EVICTION_POLICY_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "common/strong_int.h"

namespace palimpsest::cache {

// Below the owner's capacity + history at all times; dense, so usable as an index.
using BlockHandle = StrongInt<struct BlockHandleTag, uint32_t>;
inline constexpr BlockHandle kNoBlock{std::numeric_limits<uint32_t>::max()};

// A running request of one owner. Never reused.
using RequestId = StrongInt<struct CacheRequestIdTag, uint64_t>;

// A conversation, session or user that requests belong to; 0: not known.
using ConversationId = StrongInt<struct ConversationIdTag, uint64_t>;

enum class Discipline {
  // Blocks as if they had nothing to do with each other: each is a request of its own, and any may
  // go. A child may stay without its parent, unreachable. What policies of the literature are
  // given; for comparison.
  kPlain,
  // A block goes after its cached children and not while a running request uses it. What the broker
  // does.
  kLeavesFirst,
};

// What the text of a block is, as far as metadata or the chat template tell.
enum class BlockType : uint8_t {
  kUnknown,
  kSystemPrompt,
  kToolContext,
  kUserContext,
  kReasoning,
};

struct RequestInfo {
  RequestId id{};
  absl::Time arrival{};
  ConversationId conversation{};
  int64_t input_tokens = 0;
  // Of the blocks of the path, in order; shorter or empty: not known.
  absl::Span<const BlockType> types{};
};

// A prompt's whole blocks in prefix order: the parent of path[i] is path[i - 1], of path[0] none.
// No block is in it twice.
struct Access {
  absl::Span<const BlockHandle> path{};
  // Leading blocks that are cached: the request's hit.
  size_t cached = 0;
  // Leading blocks that were known before this request, at least `cached`. The others are new:
  // their handles mean blocks that no request has named, or that were forgotten.
  size_t known = 0;
};

enum class Ending : uint8_t {
  kUnknown,
  kEndOfTurn,  // the model was done, and it is the user's turn
  kToolCall,   // the model wants a tool's result, which usually comes soon and by itself
};

struct RequestEnd {
  RequestId id{};
  absl::Time time{};
  Ending how = Ending::kUnknown;
  int64_t output_tokens = 0;
  // Hints of the client: when it thinks that it will continue, and that it won't.
  std::optional<absl::Duration> expected_idle{};
  bool last_turn = false;
};

// What is expected of a block.
struct Outlook {
  double reuse = 0;            // P(it is used again)
  double hits_per_second = 0;  // for each second that it is held, over the best horizon
};

class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;

  virtual absl::string_view name() const = 0;

  virtual void OnRequest(const RequestInfo& request, const Access& access) = 0;

  // The running request has one more block behind its path, which is not cached. It may have been
  // known.
  virtual void OnExtend(RequestId request, BlockHandle block) {
    static_cast<void>(request);
    static_cast<void>(block);
  }

  // `block` is known, not cached, and is cached from now on; kNoBlock as `parent`: it is a first
  // block.
  virtual void OnInsert(RequestId request, BlockHandle block, BlockHandle parent) = 0;

  virtual void OnEvictable(BlockHandle block) = 0;
  // No longer evictable; still cached. Never for a block that is not evictable.
  virtual void OnPinned(BlockHandle block) = 0;

  // An evictable block that should go so that `block` can be cached (kNoBlock: so that memory gets
  // free). None: nothing is evictable, or, where `may_refuse`, `block` is worth less than all that
  // would have to go. May tidy up, but whoever asks again at once gets the same answer.
  virtual std::optional<BlockHandle> ChooseVictim(absl::Time now, BlockHandle block,
                                                  bool may_refuse) = 0;

  // Of a known block, cached or not. None: this policy does not tell.
  virtual std::optional<Outlook> OutlookOf(absl::Time now, BlockHandle block) {
    static_cast<void>(now);
    static_cast<void>(block);
    return std::nullopt;
  }

  // `block` was evictable and is not cached any more; still known.
  virtual void OnEvict(BlockHandle block) = 0;

  virtual void OnRequestEnd(const RequestEnd& end) { static_cast<void>(end); }

  // `block`, which is not cached, is not known any more.
  virtual void OnForget(BlockHandle block) { static_cast<void>(block); }
};

}  // namespace palimpsest::cache

#endif  // PALIMPSEST_BROKER_CORE_CACHE_EVICTION_POLICY_H_
