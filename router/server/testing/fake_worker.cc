#include "router/server/testing/fake_worker.h"

#include <arpa/inet.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <utility>

#include "absl/time/clock.h"
#include "common/grpc_time.h"
#include "common/monotonic_time.h"

namespace palimpsest::router::testing {

v1::WorkerGenerateResponse Tokens(const std::string& text) {
  v1::WorkerGenerateResponse message;
  for (const char c : text) message.add_token_ids(static_cast<uint8_t>(c));
  return message;
}

v1::WorkerGenerateResponse LastTokens(const std::string& text, v1::FinishReason reason) {
  v1::WorkerGenerateResponse message = Tokens(text);
  message.set_finish_reason(reason);
  message.mutable_usage()->set_cached_tokens(2);
  message.mutable_usage()->set_preemptions(1);
  return message;
}

void FakeStream::Send(v1::WorkerGenerateResponse message) {
  {
    MutexLock lock(&mutex_);
    queue_.push_back(std::move(message));
  }
  Advance();
}

void FakeStream::End(grpc::Status status, int retry_after_ms) {
  if (retry_after_ms >= 0) {
    context_->AddTrailingMetadata("retry-after-ms", std::to_string(retry_after_ms));
  }
  {
    MutexLock lock(&mutex_);
    end_ = std::move(status);
  }
  Advance();
}

void FakeStream::Advance() {
  const v1::WorkerGenerateResponse* next = nullptr;
  std::optional<grpc::Status> end;
  {
    MutexLock lock(&mutex_);
    if (writing_ || ended_) return;
    if (!queue_.empty() && !cancelled_) {
      writing_ = true;
      next = &queue_.front();
    } else if (end_ || cancelled_) {
      ended_ = true;
      end = end_.value_or(grpc::Status::CANCELLED);
    }
  }
  if (next != nullptr) StartWrite(next);
  if (end) Finish(*end);
}

void FakeStream::OnWriteDone(bool ok) {
  {
    MutexLock lock(&mutex_);
    writing_ = false;
    queue_.pop_front();
    written_ += ok ? 1 : 0;
  }
  Advance();
}

void FakeStream::OnCancel() {
  {
    MutexLock lock(&mutex_);
    cancelled_ = true;
    changed_.SignalAll();
  }
  Advance();
}

void FakeStream::OnDone() { self.reset(); }

bool FakeStream::AwaitCancelled() {
  const absl::Time deadline = MonotonicNow() + kPatience;
  MutexLock lock(&mutex_);
  while (!cancelled_) {
    if (changed_.WaitWithDeadline(&mutex_, deadline)) return cancelled_;
  }
  return true;
}

int FakeStream::written() const {
  MutexLock lock(&mutex_);
  return written_;
}

FakeWorker::FakeWorker(std::string tenant, std::string model)
    : tenant_(std::move(tenant)), model_(std::move(model)) {
  grpc::EnableDefaultHealthCheckService(true);
  grpc::ServerBuilder builder;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
  builder.RegisterService(this);
  server_ = builder.BuildAndStart();
}

FakeWorker::~FakeWorker() { Stop(); }

void FakeWorker::Stop() {
  ReleaseHints();
  server_->Shutdown(GrpcTimeout(absl::ZeroDuration()));
  server_->Wait();
}

void FakeWorker::SetHandler(std::function<void(FakeStream&)> handler) {
  MutexLock lock(&mutex_);
  handler_ = std::move(handler);
}

std::shared_ptr<FakeStream> FakeWorker::AwaitCall() {
  const absl::Time deadline = MonotonicNow() + kPatience;
  MutexLock lock(&mutex_);
  while (arrived_.empty()) {
    if (changed_.WaitWithDeadline(&mutex_, deadline)) return nullptr;
  }
  std::shared_ptr<FakeStream> stream = std::move(arrived_.front());
  arrived_.pop_front();
  return stream;
}

std::string FakeWorker::last_authorization() const {
  MutexLock lock(&mutex_);
  return authorization_;
}

void FakeWorker::SetToken(std::string token) {
  MutexLock lock(&mutex_);
  token_ = std::move(token);
}

bool FakeWorker::Authorized(const grpc::CallbackServerContext& context) {
  const auto found = context.client_metadata().find("authorization");
  MutexLock lock(&mutex_);
  authorization_ = found == context.client_metadata().end()
                       ? ""
                       : std::string(found->second.data(), found->second.size());
  return token_.empty() || authorization_ == "Bearer " + token_;
}

grpc::ServerWriteReactor<v1::WorkerGenerateResponse>* FakeWorker::Generate(
    grpc::CallbackServerContext* context, const v1::WorkerGenerateRequest* request) {
  ++calls_;
  auto stream = std::make_shared<FakeStream>(context, *request);
  stream->self = stream;
  if (!Authorized(*context)) {
    stream->End({grpc::StatusCode::UNAUTHENTICATED, "wrong router token"});
    return stream.get();
  }
  std::function<void(FakeStream&)> handler;
  {
    MutexLock lock(&mutex_);
    handler = handler_;
    if (!handler) arrived_.push_back(stream);
    changed_.SignalAll();
  }
  if (handler) handler(*stream);
  return stream.get();
}

void FakeWorker::SetBlocksOfHints(std::optional<uint64_t> blocks) {
  MutexLock lock(&mutex_);
  hint_blocks_ = blocks;
}

v1::WorkerHintRequest FakeWorker::last_hint() const {
  MutexLock lock(&mutex_);
  return hint_;
}

grpc::ServerUnaryReactor* FakeWorker::HintConversation(grpc::CallbackServerContext* context,
                                                       const v1::WorkerHintRequest* request,
                                                       v1::WorkerHintResponse* response) {
  const Hint hint{context->DefaultReactor(), response};
  {
    MutexLock lock(&mutex_);
    hint_ = *request;
    if (holds_hints_) {
      held_hints_.push_back(hint);
      return hint.reactor;
    }
  }
  Answer(hint);
  return hint.reactor;
}

void FakeWorker::Answer(const Hint& hint) {
  grpc::Status status(grpc::StatusCode::FAILED_PRECONDITION, "no tiers");
  {
    MutexLock lock(&mutex_);
    if (hint_blocks_.has_value()) {
      hint.response->set_blocks(*hint_blocks_);
      status = grpc::Status::OK;
    }
  }
  hint.reactor->Finish(status);
}

void FakeWorker::HoldHints() {
  MutexLock lock(&mutex_);
  holds_hints_ = true;
}

void FakeWorker::ReleaseHints() {
  std::vector<Hint> held;
  {
    MutexLock lock(&mutex_);
    holds_hints_ = false;
    held.swap(held_hints_);
  }
  for (const Hint& hint : held) Answer(hint);
}

size_t FakeWorker::held_hints() const {
  MutexLock lock(&mutex_);
  return held_hints_.size();
}

grpc::ServerUnaryReactor* FakeWorker::Drain(grpc::CallbackServerContext* context,
                                            const v1::DrainRequest*, v1::DrainResponse*) {
  draining_ = true;
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(grpc::Status::OK);
  return reactor;
}

grpc::ServerUnaryReactor* FakeWorker::GetStats(grpc::CallbackServerContext* context,
                                               const v1::GetWorkerStatsRequest*,
                                               v1::WorkerStats* response) {
  response->set_tenant(tenant_);
  response->set_model(model_);
  response->set_max_sequence_tokens(48);
  response->set_draining(draining_);
  const bool cancelled = ++polls_ % 2 == 0 && cancels_polls_;
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(cancelled ? grpc::Status::CANCELLED : grpc::Status::OK);
  return reactor;
}

namespace {

sockaddr_in Loopback(int port) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(port));
  return address;
}

}  // namespace

