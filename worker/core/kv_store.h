// The tiers below the KV region as the scheduler sees them: KV blocks are put into tier 1, host
// memory that this process has mapped, and found there again by their chain of keys and tokens.
//
// Calls return at once; what comes of them is told by TakeEvents. Each Reserve and Acquire has
// exactly one answer, within the time that the store sets it (plus an Acquire's `wait`), whatever
// becomes of the store. Answers may be wrong: what was copied from a place counts only if it has
// the block's checksum.
//
// Ownership: a place that an answer names may be written (Reserve) or read (Acquire) until Commit,
// Abort or Release names it, which each of them must be, once, by one call.
// Threads: all from one thread, the engine's; `wakeup` is called on any.
#ifndef PALIMPSEST_WORKER_CORE_KV_STORE_H_
#define PALIMPSEST_WORKER_CORE_KV_STORE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/block_key.h"
#include "common/ids.h"
#include "common/strong_int.h"
#include "worker/core/request_hints.h"

namespace palimpsest {

// Counts the calls of one scheduler from 1.
using StoreCallId = StrongInt<struct StoreCallIdTag, uint64_t>;

// Consecutive full blocks of a sequence.
struct BlockChain {
  // Of the block before the first; the root of all keys (block_chain_key.h) if there is none.
  BlockKey parent;
  std::vector<BlockKey> keys;
  std::vector<TokenId> tokens;  // of each block as many
};

// A place of one block in mapped host memory.
struct StorePlace {
  std::byte* memory = nullptr;
  uint64_t id = 0;  // the store's
};

struct ReservedBlock {
  enum class Result : uint8_t {
    kReserved,
    kPresent,  // nothing is to be written
    kNoRoom,   // now; there may be some soon
    kRefused,  // not wanted, or another block has the key
  };
  Result result = Result::kRefused;
  StorePlace place;  // if kReserved
};

struct WrittenBlock {
  BlockKey key;
  StorePlace place;
  uint64_t checksum = 0;  // BlockChecksum; nothing to Abort
};

struct PinnedBlock {
  StorePlace place;
  uint64_t checksum = 0;
};

// Consecutive blocks that a tier below tier 1 has.
struct LowerBlocks {
  int32_t blocks = 0;
  // From now until the last of them could be in tier 1.
  double expected_seconds = 0;
};

struct StoreQuery {
  // Every full block of the sequence, from its first one on.
  BlockChain chain;
  // Leading blocks that are not asked for.
  int32_t held = 0;
  // Blocks before its end that a prefix needs (a sliding window); 0: all.
  int32_t window = 0;
  // The same for all queries of one request, not 0.
  uint64_t request = 0;
  uint64_t conversation = 0;     // 0: not known
  std::vector<BlockType> types;  // of the chain's first blocks, as far as known
  int32_t input_tokens = 0;
  // How long to wait for blocks that come up from lower tiers; zero: none are brought up.
  absl::Duration wait;
};

struct StoreRequestEnd {
  enum class How : uint8_t {
    kUnknown,
    kEndOfTurn,  // the model was done
    kToolCall,   // it wants the answer of a tool
  };
  uint64_t request = 0;
  uint64_t conversation = 0;  // as in its queries
  How how = How::kUnknown;
  int32_t output_tokens = 0;
  // The client's hints.
  std::optional<absl::Duration> expected_idle;
  bool last_turn = false;
  std::optional<CacheAction> then;
};

struct ReserveAnswer {
  StoreCallId call;
  absl::Status status;
  // Of the chain's first blocks, up to the first that was refused.
  std::vector<ReservedBlock> blocks;
};

struct AcquireAnswer {
  StoreCallId call;
  absl::Status status;
  // Of the longest prefix that tier 1 has what is behind the held blocks, from the chain's block
  // `first` on: that is behind `held` if what lies between is left of the window.
  std::vector<PinnedBlock> blocks;
  int32_t first = 0;
  // What continues it. With a window as one, if at all, and as fast as its window comes up.
  std::vector<LowerBlocks> lower;
  // Leading ones of the held blocks that the store has; what it has lost may be offered again.
  int32_t kept = 0;
};

// Memory of places is to go: those that are not being copied had better be released.
struct PlacesWanted {};

// What was stored may be gone. Places that are held stay as they are.
struct StoreLost {};

using StoreEvent = std::variant<ReserveAnswer, AcquireAnswer, PlacesWanted, StoreLost>;

class KvStore {
 public:
  virtual ~KvStore() = default;

  // False: calls would fail.
  virtual bool available() const = 0;
  // From an Acquire that does not wait to its answer, smoothed; 0: not measured.
  virtual double answer_seconds() const = 0;

  virtual void Reserve(StoreCallId call, uint64_t request, BlockChain chain) = 0;
  // The blocks are in their places.
  virtual void Commit(std::vector<WrittenBlock> blocks) = 0;
  virtual void Abort(std::vector<WrittenBlock> blocks) = 0;

  virtual void Acquire(StoreCallId call, StoreQuery query) = 0;
  virtual void Release(std::vector<StorePlace> places) = 0;
  // Nothing is asked or held for this request any more. What was committed before is there when the
  // store hears of it.
  virtual void EndRequest(const StoreRequestEnd& end) = 0;
  // What computing the block at position p of a sequence takes: first + p * per_position seconds.
  virtual void SetRecompute(double first_seconds, double per_position_seconds) = 0;

  // What happened since the last call, in order.
  virtual std::vector<StoreEvent> TakeEvents() = 0;
  // `wakeup` is called when TakeEvents would return something new; null: nobody. When this returns,
  // the former one is not running and will not be called again.
  virtual void SetWakeup(std::function<void()> wakeup) = 0;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_CORE_KV_STORE_H_
