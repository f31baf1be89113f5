#include "router/server/router_server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/file.h"
#include "common/grpc_time.h"
#include "common/log.h"

namespace palimpsest::router {
namespace {

constexpr absl::Duration kHousekeepingInterval = absl::Milliseconds(500);

std::map<std::string, AdmissionLimits> LimitsOf(const RouterConfig& config) {
  std::map<std::string, AdmissionLimits> limits;
  for (const TenantEntry& tenant : config.tenants) limits[tenant.name] = tenant.limits;
  return limits;
}

std::vector<WorkerEndpoint> EndpointsOf(const RouterConfig& config) {
  std::vector<WorkerEndpoint> endpoints;
  for (const TenantEntry& tenant : config.tenants) {
    for (const ModelEntry& model : tenant.models) {
      for (const std::string& address : model.workers) {
        endpoints.push_back({tenant.name, model.name, address});
      }
    }
  }
  return endpoints;
}

std::vector<CatalogEntry> CatalogOf(const RouterConfig& config) {
  std::vector<CatalogEntry> entries;
  for (const TenantEntry& tenant : config.tenants) {
    for (const ModelEntry& model : tenant.models) {
      entries.push_back({tenant.name, model.name, model.path});
    }
  }
  return entries;
}

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> Credentials(const RouterConfig& config) {
  if (config.tls_certificate.empty()) return grpc::InsecureServerCredentials();
  absl::StatusOr<std::string> certificate = ReadFile(config.tls_certificate, MiB(1));
  if (!certificate.ok()) return certificate.status();
  absl::StatusOr<std::string> key = ReadFile(config.tls_key, MiB(1));
  if (!key.ok()) return key.status();
  grpc::SslServerCredentialsOptions options;
  options.pem_key_cert_pairs.push_back({*key, *certificate});
  return grpc::SslServerCredentials(options);
}

}  // namespace

absl::StatusOr<std::unique_ptr<RouterServer>> RouterServer::Start(const RouterConfig& config,
                                                                  const Clock& clock) {
  absl::StatusOr<ModelCatalog> models = ModelCatalog::Load(CatalogOf(config));
  if (!models.ok()) return models.status();
  return Start(config, *std::move(models), clock);
}

absl::StatusOr<std::unique_ptr<RouterServer>> RouterServer::Start(const RouterConfig& config,
                                                                  ModelCatalog models,
                                                                  const Clock& clock) {
  std::unique_ptr<RouterServer> server(new RouterServer(config, std::move(models), clock));
  const absl::Status opened = server->Open(config);
  if (!opened.ok()) return opened;
  return server;
}

RouterServer::RouterServer(const RouterConfig& config, ModelCatalog models, const Clock& clock)
    : clock_(clock),
      stall_timeout_(config.stall_timeout),
      silence_timeout_(config.silence_timeout),
      limits_(LimitsOf(config)),
      models_(std::move(models)),
      metric_handles_(MetricProcess::kRouter) {}

absl::Status RouterServer::Open(const RouterConfig& config) {
  absl::StatusOr<std::unique_ptr<TokenFile>> tokens = TokenFile::Open(config.auth_file);
  if (!tokens.ok()) return tokens.status();
  tokens_ = *std::move(tokens);
  WorkerPoolOptions options{EndpointsOf(config), nullptr, config.health_interval,
                            config.health_timeout, config.resolve_interval};
  if (!config.worker_token_file.empty()) {
    absl::StatusOr<std::unique_ptr<SecretFile>> token = SecretFile::Open(config.worker_token_file);
    if (!token.ok()) return token.status();
    options.token = *std::move(token);
  }
  workers_ = std::make_unique<WorkerPool>(std::move(options), clock_);
  gate_ = std::make_unique<AdmissionGate>(config.request_limit, limits_, clock_);
  context_.reset(new RouterContext{clock_, metric_handles_, *tokens_, models_, limits_, *gate_,
                                   *workers_, RetryPolicy{config.worker_attempts}});
  service_ = std::make_unique<RouterService>(*context_);
  const absl::Status listening = Listen(config);
  if (!listening.ok()) return listening;
  workers_->Start();
  if (!config.metrics_listen.empty()) {
    ExportGauges();
    absl::StatusOr<std::unique_ptr<MetricsServer>> metrics =
        MetricsServer::Start(metric_handles_, config.metrics_listen);
    if (!metrics.ok()) return metrics.status();
    metrics_ = *std::move(metrics);
  }
  housekeeping_ = std::thread([this] { HousekeepingLoop(); });
  return absl::OkStatus();
}

absl::Status RouterServer::Listen(const RouterConfig& config) {
  absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> credentials = Credentials(config);
  if (!credentials.ok()) return credentials.status();
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  // Clients that vanished without a word are noticed within half a minute.
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 20'000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10'000);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 5'000);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddListeningPort(config.listen, *credentials, &port_);
  builder.RegisterService(service_.get());
  server_ = builder.BuildAndStart();
  if (server_ == nullptr || port_ == 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "cannot listen on '", config.listen, "': is the address right and the port free?"));
  }
  return absl::OkStatus();
}

void RouterServer::ExportGauges() {
  for (const auto& [tenant, limits] : limits_) {
    const AdmissionLoad load = gate_->Load(tenant);
    metric_handles_.Gauge<"palimpsest_router_requests_in_flight">(tenant).Set(load.in_flight);
    metric_handles_.Gauge<"palimpsest_router_queued_requests">(tenant).Set(load.waiting);
  }
  struct Count {
    int healthy = 0, draining = 0, unhealthy = 0;
  };
  std::map<std::string, Count> counts;
  for (const auto& [tenant, limits] : limits_) counts[tenant] = {};
  for (const WorkerView& worker : workers_->List()) {
    Count& count = counts[worker.endpoint.tenant];
    ++(worker.draining ? count.draining : worker.healthy ? count.healthy : count.unhealthy);
  }
  for (const auto& [tenant, count] : counts) {
    metric_handles_.Gauge<"palimpsest_router_workers">(tenant, "healthy").Set(count.healthy);
    metric_handles_.Gauge<"palimpsest_router_workers">(tenant, "draining").Set(count.draining);
    metric_handles_.Gauge<"palimpsest_router_workers">(tenant, "unhealthy").Set(count.unhealthy);
  }
}

void RouterServer::HousekeepingLoop() {
  while (true) {
    {
      MutexLock lock(&mutex_);
      if (!stopping_) changed_.WaitWithTimeout(&mutex_, kHousekeepingInterval);
      if (stopping_) return;
    }
    context_->calls.CancelStalled(clock_.Now(), stall_timeout_);
    context_->calls.LeaveSilentWorkers(clock_.Now(), silence_timeout_);
    ExportGauges();
  }
}

void RouterServer::Drain(absl::Duration patience) {
  if (server_ == nullptr) return;
  if (server_->GetHealthCheckService() != nullptr) {
    server_->GetHealthCheckService()->SetServingStatus(false);
  }
  server_->Shutdown(GrpcTimeout(patience));
  server_->Wait();
}

RouterServer::~RouterServer() {
  Drain(absl::ZeroDuration());
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    changed_.SignalAll();
  }
  if (housekeeping_.joinable()) housekeeping_.join();
  if (context_ != nullptr) context_->calls.AwaitEmpty();
  server_.reset();
}

}  // namespace palimpsest::router