void CuttableProxy::Pump(int from, int to) {
  char buffer[16384];
  ssize_t count = 0;
  while ((count = recv(from, buffer, sizeof buffer, 0)) > 0) {
    if (frozen_) continue;
    for (ssize_t sent = 0; sent < count;) {
      const ssize_t n = send(to, buffer + sent, static_cast<size_t>(count - sent), MSG_NOSIGNAL);
      if (n <= 0) break;
      sent += n;
    }
  }
  shutdown(to, SHUT_RDWR);
}

CuttableProxy::CuttableProxy(int target_port) : target_port_(target_port) {
  listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = Loopback(0);
  socklen_t length = sizeof address;
  const bool listening = bind(listener_, reinterpret_cast<sockaddr*>(&address), length) == 0 &&
                         listen(listener_, 64) == 0;
  if (!listening) std::abort();
  getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &length);
  port_ = ntohs(address.sin_port);
  acceptor_ = std::thread([this] { AcceptLoop(); });
}

void CuttableProxy::AcceptLoop() {
  while (true) {
    const int client = accept(listener_, nullptr, nullptr);
    if (client < 0) return;
    const int server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const sockaddr_in target = Loopback(target_port_);
    const bool connected =
        connect(server, reinterpret_cast<const sockaddr*>(&target), sizeof target) == 0;
    MutexLock lock(&mutex_);
    sockets_.insert(sockets_.end(), {client, server});
    if (cut_ || !connected) {
      shutdown(client, SHUT_RDWR);
      shutdown(server, SHUT_RDWR);
    }
    pumps_.emplace_back(&CuttableProxy::Pump, this, client, server);
    pumps_.emplace_back(&CuttableProxy::Pump, this, server, client);
  }
}

void CuttableProxy::Cut() {
  MutexLock lock(&mutex_);
  cut_ = true;
  shutdown(listener_, SHUT_RDWR);
  for (const int socket : sockets_) shutdown(socket, SHUT_RDWR);
}

CuttableProxy::~CuttableProxy() {
  Cut();
  acceptor_.join();
  std::vector<std::thread> pumps;
  std::vector<int> sockets;
  {
    MutexLock lock(&mutex_);
    pumps.swap(pumps_);
    sockets.swap(sockets_);
  }
  for (std::thread& pump : pumps) pump.join();
  for (const int socket : sockets) close(socket);
  close(listener_);
}

}  // namespace palimpsest::router::testing
