#include "worker/server/worker_server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>

#include "absl/strings/str_cat.h"
#include "common/grpc_time.h"

namespace palimpsest {
namespace {

constexpr char kServiceName[] = "palimpsest.v1.Worker";
// Threads that gRPC may start for calls that block one (Drain, GetStats).
constexpr int kMaxThreads = 64;

void EnablePlugins() {
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
}

}  // namespace

WorkerServer::~WorkerServer() { Shutdown(absl::ZeroDuration()); }

absl::Status WorkerServer::Start(const std::string& address, grpc::Service* service) {
  // Before the builder is made.
  EnablePlugins();
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddListeningPort(address, grpc::InsecureServerCredentials(), &port);
  if (absl::Status status = Build(builder, service); !status.ok() || port == 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("cannot listen on ", address, ": expected HOST:PORT of a free port"));
  }
  address_ = absl::StrCat(address.substr(0, address.rfind(':')), ":", port);
  return absl::OkStatus();
}

absl::Status WorkerServer::StartOn(int listen_socket, const std::string& address,
                                   grpc::Service* service) {
  EnablePlugins();
  grpc::ServerBuilder builder;
  taker_ = std::make_unique<ConnectionTaker>(listen_socket, builder);
  if (absl::Status status = Build(builder, service); !status.ok()) return status;
  address_ = address;
  return taker_->Start();
}

absl::Status WorkerServer::Build(grpc::ServerBuilder& builder, grpc::Service* service) {
  grpc::ResourceQuota quota("worker");
  quota.SetMaxThreads(kMaxThreads);
  builder.SetResourceQuota(quota);
  builder.RegisterService(service);
  server_ = builder.BuildAndStart();
  if (server_ == nullptr) return absl::InternalError("gRPC started no server");
  MutexLock lock(&mutex_);
  health_ = server_->GetHealthCheckService();
  ShowHealth();
  return absl::OkStatus();
}

void WorkerServer::StopListening() {
  if (taker_ != nullptr) taker_->Stop();
}

void WorkerServer::SetConnected(bool connected) {
  MutexLock lock(&mutex_);
  connected_ = connected;
  ShowHealth();
}

void WorkerServer::SetDraining() {
  MutexLock lock(&mutex_);
  draining_ = true;
  ShowHealth();
}

void WorkerServer::ShowHealth() {
  if (health_ == nullptr) return;
  const bool serving = connected_ && !draining_;
  health_->SetServingStatus(serving);
  health_->SetServingStatus(kServiceName, serving);
}

void WorkerServer::Shutdown(absl::Duration patience) {
  {
    MutexLock lock(&mutex_);
    health_ = nullptr;
  }
  if (server_ == nullptr) return;
  StopListening();
  server_->Shutdown(GrpcTimeout(patience));
  server_->Wait();
}

}  // namespace palimpsest
