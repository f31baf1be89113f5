#include "broker/server/session_service.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/grpc_status.h"
#include "common/log.h"
#include "common/monotonic_time.h"

namespace palimpsest {
namespace {

constexpr absl::Duration kImageLookAround = absl::Milliseconds(200);

}  // namespace

SessionService::SessionService(Options options, Parts parts)
    : options_(options), parts_(parts), deadlines_([this] { WatchAttachDeadlines(); }) {}

SessionService::~SessionService() { Shutdown(); }

void SessionService::Shutdown() {
  {
    MutexLock lock(&mu_);
    stopping_ = true;
    changed_.SignalAll();
    for (const auto& [id, call] : calls_) call.context->TryCancel();
  }
  if (deadlines_.joinable()) deadlines_.join();
}

void SessionService::WatchAttachDeadlines() {
  MutexLock lock(&mu_);
  while (!stopping_) {
    const absl::Time now = MonotonicNow();
    absl::Time next = absl::InfiniteFuture();
    for (auto& [id, call] : calls_) {
      if (call.attach_by <= now) {
        call.attach_by = absl::InfiniteFuture();
        call.context->TryCancel();
      }
      next = std::min(next, call.attach_by);
    }
    changed_.WaitWithDeadline(&mu_, next);
  }
}

absl::StatusOr<uint64_t> SessionService::Begin(grpc::ServerContext& context) {
  MutexLock lock(&mu_);
  if (stopping_) return absl::UnavailableError("the broker is shutting down");
  if (calls_.size() >= options_.max_calls) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the broker serves ", calls_.size(), " sessions already"));
  }
  GiveUpOldestSilentCall();
  const uint64_t id = next_call_++;
  calls_[id] = Known{&context, MonotonicNow() + options_.attach_timeout};
  changed_.SignalAll();
  return id;
}

void SessionService::GiveUpOldestSilentCall() {
  size_t silent = 0;
  Known* oldest = nullptr;
  for (auto& [id, call] : calls_) {
    if (call.attach_by == absl::InfiniteFuture()) continue;
    ++silent;
    if (oldest == nullptr) oldest = &call;
  }
  if (silent < options_.max_silent_calls) return;
  oldest->attach_by = absl::InfiniteFuture();
  oldest->context->TryCancel();
}

void SessionService::Attached(uint64_t call) {
  MutexLock lock(&mu_);
  calls_[call].attach_by = absl::InfiniteFuture();
}

void SessionService::End(uint64_t call) {
  MutexLock lock(&mu_);
  calls_.erase(call);
}

grpc::Status SessionService::Session(grpc::ServerContext* context, Stream* stream) {
  const absl::Status status = Serve(*context, *stream);
  if (!status.ok()) {
    Log(LogLevel::kWarning, "session call ended", {{"status", status}});
  }
  return ToGrpcStatus(status);
}

absl::Status SessionService::Serve(grpc::ServerContext& context, Stream& stream) {
  const absl::StatusOr<uint64_t> call = Begin(context);
  if (!call.ok()) return call.status();
  struct Ending {
    SessionService& service;
    uint64_t call;
    ~Ending() { service.End(call); }
  } ending{*this, *call};

  v1::WorkerMessage message;
  if (!stream.Read(&message)) return absl::CancelledError("no Attach came");
  if (!message.has_attach()) {
    return absl::FailedPreconditionError("the first message of a session must be Attach");
  }
  Attached(*call);
  absl::StatusOr<DescriptorPeer> peer = parts_.descriptors.RedeemNonce(message.attach().nonce());
  if (!peer.ok()) {
    parts_.metrics.Attached(AttachOutcome::kRefused);
    return peer.status();
  }
  const ConnectionId connection = peer->connection;
  auto end = std::make_shared<SessionStream>(connection, options_.outbox_messages,
                                             [this, &context, connection] {
                                               context.TryCancel();
                                               parts_.descriptors.Close(connection);
                                             });
  const auto session = message.attach().has_reattach()
                           ? OpenReturning(message.attach(), *peer, stream, end, context)
                           : Open(message.attach(), *peer, stream, end, context);
  absl::Status status = session.status();
  if (status.ok()) {
    // A descriptor connection that closed before the session was known took nobody along.
    if (!parts_.descriptors.IsOpen(connection)) end->Close("the descriptor connection is closed");
    status = Converse(*session, end, stream);
  } else {
    parts_.metrics.Attached(AttachOutcome::kRefused);
    end->Finished();
  }
  parts_.descriptors.Close(connection);
  return status;
}

