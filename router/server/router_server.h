// The router as one object: everything between its configuration and a listening socket.
//
// Legal order: Start, then Drain once; the destructor drains with no patience if nobody did. Drain
// blocks. Thread-safe but for destruction.
#ifndef PALIMPSEST_ROUTER_SERVER_ROUTER_SERVER_H_
#define PALIMPSEST_ROUTER_SERVER_ROUTER_SERVER_H_

#include <grpcpp/server.h>

#include <memory>
#include <string>
#include <thread>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/clock.h"
#include "common/metrics.h"
#include "router/server/router_config.h"
#include "router/server/router_service.h"

namespace palimpsest::router {

class RouterServer {
 public:
  // Reads token file and model folders, listens, and starts to check the workers. The second form
  // takes `models` in place of reading the folders.
  static absl::StatusOr<std::unique_ptr<RouterServer>> Start(const RouterConfig& config,
                                                             const Clock& clock);
  static absl::StatusOr<std::unique_ptr<RouterServer>> Start(const RouterConfig& config,
                                                             ModelCatalog models,
                                                             const Clock& clock);
  ~RouterServer();

  // The port that gRPC listens on, and the metrics' address ("" if there is none).
  int port() const { return port_; }
  std::string metrics_address() const { return metrics_ ? metrics_->address() : ""; }

  // Reports NOT_SERVING, takes no new requests, lets the running ones finish for up to `patience`,
  // then cancels them.
  void Drain(absl::Duration patience);

 private:
  RouterServer(const RouterConfig& config, ModelCatalog models, const Clock& clock);

  absl::Status Open(const RouterConfig& config);
  absl::Status Listen(const RouterConfig& config);
  void HousekeepingLoop();
  void ExportGauges();

  const Clock& clock_;
  const absl::Duration stall_timeout_;
  const absl::Duration silence_timeout_;
  const std::map<std::string, AdmissionLimits> limits_;
  const ModelCatalog models_;
  Metrics metric_handles_;
  std::unique_ptr<TokenFile> tokens_;
  std::unique_ptr<WorkerPool> workers_;
  std::unique_ptr<AdmissionGate> gate_;
  std::unique_ptr<RouterContext> context_;
  std::unique_ptr<RouterService> service_;
  std::unique_ptr<MetricsServer> metrics_;
  std::unique_ptr<grpc::Server> server_;
  int port_ = 0;

  Mutex mutex_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread housekeeping_;
};

}  // namespace palimpsest::router

#endif  // PALIMPSEST_ROUTER_SERVER_ROUTER_SERVER_H_
