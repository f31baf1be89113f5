// A KvStore for tests whose answers come when the test says so, in any order, and that may fail,
// lie, lose blocks or have them in a lower tier. Aborts if a place is used otherwise than
// kv_store.h allows. Not thread-safe.
#ifndef PALIMPSEST_WORKER_CORE_FAKE_KV_STORE_H_
#define PALIMPSEST_WORKER_CORE_FAKE_KV_STORE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <variant>
#include <vector>

#include "common/bytes.h"
#include "worker/core/kv_store.h"

namespace palimpsest {

class FakeKvStore final : public KvStore {
 public:
  struct Options {
    Bytes block_bytes;
    int32_t block_tokens = 0;
    int32_t capacity_blocks = 0;
    uint64_t seed = 0;
    int failing_percent = 0;  // of answers
    int lying_percent = 0;    // of blocks that are found
  };

  explicit FakeKvStore(const Options& options);

  bool available() const override { return available_; }
  double answer_seconds() const override { return 0; }
  void Reserve(StoreCallId call, uint64_t request, BlockChain chain) override;
  void Commit(std::vector<WrittenBlock> blocks) override;
  void Abort(std::vector<WrittenBlock> blocks) override;
  void Acquire(StoreCallId call, StoreQuery query) override;
  void Release(std::vector<StorePlace> places) override;
  void EndRequest(const StoreRequestEnd& end) override;
  void SetRecompute(double, double) override {}
  std::vector<StoreEvent> TakeEvents() override;
  void SetWakeup(std::function<void()>) override {}

  // Answers a call that waits, the oldest or any.
  void AnswerOne();
  void AnswerAll();
  // Drops a block, or moves it to a lower tier; or those of the chain from `first` on.
  void DropOne();
  void DemoteOne();
  void Demote(const BlockChain& chain, int32_t first);
  // Drops all blocks, and fails the calls that wait.
  void Lose();
  void WantPlaces() { events_.push_back(PlacesWanted{}); }
  void SetAvailable(bool available) { available_ = available; }
  // Changes a byte of every block that is stored.
  void Corrupt();

  size_t waiting_calls() const { return calls_.size(); }
  // Places that somebody holds.
  size_t held() const { return held_.size(); }
  // Requests that were named and have not ended.
  size_t open_requests() const { return open_requests_.size(); }
  size_t blocks() const { return blocks_.size(); }
  int64_t queries() const { return queries_; }
  const StoreQuery& last_query() const { return last_query_; }
  int64_t lies() const { return lies_; }
  const std::vector<StoreRequestEnd>& ended_requests() const { return ended_requests_; }

 private:
  struct Block {
    BlockKey parent;
    std::vector<TokenId> tokens;
    size_t slot = 0;
    uint64_t checksum = 0;
    bool ready = false;
    bool lower = false;
  };
  struct Call {
    StoreCallId id;
    std::variant<BlockChain, StoreQuery> what;
  };
  struct Held {
    size_t slot = 0;
    bool writing = false;
    BlockKey key;
    uint64_t request = 0;  // of a pin
  };

  bool Chance(int percent) { return static_cast<int>(random_() % 100) < percent; }
  void Answer(const Call& call);
  ReserveAnswer AnswerReserve(const BlockChain& chain);
  AcquireAnswer AnswerAcquire(const StoreQuery& query);
  // Of the chain's blocks, what the longest prefix needs behind those that are held.
  struct Range {
    size_t begin = 0, end = 0;
  };
  Range Longest(const StoreQuery& query, bool lower);
  // The block, if it is the one asked for.
  Block* Find(const BlockChain& chain, size_t index);
  PinnedBlock Pin(const Block& block, uint64_t request);
  StorePlace Hold(const Held& held);
  Held Take(const StorePlace& place, bool writing);
  void Unuse(size_t slot);
  std::map<BlockKey, Block>::iterator AnyReady();

  const Options options_;
  std::mt19937_64 random_;
  bool available_ = true;
  std::vector<std::byte> arena_;
  std::vector<int32_t> uses_;  // of slots
  std::map<BlockKey, Block> blocks_;
  std::map<uint64_t, Held> held_;  // by StorePlace.id
  uint64_t next_place_ = 1;
  std::vector<Call> calls_;
  std::vector<StoreEvent> events_;
  std::vector<StoreRequestEnd> ended_requests_;
  std::set<uint64_t> open_requests_;
  int64_t queries_ = 0;
  StoreQuery last_query_;
  int64_t lies_ = 0;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_CORE_FAKE_KV_STORE_H_