absl::Status SessionService::Converse(const std::shared_ptr<palimpsest::Broker::Session>& session,
                                      const std::shared_ptr<SessionStream>& end, Stream& stream) {
  Notification written;
  std::thread writer([&stream, &end, &written] {
    while (std::optional<v1::BrokerMessage> next = end->outbox().Pop()) {
      if (!stream.Write(*next)) break;
    }
    written.Notify();
  });
  absl::Status status;
  v1::WorkerMessage message;
  while (status.ok() && stream.Read(&message)) {
    status = parts_.broker.Handle(session, end, message);
  }
  parts_.broker.Disconnect(session, end);
  if (const std::string reason = end->reason(); status.ok() && !reason.empty()) {
    status = absl::UnavailableError(reason);
  }
  end->outbox().Close();
  // The call's status can follow only what is being written.
  if (!written.WaitForNotificationWithTimeout(options_.write_patience)) {
    end->Close("the worker does not read its messages");
  }
  writer.join();
  end->Finished();
  return status;
}

absl::StatusOr<std::shared_ptr<Broker::Session>> SessionService::Open(
    const v1::Attach& attach, const DescriptorPeer& peer, Stream& stream,
    const std::shared_ptr<SessionStream>& end, grpc::ServerContext& context) {
  // Said early: packing an image may take minutes.
  if (absl::Status vacant = parts_.broker.CheckVacant(peer); !vacant.ok()) return vacant;
  auto image = AwaitImage(peer, stream, context);
  if (!image.ok()) return image.status();
  return parts_.broker.Attach(peer, *std::move(image), end, attach.rotates());
}

absl::StatusOr<std::shared_ptr<Broker::Session>> SessionService::OpenReturning(
    const v1::Attach& attach, const DescriptorPeer& peer, Stream& stream,
    const std::shared_ptr<SessionStream>& end, grpc::ServerContext& context) {
  auto session = parts_.broker.FindReturning(peer, attach.reattach());
  if (!session.ok()) return session.status();
  auto image = parts_.images.Find((*session)->fingerprint, peer.tenant);
  if (image == nullptr) {
    auto current = AwaitImage(peer, stream, context);
    if (!current.ok()) return current.status();
    image = *std::move(current);
  }
  if (image->fingerprint != (*session)->fingerprint) {
    return absl::FailedPreconditionError(
        "the tenant's model has changed and the session's image was not returned: start the worker "
        "anew");
  }
  const absl::Status status = parts_.broker.Reattach(*session, attach, std::move(image), end);
  if (!status.ok()) return status;
  return session;
}

absl::StatusOr<std::shared_ptr<const SealedImage>> SessionService::AwaitImage(
    const DescriptorPeer& peer, Stream& stream, grpc::ServerContext& context) {
  const std::shared_ptr<ImageJob> job = parts_.images.Prepare(peer.tenant);
  uint64_t seen = 0;
  absl::Time next_report = absl::InfinitePast();
  while (true) {
    const ImageJob::View view = job->Await(seen, kImageLookAround);
    if (view.finished) {
      if (view.result.ok()) return view.result;
      return absl::FailedPreconditionError(
          absl::StrCat("no parameter image: ", view.result.status().message()));
    }
    if (context.IsCancelled() || !parts_.descriptors.IsOpen(peer.connection)) {
      return absl::CancelledError("the worker gave up waiting");
    }
    if (view.version == seen || view.phase.empty() || MonotonicNow() < next_report) continue;
    seen = view.version;
    next_report = MonotonicNow() + kImageLookAround;
    v1::BrokerMessage message;
    v1::ImageProgress& progress = *message.mutable_image_progress();
    progress.set_phase(view.phase);
    progress.set_done_bytes(static_cast<uint64_t>(view.done.count()));
    progress.set_total_bytes(static_cast<uint64_t>(view.total.count()));
    if (!stream.Write(message)) return absl::CancelledError("the worker is gone");
  }
}

grpc::Status SessionService::GetStatus(grpc::ServerContext*, const v1::GetStatusRequest*,
                                       v1::GetStatusResponse* response) {
  *response = parts_.broker.Status();
  return grpc::Status::OK;
}

grpc::Status SessionService::GetRemapLog(grpc::ServerContext*,
                                         const v1::GetRemapLogRequest* request,
                                         v1::GetRemapLogResponse* response) {
  *response = parts_.broker.RemapDecisions(*request);
  return grpc::Status::OK;
}

}  // namespace palimpsest
