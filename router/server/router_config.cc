#include "router/server/router_config.h"

#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/log_config.h"

namespace palimpsest::router {
namespace {

constexpr size_t kMaxTenants = 1024;
constexpr size_t kMaxModels = 64;
constexpr size_t kMaxWorkers = 256;

// A name is unique in its list; the tenants' names are labels of metrics.
std::string UniqueName(ConfigReader& reader, std::set<std::string>& names) {
  std::string name = reader.String("name");
  if (name.empty() || name.size() > 128) reader.Error("name", "expected 1 to 128 characters");
  if (!names.insert(name).second) reader.Error("name", absl::StrCat("'", name, "' stands twice"));
  return name;
}

ModelEntry ReadModel(ConfigReader& reader, std::set<std::string>& names) {
  ModelEntry model;
  model.name = UniqueName(reader, names);
  model.path = reader.String("path");
  model.workers = reader.Strings("workers", kMaxWorkers);
  if (model.workers.empty()) reader.Error("workers", "expected at least one address");
  return model;
}

TenantEntry ReadTenant(ConfigReader& reader, std::set<std::string>& names) {
  TenantEntry tenant;
  tenant.name = UniqueName(reader, names);
  tenant.limits.in_flight = static_cast<int32_t>(reader.Int("request_limit", 1, 100'000, 256));
  tenant.limits.queue = static_cast<int32_t>(reader.Int("queue_limit", 0, 100'000, 1024));
  tenant.limits.queue_timeout =
      reader.Duration("queue_timeout", absl::Milliseconds(1), absl::Hours(1), absl::Seconds(30));
  std::set<std::string> models;
  for (ConfigReader& model : reader.Maps("models", kMaxModels)) {
    tenant.models.push_back(ReadModel(model, models));
  }
  if (tenant.models.empty()) reader.Error("models", "expected at least one model");
  return tenant;
}

}  // namespace

absl::StatusOr<RouterConfig> ReadRouterConfig(YamlConfig& yaml) {
  ConfigReader root = yaml.root();
  RouterConfig config;
  config.listen = root.String("listen", "127.0.0.1:9100");
  config.metrics_listen = root.String("metrics_listen", "");
  config.auth_file = root.String("auth_file");
  config.worker_token_file = root.String("worker_token_file", "");
  config.request_limit = static_cast<int32_t>(root.Int("request_limit", 1, 1'000'000, 4096));
  config.worker_attempts = static_cast<int32_t>(root.Int("worker_attempts", 1, 16, 3));
  config.stall_timeout =
      root.Duration("stall_timeout", absl::Milliseconds(100), absl::Hours(1), absl::Seconds(60));
  config.drain_timeout =
      root.Duration("drain_timeout", absl::ZeroDuration(), absl::Hours(1), absl::Seconds(20));
  config.log_level = ReadLogLevel(root);
  ConfigReader health = root.Map("health");
  config.health_interval =
      health.Duration("interval", absl::Milliseconds(10), absl::Minutes(10), absl::Seconds(1));
  config.health_timeout =
      health.Duration("timeout", absl::Milliseconds(10), absl::Minutes(10), absl::Seconds(5));
  config.silence_timeout =
      health.Duration("silence_timeout", absl::Milliseconds(10), absl::Hours(1), absl::Seconds(15));
  config.resolve_interval =
      root.Duration("resolve_interval", absl::Milliseconds(100), absl::Hours(1), absl::Seconds(5));
  if (root.Has("tls")) {
    ConfigReader tls = root.Map("tls");
    config.tls_certificate = tls.String("cert");
    config.tls_key = tls.String("key");
  }
  std::set<std::string> names;
  for (ConfigReader& tenant : root.Maps("tenants", kMaxTenants)) {
    config.tenants.push_back(ReadTenant(tenant, names));
  }
  if (config.tenants.empty()) root.Error("tenants", "expected at least one tenant");
  const absl::Status status = yaml.Finish();
  if (!status.ok()) return status;
  return config;
}

}  // namespace palimpsest::router
