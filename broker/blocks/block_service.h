// The gRPC services of the block store: what workers call (on the broker's control sockets) and
// what operators call (on a socket of their own).
//
// Calls of workers are answered on gRPC's threads; an Acquire that waits holds none. Operators'
// calls block theirs, but for WatchBlocks.
//
// Threads: thread-safe. A store that is stopped answers Unavailable.
#ifndef PALIMPSEST_BROKER_BLOCKS_BLOCK_SERVICE_H_
#define PALIMPSEST_BROKER_BLOCKS_BLOCK_SERVICE_H_

#include <vector>

#include "broker/blocks/block_store.h"
#include "proto/palimpsest/v1/block_store.grpc.pb.h"

namespace palimpsest {

class BlockService : public v1::BlockStore::CallbackService {
 public:
  // `store` outlives it. Null: every call is FailedPrecondition.
  explicit BlockService(palimpsest::BlockStore* store);

  using Context = grpc::CallbackServerContext;
  grpc::ServerUnaryReactor* Reserve(Context* context, const v1::ReserveRequest* request,
                                    v1::ReserveResponse* response) override;
  grpc::ServerUnaryReactor* Commit(Context* context, const v1::CommitRequest* request,
                                   v1::CommitResponse* response) override;
  grpc::ServerUnaryReactor* Abort(Context* context, const v1::AbortRequest* request,
                                  v1::AbortResponse* response) override;
  grpc::ServerUnaryReactor* MapChunks(Context* context, const v1::MapChunksRequest* request,
                                      v1::MapChunksResponse* response) override;
  grpc::ServerUnaryReactor* Acquire(Context* context, const v1::AcquireRequest* request,
                                    v1::AcquireResponse* response) override;
  grpc::ServerUnaryReactor* Release(Context* context, const v1::ReleaseRequest* request,
                                    v1::ReleaseResponse* response) override;
  grpc::ServerUnaryReactor* EndRequest(Context* context, const v1::EndRequestRequest* request,
                                       v1::EndRequestResponse* response) override;
  grpc::ServerUnaryReactor* Hint(Context* context, const v1::HintRequest* request,
                                 v1::HintResponse* response) override;
  grpc::ServerUnaryReactor* SetRecompute(Context* context, const v1::SetRecomputeRequest* request,
                                         v1::SetRecomputeResponse* response) override;

 private:
  absl::StatusOr<palimpsest::BlockStore::Caller> Identify(const v1::BlockSession& session);
  // Answers what `handle` says of the caller that the request proves to be from.
  template <typename Request, typename Handle>
  grpc::ServerUnaryReactor* Serve(Context* context, const Request& request, Handle handle);

  palimpsest::BlockStore* const store_;
  std::vector<v1::Tier> tiers_;  // by TierIndex
};

class BlockAdminService
    : public v1::BlockAdmin::WithCallbackMethod_WatchBlocks<v1::BlockAdmin::Service> {
 public:
  // As BlockService.
  explicit BlockAdminService(palimpsest::BlockStore* store) : store_(store) {}

  grpc::Status SetLimit(grpc::ServerContext* context, const v1::SetLimitRequest* request,
                        v1::SetLimitResponse* response) override;
  grpc::Status Trim(grpc::ServerContext* context, const v1::TrimRequest* request,
                    v1::TrimResponse* response) override;
  grpc::Status Purge(grpc::ServerContext* context, const v1::PurgeRequest* request,
                     v1::PurgeResponse* response) override;
  grpc::Status CheckTiers(grpc::ServerContext* context, const v1::CheckTiersRequest* request,
                          v1::CheckTiersResponse* response) override;
  // Holds no thread.
  grpc::ServerWriteReactor<v1::WatchBlocksResponse>* WatchBlocks(
      grpc::CallbackServerContext* context, const v1::WatchBlocksRequest* request) override;

 private:
  palimpsest::BlockStore* const store_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_BLOCKS_BLOCK_SERVICE_H_
