// A worker of the block store without a model and without gRPC, for tests: it attaches, maps
// chunks, writes and reads blocks, and answers requests to unmap, well or badly.
//
// Threads: the methods are called from one thread; a second one answers messages.
#ifndef PALIMPSEST_BROKER_BLOCKS_TESTING_BLOCK_WORKER_H_
#define PALIMPSEST_BROKER_BLOCKS_TESTING_BLOCK_WORKER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "broker/blocks/block_store.h"
#include "common/block_checksum.h"
#include "common/mapping.h"
#include "common/mutex.h"

namespace palimpsest {

// The bytes of a block in tests, told by its key.
inline void FillBlock(const BlockKey& key, absl::Span<std::byte> bytes) {
  std::mt19937_64 random(key.low ^ key.high);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
}

// Blocks `first` .. `first + count - 1` of a sequence named by a number.
inline std::vector<BlockIdentity> ChainOf(const std::string& tenant, uint64_t sequence,
                                          uint64_t first, uint64_t count) {
  std::vector<BlockIdentity> chain;
  for (uint64_t i = first; i < first + count; ++i) {
    const BlockKey parent = i == 0 ? BlockKey{} : BlockKey{sequence, i};
    chain.push_back({{sequence, i + 1}, parent, {static_cast<TokenId>(i), 7}, tenant});
  }
  return chain;
}

class BlockWorker {
 public:
  // `hand_overs` is what a descriptor socket would fetch from.
  BlockWorker(BlockStore& store, HandOverTable& hand_overs, SessionId session, TenantId tenant,
              std::string tenant_name, std::shared_ptr<const ProcessHandle> process,
              Bytes block_bytes)
      : store_(store),
        hand_overs_(hand_overs),
        session_(session),
        tenant_(tenant),
        tenant_name_(std::move(tenant_name)),
        process_(std::move(process)),
        block_bytes_(block_bytes) {
    Attach();
  }
  ~BlockWorker() { Disconnect(); }
  BlockWorker(const BlockWorker&) = delete;
  BlockWorker& operator=(const BlockWorker&) = delete;

  // Attaches, for the first time or again: nothing is mapped any more.
  void Attach() {
    Disconnect();
    const ConnectionId connection(++last_connection_ * 1000 + session_.value());
    hand_overs_.Open(connection);
    stream_ = std::make_shared<SessionStream>(connection, 64, [] {});
    caller_ = {session_, tenant_name_, store_.Attached({session_, tenant_, process_, stream_})};
    // So long that every tier is worth its while.
    (void)store_.SetRecompute(caller_, {absl::Seconds(10), absl::ZeroDuration()});
    reader_ = std::thread([this, stream = stream_] { Read(*stream); });
  }
  // The connection ends; the session does not.
  void Disconnect() {
    if (stream_ == nullptr) return;
    stream_->Close("the test ends it");
    reader_.join();
    hand_overs_.Drop(stream_->connection());
    stream_ = nullptr;
    MutexLock lock(&mu_);
    chunks_.clear();
  }
  // Its process is gone.
  void End() {
    Disconnect();
    store_.Ended(session_);
  }

  // Whether it answers requests to unmap.
  void set_answers(bool answers) {
    MutexLock lock(&mu_);
    answers_ = answers;
  }
  const BlockStore::Caller& caller() const { return caller_; }

  // Reserves, writes and commits; how many blocks were taken or there already.
  absl::StatusOr<size_t> Put(const std::vector<BlockIdentity>& chain, uint64_t request = 0) {
    const auto reserved = Reserve(chain, request);
    if (!reserved.ok()) return reserved.status();
    size_t there = 0;
    std::vector<ArenaLedger::Committed> committed;
    for (size_t i = 0; i < reserved->size(); ++i) {
      const blocks::Reserved& block = (*reserved)[i];
      if (block.result == blocks::Reservation::kPresent) ++there;
      if (block.result != blocks::Reservation::kReserved) continue;
      const auto bytes = At(block.extent);
      if (!bytes.ok()) return bytes.status();
      FillBlock(chain[i].key, *bytes);
      committed.push_back({chain[i].key, BlockChecksum(chain[i].key, *bytes)});
      ++there;
    }
    if (committed.empty()) return there;
    if (absl::Status status = store_.Commit(caller_, committed); !status.ok()) return status;
    return there;
  }
  absl::StatusOr<std::vector<blocks::Reserved>> Reserve(const std::vector<BlockIdentity>& chain,
                                                        uint64_t request = 0) {
    std::vector<ArenaLedger::Wanted> wanted;
    for (const BlockIdentity& id : chain) wanted.push_back({id, block_bytes_});
    return store_.Reserve(caller_, request, wanted);
  }

