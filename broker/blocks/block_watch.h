// A WatchBlocks call: hands a reader a snapshot and the events behind it, or the events behind the
// one that it has heard of last.
//
// Nothing is queued for a reader: it takes from the store what came behind its last message, when
// it has taken that. Whoever is so slow that events are gone meanwhile is told how many and gets a
// snapshot again. Beside one message it holds what is left of a snapshot.
//
// Threads: gRPC's callbacks and the store's threads, which wake it, at any time; one of them at a
// time makes messages. Legal order: Create, then one of Refuse and Begin.
#ifndef PALIMPSEST_BROKER_BLOCKS_BLOCK_WATCH_H_
#define PALIMPSEST_BROKER_BLOCKS_BLOCK_WATCH_H_

#include <grpcpp/grpcpp.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "broker/blocks/block_store.h"
#include "common/mutex.h"
#include "proto/palimpsest/v1/block_store.pb.h"

namespace palimpsest {

class BlockWatch final : public grpc::ServerWriteReactor<v1::WatchBlocksResponse>,
                         public BlockEventListener,
                         public std::enable_shared_from_this<BlockWatch> {
 public:
  // Of a message, which has 200 KiB or so then.
  static constexpr size_t kEvents = 4096;

  // The call holds itself until OnDone. `store` outlives it.
  static std::shared_ptr<BlockWatch> Create(BlockStore& store);
  void Refuse(const absl::Status& status);
  void Begin(const v1::WatchBlocksRequest& request);

  void OnBlockEvents() override;

  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  enum class Next { kNothing, kWrite, kFinish };

  explicit BlockWatch(BlockStore& store) : store_(store) {}

  // Makes the next message and writes it, unless somebody does.
  void Pump();
  // kFinish: why there are no more.
  Next Make(absl::Status& status);
  void MakeOfSnapshot();
  // Unless it is another tenant's.
  void Add(const blocks::BlockEvent& event);

  BlockStore& store_;
  std::shared_ptr<BlockWatch> self_;

  // Since Begin.
  std::vector<std::string> tenants_;  // by TenantId
  std::vector<v1::Tier> tiers_;       // by TierIndex
  std::optional<TenantId> only_;      // whose events are told; nothing: everybody's

  // Of who makes messages.
  v1::WatchBlocksResponse response_;
  uint64_t position_ = 0;  // of the last event that was told or is contained in the snapshot
  bool wants_snapshot_ = false;
  uint64_t missed_ = 0;
  bool in_snapshot_ = false;
  std::vector<blocks::BlockEvent> snapshot_;
  size_t told_ = 0;  // of it

  Mutex mu_;
  bool making_ ABSL_GUARDED_BY(mu_) = false;  // or writing
  bool woken_ ABSL_GUARDED_BY(mu_) = false;   // since it began to make the last message
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_BLOCKS_BLOCK_WATCH_H_
