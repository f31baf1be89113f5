// The router's YAML configuration.
#ifndef PALIMPSEST_ROUTER_SERVER_ROUTER_CONFIG_H_
#define PALIMPSEST_ROUTER_SERVER_ROUTER_CONFIG_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/log.h"
#include "common/yaml_config.h"
#include "router/core/admission.h"

namespace palimpsest::router {

struct ModelEntry {
  std::string name;
  std::string path;                  // Hugging Face folder: tokenizer, chat template, config
  std::vector<std::string> workers;  // gRPC addresses
};

struct TenantEntry {
  std::string name;
  AdmissionLimits limits;
  std::vector<ModelEntry> models;
};

struct RouterConfig {
  std::string listen;
  std::string metrics_listen;  // empty: no metrics endpoint
  std::string auth_file;
  std::string worker_token_file;  // empty: workers get no token
  std::string tls_certificate;    // empty, as is tls_key: no TLS
  std::string tls_key;
  int32_t request_limit = 0;  // in flight, all tenants together
  int32_t worker_attempts = 0;
  absl::Duration stall_timeout;
  absl::Duration drain_timeout;
  absl::Duration health_interval;
  absl::Duration health_timeout;
  // A worker that has answered neither a request nor a health check for so long loses its streams
  // to others.
  absl::Duration silence_timeout;
  // How often workers' names are resolved again.
  absl::Duration resolve_interval;
  LogLevel log_level = LogLevel::kInfo;
  std::vector<TenantEntry> tenants;
};

// Reads every setting; errors are reported with their lines.
absl::StatusOr<RouterConfig> ReadRouterConfig(YamlConfig& yaml);

}  // namespace palimpsest::router

#endif  // PALIMPSEST_ROUTER_SERVER_ROUTER_CONFIG_H_
