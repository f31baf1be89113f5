// A worker of the block store without a model, over the broker's real sockets, for tests: it
// attaches, maps chunks, writes and reads blocks, and gives chunks back as it must, or does not.
//
// The bytes of a block follow from its tenant and key, so that whatever comes can be compared
// without anybody having kept it.
//
// Threads: the methods are called from one thread; a second one reads the session's messages.
#ifndef PALIMPSEST_BROKER_BLOCKS_TESTING_SOCKET_BLOCK_WORKER_H_
#define PALIMPSEST_BROKER_BLOCKS_TESTING_SOCKET_BLOCK_WORKER_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "broker/server/testing/worker_link.h"
#include "common/block_identity.h"
#include "common/mapping.h"
#include "common/mutex.h"
#include "proto/palimpsest/v1/block_store.grpc.pb.h"

namespace palimpsest {

class SocketBlockWorker {
 public:
  explicit SocketBlockWorker(uint64_t block_bytes) : block_bytes_(block_bytes) {}
  ~SocketBlockWorker() { Drop(); }

  absl::Status Hello(const std::string& socket, const std::string& tenant,
                     const std::string& secret);
  absl::Status Attach(const std::string& socket);
  // Ends the connection; nothing is mapped any more.
  void Drop();

  // Sequences are numbers; each has blocks 0, 1, ... of 16 tokens.

  // Reserves, writes and commits the first `count`; how many are there then.
  absl::StatusOr<uint32_t> Put(uint64_t sequence, uint32_t count);
  // Reserves and writes, in the name of a request or of none; how many it may write.
  absl::StatusOr<uint32_t> Reserve(uint64_t sequence, uint32_t count, uint64_t request = 0);
  // What becomes of all that was reserved.
  absl::Status Commit();
  absl::Status Abort();

  // What it pins stays the request's until it is released or the request ends.
  absl::StatusOr<v1::AcquireResponse> Acquire(uint64_t sequence, uint32_t count, uint64_t request,
                                              absl::Duration wait);
  // Copies and compares what the request has acquired: how many, from the first one on, had the
  // bytes that were written. DataLoss for one whose checksum fits other bytes.
  absl::StatusOr<uint32_t> Verify(uint64_t request);
  // Changes a byte of the last block that the request has acquired, as none may; whether it has
  // one.
  bool Damage(uint64_t request);
  absl::Status Release(uint64_t request);
  absl::Status EndRequest(uint64_t request);
  // Acquire, Verify and EndRequest.
  absl::StatusOr<uint32_t> Get(uint64_t sequence, uint32_t count, uint64_t request,
                               absl::Duration wait);
  // About blocks `first` to `count`; how many it concerned.
  absl::StatusOr<uint64_t> Hint(const v1::CacheAction& action, uint64_t sequence, uint32_t count,
                                uint32_t first);

  v1::BlockStore::Stub& stub() { return *blocks_; }
  const v1::BlockSession& session() const { return session_; }
  v1::BlockChain Chain(uint64_t sequence, uint32_t count) const;
  // Whether it answers requests to unmap.
  void set_answers(bool answers) { answers_ = answers; }

 private:
  // Stays mapped as long as places in it are held.
  struct Chunk {
    Mapping mapping;
    int places = 0;
    bool leaving = false;
  };
  // A block in a place that is held.
  struct Placed {
    BlockKey key;
    uint64_t checksum = 0;
    v1::BlockExtent extent;
    std::shared_ptr<Chunk> chunk;
  };

  void Read();
  // Maps the chunk if need be. An error: the chunk is gone, or about to go.
  absl::StatusOr<std::shared_ptr<Chunk>> Hold(const v1::BlockExtent& extent, uint64_t request);
  absl::Status MapChunk(uint32_t chunk) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // After the broker was told that they are not used, nor anything else of the request.
  void LetGo(const std::vector<Placed>& blocks, uint64_t request);
  void SayUnmapped(const std::set<uint32_t>& chunks);
  absl::Span<std::byte> BytesOf(const Placed& block) const {
    return {block.chunk->mapping.data() + block.extent.offset_bytes(), block_bytes_};
  }
  absl::StatusOr<v1::ReserveResponse> CallReserve(uint64_t sequence, uint32_t count,
                                                  uint64_t request);
  // What is right for the key.
  void Fill(const BlockKey& key, absl::Span<std::byte> bytes) const;

  const uint64_t block_bytes_;
  std::string tenant_;
  WorkerLink link_;
  std::unique_ptr<v1::BlockStore::Stub> blocks_;
  std::thread reader_;
  v1::BlockSession session_;
  std::atomic<bool> answers_ = true;
  std::vector<Placed> written_;
  std::map<uint64_t, std::vector<Placed>> requests_;

  Mutex mu_;
  std::map<uint32_t, std::shared_ptr<Chunk>> chunks_ ABSL_GUARDED_BY(mu_);
  // Chunks that an answer to a request named when they had gone, or were about to: to be answered
  // for once more when it has ended.
  std::map<uint64_t, std::set<uint32_t>> owed_ ABSL_GUARDED_BY(mu_);
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_BLOCKS_TESTING_SOCKET_BLOCK_WORKER_H_
