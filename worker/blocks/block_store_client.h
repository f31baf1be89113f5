// The block store as a worker has it: calls to its broker over gRPC, and the chunks of its tenant's
// arena mapped as answers name them.
//
// An answer that names a chunk which is not mapped waits until that was fetched over the session's
// descriptor socket. What an answer names in a chunk that does not come, or that is to go, is given
// up unread, with what follows it. Chunks that the broker wants back are unmapped when the last
// place in them was given back, and the broker has heard of that; the scheduler is told to give
// back what it can. A thread of its own maps and unmaps, pins and unpins chunks, which takes
// milliseconds; the broker is told that a chunk is unmapped when it is.
//
// Without a session, or with a broker that has no tiers, the store is not available, and calls fail
// at once. A session that ends fails the calls that are under way; places that are held stay mapped
// until they are given back.
//
// Ownership: `link` outlives the client's Shutdown, which is to come before its destruction.
// Threads: as kv_store.h; what it hears from the link and from gRPC comes on their threads.
#ifndef PALIMPSEST_WORKER_BLOCKS_BLOCK_STORE_CLIENT_H_
#define PALIMPSEST_WORKER_BLOCKS_BLOCK_STORE_CLIENT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/time/time.h"
#include "common/bytes.h"
#include "common/mutex.h"
#include "common/task_queue.h"
#include "proto/palimpsest/v1/block_store.grpc.pb.h"
#include "worker/blocks/arena_map.h"
#include "worker/blocks/store_calls.h"
#include "worker/core/conversation_hints.h"
#include "worker/core/kv_store.h"
#include "worker/memory/arena_link.h"
#include "worker/memory/region_memory.h"

namespace palimpsest {

class BlockStoreClient final : public KvStore, public ConversationHints, public ArenaListener {
 public:
  struct Options {
    // gRPC target of the broker.
    std::string address;
    Bytes block_bytes;
    int32_t block_tokens = 0;
    // Of each call, beside what an Acquire waits.
    absl::Duration call_timeout = absl::Seconds(2);
    // Calls that give places back are tried so often.
    int give_back_attempts = 3;
    // Pins chunks, if there is one; outlives the client.
    MemoryBackend* backend = nullptr;
  };

  BlockStoreClient(const Options& options, ArenaLink* link);
  // Requires Shutdown.
  ~BlockStoreClient() override;

  // Cancels what is under way and waits for it; blocks. Not available any more.
  void Shutdown();

  bool available() const override;
  double answer_seconds() const override;
  void Reserve(StoreCallId call, uint64_t request, BlockChain chain) override;
  void Commit(std::vector<WrittenBlock> blocks) override;
  void Abort(std::vector<WrittenBlock> blocks) override;
  void Acquire(StoreCallId call, StoreQuery query) override;
  void Release(std::vector<StorePlace> places) override;
  void EndRequest(const StoreRequestEnd& end) override;
  void SetRecompute(double first_seconds, double per_position_seconds) override;
  std::vector<StoreEvent> TakeEvents() override;
  void SetWakeup(std::function<void()> wakeup) override;

  // Blocks of the chain, which begins with its sequence's first one, from `first` on: those that
  // tier 1 has and nobody uses go below it. What was committed before is there when the store hears
  // of it; nobody hears what came of it.
  void Demote(const BlockChain& chain, int32_t first);

  // Unavailable where the store is not.
  void Hint(uint64_t conversation, const CacheAction& action,
            std::function<void(absl::StatusOr<uint64_t>)> done) override;

  void OnSession(const ArenaSession& session) override;
  void OnSessionLost(uint64_t epoch) override;
  void OnUnmapChunks(uint64_t epoch, std::vector<uint32_t> chunks) override;
  void OnChunk(uint64_t epoch, uint32_t chunk, absl::StatusOr<UniqueFd> memory) override;

 private:
  using SessionPtr = StoreCalls::SessionPtr;

