// A worker of the block store without a model, over the broker's real sockets, for tests: it
// attaches, maps chunks, writes and reads blocks, and answers requests to unmap, or does not.
//
// Threads: the methods are called from one thread; a second one reads the session's messages.
#ifndef PALIMPSEST_BROKER_BLOCKS_TESTING_SOCKET_BLOCK_WORKER_H_
#define PALIMPSEST_BROKER_BLOCKS_TESTING_SOCKET_BLOCK_WORKER_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "common/descriptor_channel.h"
#include "common/mapping.h"
#include "common/mutex.h"
#include "grpcpp/grpcpp.h"
#include "proto/palimpsest/v1/block_store.grpc.pb.h"
#include "proto/palimpsest/v1/broker.grpc.pb.h"

namespace palimpsest {

class SocketBlockWorker {
 public:
  explicit SocketBlockWorker(uint64_t block_bytes) : block_bytes_(block_bytes) {}
  ~SocketBlockWorker() { Drop(); }

  absl::Status Hello(const std::string& socket, const std::string& tenant,
                     const std::string& secret);
  absl::Status Attach(const std::string& socket);
  // Ends the connection.
  void Drop();

  // Sequences are numbers; each has blocks 0, 1, ... of 16 tokens.

  // Reserves, writes and commits the first `count`; how many are there then.
  absl::StatusOr<uint32_t> Put(uint64_t sequence, uint32_t count);
  // Reserves and writes; how many it may write.
  absl::StatusOr<uint32_t> Reserve(uint64_t sequence, uint32_t count);
  absl::StatusOr<v1::AcquireResponse> Acquire(uint64_t sequence, uint32_t count, uint64_t request,
                                              absl::Duration wait);
  // Acquires, copies, compares and ends the request: how many had the bytes that were written.
  // DataLoss for one whose checksum fits other bytes.
  absl::StatusOr<uint32_t> Get(uint64_t sequence, uint32_t count, uint64_t request,
                               absl::Duration wait);
  absl::Status EndRequest(uint64_t request);

  v1::BlockStore::Stub& stub() { return *blocks_; }
  const v1::BlockSession& session() const { return session_; }
  v1::BlockChain Chain(uint64_t sequence, uint32_t count) const;
  void set_answers(bool answers) { answers_ = answers; }

 private:
  using Stream = grpc::ClientReaderWriter<v1::WorkerMessage, v1::BrokerMessage>;

  void Read();
  absl::StatusOr<absl::Span<std::byte>> At(const v1::BlockExtent& extent);
  absl::StatusOr<Mapping> MapChunk(uint32_t chunk);

  const uint64_t block_bytes_;
  std::optional<DescriptorChannel> descriptors_;
  Token nonce_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<grpc::ClientContext> context_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<v1::BlockStore::Stub> blocks_;
  std::thread reader_;
  v1::BlockSession session_;
  std::atomic<bool> answers_ = true;
  Mutex mu_;
  std::map<uint32_t, Mapping> chunks_ ABSL_GUARDED_BY(mu_);
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_BLOCKS_TESTING_SOCKET_BLOCK_WORKER_H_
