#include "broker/blocks/block_service.h"

#include <memory>
#include <optional>
#include <utility>

#include "broker/blocks/block_messages.h"
#include "broker/blocks/block_watch.h"
#include "common/grpc_status.h"
#include "common/mutex.h"

namespace palimpsest {
namespace {

absl::Status NoTiers() {
  return absl::FailedPreconditionError(
      "this broker keeps no blocks: its configuration has no `tiers`");
}

// An Acquire under way. gRPC deletes it by OnDone, which comes only after Finish.
class Acquiring : public grpc::ServerUnaryReactor {
 public:
  Acquiring(BlockStore& store, const std::vector<v1::Tier>& tiers, BlockStore::Caller caller,
            v1::AcquireResponse& response)
      : store_(store), tiers_(tiers), caller_(std::move(caller)), response_(response) {}

  // Before gRPC knows the reactor, so that nothing else happens to it meanwhile.
  void Start(const ParsedAcquire& parsed) {
    const auto waits = store_.Acquire(caller_, parsed.request, parsed.wait,
                                      [this](absl::StatusOr<blocks::AcquireReply> reply) {
                                        if (reply.ok()) FillAcquired(*reply, tiers_, response_);
                                        Finish(ToGrpcStatus(reply.status()));
                                      });
    MutexLock lock(&mu_);
    waits_ = waits;
  }

  void OnCancel() override {
    std::optional<blocks::WaitId> waits;
    {
      MutexLock lock(&mu_);
      waits = waits_;
    }
    if (waits.has_value() && store_.CancelWait(caller_, *waits)) Finish(grpc::Status::CANCELLED);
  }

  void OnDone() override { delete this; }

 private:
  BlockStore& store_;
  const std::vector<v1::Tier>& tiers_;
  const BlockStore::Caller caller_;
  v1::AcquireResponse& response_;
  Mutex mu_;
  std::optional<blocks::WaitId> waits_ ABSL_GUARDED_BY(mu_);
};

grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* context, const absl::Status& status) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  reactor->Finish(ToGrpcStatus(status));
  return reactor;
}

// `seconds`, or `fallback` for 0.
absl::StatusOr<absl::Duration> CheckedWait(double seconds) {
  constexpr absl::Duration kFallback = absl::Seconds(60);
  constexpr absl::Duration kMost = absl::Seconds(600);
  if (seconds == 0) return kFallback;
  if (seconds > 0 && seconds <= absl::ToDoubleSeconds(kMost)) return absl::Seconds(seconds);
  return absl::InvalidArgumentError("wait_seconds: expected 0 to 600");
}

absl::StatusOr<Bytes> CheckedBytes(uint64_t bytes) {
  constexpr uint64_t kMost = uint64_t{1} << 60;
  if (bytes <= kMost) return Bytes(static_cast<int64_t>(bytes));
  return absl::InvalidArgumentError("more than 2^60 bytes");
}

absl::StatusOr<blocks::TierIndex> CheckedTier(const BlockStore& store, v1::Tier tier) {
  const absl::StatusOr<std::string> name = TierName(tier);
  if (!name.ok()) return name.status();
  return store.FindTier(*name);
}

}  // namespace

BlockService::BlockService(palimpsest::BlockStore* store) : store_(store) {
  if (store == nullptr) return;
  for (const std::string& name : store->tier_names()) tiers_.push_back(TierFromName(name));
}

absl::StatusOr<palimpsest::BlockStore::Caller> BlockService::Identify(
    const v1::BlockSession& session) {
  if (store_ == nullptr) return NoTiers();
  return store_->Identify(SessionId(session.session_id()), session.block_token());
}

template <typename Request, typename Handle>
grpc::ServerUnaryReactor* BlockService::Serve(Context* context, const Request& request,
                                              Handle handle) {
  const auto caller = Identify(request.session());
  return Answer(context, caller.ok() ? handle(*caller) : caller.status());
}

grpc::ServerUnaryReactor* BlockService::Reserve(Context* context, const v1::ReserveRequest* request,
                                                v1::ReserveResponse* response) {
  return Serve(context, *request, [&](const palimpsest::BlockStore::Caller& caller) {
    const auto wanted = ParseReserve(*request, caller.tenant, store_->chunk_bytes());
    if (!wanted.ok()) return wanted.status();
    const auto reserved = store_->Reserve(caller, request->request_id(), *wanted);
    if (reserved.ok()) FillReserved(*reserved, *response);
    return reserved.status();
  });
}