  // An answer of the broker whose chunks may have to be mapped first.
  struct Named {
    ReservedBlock::Result result = ReservedBlock::Result::kReserved;
    ChunkExtent extent;
    uint64_t checksum = 0;  // Acquire
    BlockKey key;           // Reserve
  };
  struct Answer {
    SessionPtr session;
    StoreCallId call;
    bool reserve = false;
    uint64_t request = 0;  // Acquire
    std::vector<Named> blocks;
    // Acquire, as in AcquireAnswer.
    int32_t first = 0;
    std::vector<LowerBlocks> lower;
    int32_t kept = 0;
  };

  SessionPtr session() const;
  void Push(StoreEvent event);
  void Fail(StoreCallId call, bool reserve, const absl::Status& status);
  void Wake();

  void OnReserved(Answer answer, const palimpsest::v1::ReserveResponse& response);
  void OnAcquired(Answer answer, const palimpsest::v1::AcquireResponse& response);

  // block_store_places.cc, block_store_chunks.cc.
  // Maps what it needs, or passes it on.
  void Settle(Answer answer);
  void PassOn(Answer answer);
  void MapChunk(const SessionPtr& session, uint32_t chunk);
  void OnMapOffered(const SessionPtr& session, uint32_t chunk, const absl::Status& status,
                    const palimpsest::v1::MapChunksResponse& response);
  // A chunk that it names is being mapped.
  bool Waits(const Answer& answer) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The chunk was mapped, or will not be: what waits for it goes on.
  void OnMapped(uint64_t epoch, uint32_t chunk, std::optional<ChunkMemory> memory);
  // Ends the memory, then tells the broker of these chunks.
  void Discard(ArenaMap::Gone gone, uint64_t epoch, std::vector<uint32_t> unmapped);

  void OnCommitted(uint64_t commit);
  // Sends when the commits that are under way have been answered.
  void SendAfterCommits(std::function<void(const SessionPtr&)> send);

  struct Given {
    std::vector<uint64_t> places;
    std::vector<uint32_t> chunks;
  };
  // Releases or aborts. When the broker has heard of it, the places are dropped, and it is told of
  // those chunks that are not mapped: it may wait for that.
  template <typename Request>
  void GiveBack(SessionPtr session, Request request, Given given, int attempts);
  void Drop(const Given& given);
  // The places of this session, for which `add` is called, and their session; others are dropped.
  std::pair<SessionPtr, std::vector<uint64_t>> Split(
      const std::vector<WrittenBlock>& blocks, const std::function<void(const WrittenBlock&)>& add);

  const Options options_;
  ArenaLink* const link_;
  StoreCalls calls_;

  mutable Mutex mu_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  SessionPtr session_ ABSL_GUARDED_BY(mu_);          // null: not available
  uint64_t sessions_over_ ABSL_GUARDED_BY(mu_) = 0;  // those of lower epochs
  ArenaMap map_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<uint32_t, Bytes> mapping_ ABSL_GUARDED_BY(mu_);  // with their sizes, if known
  absl::flat_hash_set<uint32_t> unwanted_ ABSL_GUARDED_BY(mu_);        // of those: the broker waits
  std::vector<Answer> unsettled_ ABSL_GUARDED_BY(mu_);
  // The session's commits under way, by number, and what waits for those up to one, since calls may
  // overtake each other: ends of requests, and demotions.
  uint64_t last_commit_ ABSL_GUARDED_BY(mu_) = 0;
  absl::btree_set<uint64_t> commits_ ABSL_GUARDED_BY(mu_);
  std::vector<std::pair<uint64_t, std::function<void(const SessionPtr&)>>> behind_commits_
      ABSL_GUARDED_BY(mu_);
  std::vector<StoreEvent> events_ ABSL_GUARDED_BY(mu_);
  std::function<void()> wakeup_ ABSL_GUARDED_BY(mu_);
  int waking_ ABSL_GUARDED_BY(mu_) = 0;  // threads that call it
  double told_first_seconds_ ABSL_GUARDED_BY(mu_) = 0;
  double told_per_position_seconds_ ABSL_GUARDED_BY(mu_) = 0;
  double answer_seconds_ ABSL_GUARDED_BY(mu_) = 0;

  TaskQueue chunk_tasks_{1};  // ends first
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_BLOCKS_BLOCK_STORE_CLIENT_H_