  absl::StatusOr<blocks::AcquireReply> Acquire(const std::vector<BlockIdentity>& chain,
                                               uint64_t request, absl::Duration wait) {
    blocks::AcquireRequest ask;
    ask.request = request;
    ask.ids = chain;
    ask.promote = wait > absl::ZeroDuration();
    absl::StatusOr<blocks::AcquireReply> reply;
    Notification answered;
    store_.Acquire(caller_, ask, wait, [&](absl::StatusOr<blocks::AcquireReply> answer) {
      reply = std::move(answer);
      answered.Notify();
    });
    answered.WaitForNotification();
    return reply;
  }

  // Acquires, copies, compares and ends the request: how many blocks had the bytes that were
  // written. DataLoss if one came with others that its checksum fits; ones that it does not fit
  // count as misses, as for a worker.
  absl::StatusOr<size_t> Get(const std::vector<BlockIdentity>& chain, uint64_t request,
                             absl::Duration wait = absl::ZeroDuration()) {
    const auto reply = Acquire(chain, request, wait);
    if (!reply.ok()) return reply.status();
    size_t good = 0;
    std::vector<std::byte> expected(static_cast<size_t>(block_bytes_.count()));
    for (size_t i = 0; i < reply->blocks.size(); ++i) {
      const auto bytes = At(reply->blocks[i].extent);
      if (!bytes.ok()) return bytes.status();
      if (BlockChecksum(chain[i].key, *bytes) != reply->blocks[i].checksum) break;
      FillBlock(chain[i].key, absl::MakeSpan(expected));
      if (*bytes != absl::MakeSpan(expected)) {
        return absl::DataLossError(absl::StrCat("block ", i, " has other bytes"));
      }
      ++good;
    }
    blocks::RequestEnding ending;
    ending.request = request;
    if (absl::Status status = store_.EndRequest(caller_, ending); !status.ok()) return status;
    return good;
  }

  // Maps the chunk if it is not mapped.
  absl::StatusOr<absl::Span<std::byte>> At(const ArenaExtent& extent) {
    MutexLock lock(&mu_);
    auto found = chunks_.find(extent.chunk.value());
    if (found == chunks_.end()) {
      const uint32_t id = extent.chunk.value();
      auto offer = store_.MapChunks(caller_, {&id, 1});
      if (!offer.ok()) return offer.status();
      auto fetched = hand_overs_.Take(stream_->connection(), offer->token);
      if (!fetched.ok()) return fetched.status();
      auto mapping =
          Mapping::Map(fetched->descriptors[0]->get(), offer->chunk_bytes, MapAccess::kReadWrite);
      if (!mapping.ok()) return mapping.status();
      found = chunks_.emplace(id, *std::move(mapping)).first;
    }
    return absl::MakeSpan(found->second.data() + extent.offset.count(),
                          static_cast<size_t>(extent.length.count()));
  }

  // Requests to unmap that came.
  size_t unmaps() {
    MutexLock lock(&mu_);
    return unmaps_;
  }

 private:
  void Read(SessionStream& stream) {
    while (auto message = stream.outbox().Pop()) {
      if (!message->has_unmap_chunks()) continue;
      const auto& ids = message->unmap_chunks().chunk_ids();
      {
        MutexLock lock(&mu_);
        ++unmaps_;
        if (!answers_) continue;
        for (const uint32_t id : ids) chunks_.erase(id);
      }
      store_.ChunksUnmapped(session_, stream, {ids.data(), static_cast<size_t>(ids.size())});
    }
  }

  BlockStore& store_;
  HandOverTable& hand_overs_;
  const SessionId session_;
  const TenantId tenant_;
  const std::string tenant_name_;
  const std::shared_ptr<const ProcessHandle> process_;
  const Bytes block_bytes_;
  uint64_t last_connection_ = 0;
  std::shared_ptr<SessionStream> stream_;
  BlockStore::Caller caller_;
  std::thread reader_;

  Mutex mu_;
  bool answers_ ABSL_GUARDED_BY(mu_) = true;
  size_t unmaps_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<uint32_t, Mapping> chunks_ ABSL_GUARDED_BY(mu_);
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_BLOCKS_TESTING_BLOCK_WORKER_H_