grpc::ServerUnaryReactor* BlockService::Commit(Context* context, const v1::CommitRequest* request,
                                               v1::CommitResponse*) {
  return Serve(context, *request, [&](const palimpsest::BlockStore::Caller& caller) {
    const auto committed = ParseCommit(*request);
    return committed.ok() ? store_->Commit(caller, *committed) : committed.status();
  });
}

grpc::ServerUnaryReactor* BlockService::Abort(Context* context, const v1::AbortRequest* request,
                                              v1::AbortResponse*) {
  return Serve(context, *request, [&](const palimpsest::BlockStore::Caller& caller) {
    const auto keys = ParseAbort(*request);
    return keys.ok() ? store_->Abort(caller, *keys) : keys.status();
  });
}

grpc::ServerUnaryReactor* BlockService::MapChunks(Context* context,
                                                  const v1::MapChunksRequest* request,
                                                  v1::MapChunksResponse* response) {
  return Serve(context, *request, [&](const palimpsest::BlockStore::Caller& caller) {
    const auto chunks = ParseMapChunks(*request);
    if (!chunks.ok()) return chunks.status();
    const auto offer = store_->MapChunks(caller, *chunks);
    if (!offer.ok()) return offer.status();
    response->set_chunk_bytes(static_cast<uint64_t>(offer->chunk_bytes.count()));
    response->set_token(offer->token.ToBytes());
    response->set_token_seconds(absl::ToDoubleSeconds(offer->lifetime));
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* BlockService::Acquire(Context* context, const v1::AcquireRequest* request,
                                                v1::AcquireResponse* response) {
  const auto caller = Identify(request->session());
  if (!caller.ok()) return Answer(context, caller.status());
  const auto parsed = ParseAcquire(*request, caller->tenant);
  if (!parsed.ok()) return Answer(context, parsed.status());
  auto* const acquiring = new Acquiring(*store_, tiers_, *caller, *response);
  acquiring->Start(*parsed);
  return acquiring;
}

grpc::ServerUnaryReactor* BlockService::Release(Context* context, const v1::ReleaseRequest* request,
                                                v1::ReleaseResponse*) {
  return Serve(context, *request, [&](const palimpsest::BlockStore::Caller& caller) {
    const auto extents = ParseRelease(*request);
    return extents.ok() ? store_->Release(caller, request->request_id(), *extents)
                        : extents.status();
  });
}

grpc::ServerUnaryReactor* BlockService::EndRequest(Context* context,
                                                   const v1::EndRequestRequest* request,
                                                   v1::EndRequestResponse*) {
  return Serve(context, *request, [&](const palimpsest::BlockStore::Caller& caller) {
    const auto ending = ParseEnding(*request, store_->Now());
    return ending.ok() ? store_->EndRequest(caller, *ending) : ending.status();
  });
}

grpc::ServerUnaryReactor* BlockService::Hint(Context* context, const v1::HintRequest* request,
                                             v1::HintResponse* response) {
  return Serve(context, *request, [&](const palimpsest::BlockStore::Caller& caller) {
    const auto parsed = ParseHint(*request, caller.tenant, store_->Now());
    if (!parsed.ok()) return parsed.status();
    const auto moved = store_->Hint(caller, parsed->hint);
    if (moved.ok()) response->set_blocks(*moved);
    return moved.status();
  });
}

grpc::ServerUnaryReactor* BlockService::SetRecompute(Context* context,
                                                     const v1::SetRecomputeRequest* request,
                                                     v1::SetRecomputeResponse*) {
  return Serve(context, *request, [&](const palimpsest::BlockStore::Caller& caller) {
    const auto cost = ParseRecompute(*request);
    return cost.ok() ? store_->SetRecompute(caller, *cost) : cost.status();
  });
}

grpc::Status BlockAdminService::SetLimit(grpc::ServerContext*, const v1::SetLimitRequest* request,
                                         v1::SetLimitResponse* response) {
  if (store_ == nullptr) return ToGrpcStatus(NoTiers());
  const auto tier = CheckedTier(*store_, request->tier());
  if (!tier.ok()) return ToGrpcStatus(tier.status());
  const auto bytes = CheckedBytes(request->bytes());
  if (!bytes.ok()) return ToGrpcStatus(bytes.status());
  const auto used = store_->SetLimit(*tier, request->tenant(), *bytes);
  if (!used.ok()) return ToGrpcStatus(used.status());
  response->set_limit_bytes(static_cast<uint64_t>(used->limit.count()));
  response->set_used_bytes(static_cast<uint64_t>(used->used.count()));
  return grpc::Status::OK;
}

grpc::Status BlockAdminService::Trim(grpc::ServerContext*, const v1::TrimRequest* request,
                                     v1::TrimResponse* response) {
  if (store_ == nullptr) return ToGrpcStatus(NoTiers());
  std::optional<blocks::TierIndex> tier;
  if (request->tier() != v1::TIER_UNSPECIFIED) {
    const auto named = CheckedTier(*store_, request->tier());
    if (!named.ok()) return ToGrpcStatus(named.status());
    tier = *named;
  }
  const auto keep = CheckedBytes(request->keep_bytes());
  if (!keep.ok()) return ToGrpcStatus(keep.status());
  const auto trimmed = store_->Trim(tier, request->tenant(), *keep);
  if (!trimmed.ok()) return ToGrpcStatus(trimmed.status());
  response->set_blocks(trimmed->blocks);
  response->set_bytes(static_cast<uint64_t>(trimmed->bytes.count()));
  return grpc::Status::OK;
}

grpc::Status BlockAdminService::Purge(grpc::ServerContext*, const v1::PurgeRequest* request,
                                      v1::PurgeResponse* response) {
  if (store_ == nullptr) return ToGrpcStatus(NoTiers());
  const auto wait = CheckedWait(request->wait_seconds());
  if (!wait.ok()) return ToGrpcStatus(wait.status());
  const auto forgotten = store_->Purge(request->tenant(), *wait);
  if (!forgotten.ok()) return ToGrpcStatus(forgotten.status());
  response->set_blocks(*forgotten);
  return grpc::Status::OK;
}

grpc::Status BlockAdminService::CheckTiers(grpc::ServerContext*,
                                           const v1::CheckTiersRequest* request,
                                           v1::CheckTiersResponse* response) {
  if (store_ == nullptr) return ToGrpcStatus(NoTiers());
  const auto wait = CheckedWait(request->wait_seconds());
  if (!wait.ok()) return ToGrpcStatus(wait.status());
  const auto block = CheckedBytes(request->block_bytes());
  if (!block.ok()) return ToGrpcStatus(block.status());
  const auto checked = store_->CheckTiers(*block > Bytes(0) ? *block : MiB(2),
                                          request->blocks() > 0 ? request->blocks() : 8, *wait);
  if (!checked.ok()) return ToGrpcStatus(checked.status());
  for (const palimpsest::BlockStore::CheckedTier& tier : *checked) {
    v1::CheckedTier& out = *response->add_tiers();
    out.set_tier(TierFromName(tier.tier));
    out.set_name(tier.name);
    if (!tier.check.status.ok()) out.set_error(std::string(tier.check.status.message()));
    out.set_blocks(tier.check.blocks);
    out.set_store_bytes_per_second(tier.check.store_rate);
    out.set_load_bytes_per_second(tier.check.load_rate);
  }
  return grpc::Status::OK;
}

grpc::ServerWriteReactor<v1::WatchBlocksResponse>* BlockAdminService::WatchBlocks(
    grpc::CallbackServerContext*, const v1::WatchBlocksRequest* request) {
  if (store_ == nullptr) {
    // Deletes itself when gRPC has said so.
    class Refusal : public grpc::ServerWriteReactor<v1::WatchBlocksResponse> {
     public:
      Refusal() { Finish(ToGrpcStatus(NoTiers())); }
      void OnDone() override { delete this; }
    };
    return new Refusal;
  }
  const std::shared_ptr<BlockWatch> watch = BlockWatch::Create(*store_);
  watch->Begin(*request);
  return watch.get();
}

}  // namespace palimpsest
