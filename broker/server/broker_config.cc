#include "broker/server/broker_config.h"

#include <algorithm>
#include <limits>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/descriptor_protocol.h"
#include "common/gpu_list.h"
#include "common/log_config.h"

namespace palimpsest {
namespace {

constexpr size_t kMaxTenants = 64;
constexpr int64_t kMaxPoolSlabs = 1 << 20;
constexpr int64_t kMaxPeerSlabs = 1 << 16;
constexpr int kMaxGpu = 63;
// A worker's context was measured at 520 to 545 MiB with its kernels and graphs, and with what NCCL
// and the inboxes of its GPUs take on each of two GPUs at 1,410 MiB.
constexpr Bytes kContextAllowance = MiB(640);
constexpr Bytes kSharedContextAllowance = MiB(1536);

// Of a tenant that does not say.
Bytes ContextAllowance(const BrokerConfig& config) {
  if (config.backend != BrokerConfig::Backend::kCuda) return Bytes(0);
  return config.gpus.size() > 1 ? kSharedContextAllowance : kContextAllowance;
}

BrokerTenant ReadTenant(ConfigReader& reader, const BrokerConfig& config) {
  const Bytes pool_bytes = config.pool_bytes;
  BrokerTenant tenant;
  tenant.name = reader.String("name");
  if (tenant.name.empty() || tenant.name.size() > kMaxTenantBytes) {
    reader.Error("name", absl::StrCat("expected 1 to ", kMaxTenantBytes, " bytes"));
  }
  if (reader.Has("uid")) {
    tenant.uid = static_cast<uid_t>(reader.Int("uid", 0, std::numeric_limits<uint32_t>::max() - 1));
  }
  tenant.secret_file = reader.String("secret_file", "");
  if (!tenant.uid.has_value() && tenant.secret_file.empty()) {
    reader.Error("name", "a tenant needs a uid, a secret_file or both");
  }
  tenant.socket_dir = reader.String("socket_dir", "");
  ConfigReader model = reader.Map("model");
  tenant.model.folder = model.String("path");
  tenant.model.max_sequence_tokens = model.Int("max_sequence_tokens", 1, 1 << 24);
  const bool dummy =
      model.Choice<bool>("load_format", {{"safetensors", false}, {"dummy", true}}, false);
  if (dummy) {
    tenant.model.dummy_seed =
        static_cast<uint64_t>(model.Int("dummy_seed", 0, std::numeric_limits<int64_t>::max(), 0));
  } else if (model.Has("dummy_seed")) {
    model.Error("dummy_seed", "expected only with load_format: dummy");
  }
  tenant.model.kv_dtype = model.Choice<KvDtype>(
      "kv_dtype", {{"bf16", KvDtype::kBf16}, {"fp8_e4m3", KvDtype::kFp8E4m3}}, KvDtype::kBf16);
  tenant.model.kv_block_tokens = reader.Int("kv_block_tokens", 1, 4096, 16);
  tenant.workspace = reader.Size("workspace", Bytes(0), pool_bytes, Bytes(0));
  tenant.context = reader.Size("context", Bytes(0), pool_bytes, ContextAllowance(config));
  if (config.backend != BrokerConfig::Backend::kCuda && tenant.context > Bytes(0)) {
    reader.Error("context", "only with backend: cuda");
  }
  tenant.peer_image = reader.Choice<bool>("image", {{"host", false}, {"peer_gpu", true}}, false);
  if (tenant.peer_image && !config.peer.has_value()) {
    reader.Error("image", "peer_gpu needs pool.peer: the GPU and how much of its memory");
  }
  tenant.priority = static_cast<int32_t>(reader.Int("priority", -1000, 1000, 0));
  tenant.pin = reader.Bool("pin", false);
  tenant.hibernate_after = reader.Duration("hibernate_after", absl::ZeroDuration(),
                                           absl::Hours(24 * 365), absl::ZeroDuration());
  if (reader.Has("floor")) tenant.floor = reader.Size("floor", Bytes(0), pool_bytes);
  tenant.quota = reader.Size("quota", Bytes(1), pool_bytes, pool_bytes);
  tenant.blocks = ReadBudgets(reader, config.tiers);
  return tenant;
}

MemoryPolicy ReadMemoryPolicy(ConfigReader& policy) {
  return policy.Choice<MemoryPolicy>("memory_policy",
                                     {{"remap", MemoryPolicy::kRemap},
                                      {"static", MemoryPolicy::kStatic},
                                      {"recompute", MemoryPolicy::kRecompute},
                                      {"swap", MemoryPolicy::kSwap}},
                                     MemoryPolicy::kRemap);
}

ArbiterOptions ReadPolicy(ConfigReader& policy) {
  const absl::Duration day = absl::Hours(24);
  const absl::Duration tick = absl::Milliseconds(10);
  ArbiterOptions out;
  const auto duration = [&policy, tick, day](absl::string_view key, absl::Duration fallback) {
    return policy.Duration(key, tick, day, fallback);
  };
  out.revoke_deadline = duration("revoke_deadline", out.revoke_deadline);
  out.grant_deadline = duration("grant_deadline", out.grant_deadline);
  out.activation_deadline = duration("activation_deadline", out.activation_deadline);
  out.max_waiting_activations = static_cast<uint32_t>(
      policy.Int("max_waiting_activations", 1, 4096, out.max_waiting_activations));
  out.reattach_grace = duration("reattach_grace", out.reattach_grace);
  out.kill_patience = duration("kill_patience", out.kill_patience);
  out.min_residence = duration("min_residence", out.min_residence);
  out.residence_restores = policy.Double("residence_restores", 0.0, 1000.0, out.residence_restores);
  out.prefetch_grace = duration("prefetch_grace", out.prefetch_grace);
  out.report_patience = duration("report_patience", out.report_patience);
  out.sharing = policy.Choice<Sharing>(
      "sharing", {{"spatial", Sharing::kSpatial}, {"temporal", Sharing::kTemporal}}, out.sharing);
  out.quantum = duration("quantum", out.quantum);
  out.turn_deadline = duration("turn_deadline", out.turn_deadline);
  out.kv_step_slabs =
      static_cast<uint32_t>(policy.Int("kv_step_slabs", 1, kMaxPoolSlabs, out.kv_step_slabs));
  out.reversion_delay = duration("reversion_delay", out.reversion_delay);
  out.reversion_hysteresis = policy.Double("hysteresis", 0.0, 10.0, out.reversion_hysteresis);
  out.victims = policy.Choice<VictimPolicy>("victims",
                                            {{"expected", VictimPolicy::kExpected},
                                             {"mru", VictimPolicy::kMru},
                                             {"lru", VictimPolicy::kLru}},
                                            out.victims);
  ConfigReader rotation = policy.Map("rotation");
  out.rotation.enabled = rotation.Bool("enabled", out.rotation.enabled);
  out.rotation.slots = rotation.Choice<SlotPreference>(
      "slots",
      {{"auto", SlotPreference::kAuto}, {"1", SlotPreference::kOne}, {"2", SlotPreference::kTwo}},
      out.rotation.slots);
  out.rotation.cap = rotation.Double("cap", 0.0, 1.0, out.rotation.cap);
  out.rotation.reversion = rotation.Bool("reversion", out.rotation.reversion);
  return out;
}

void ReadPeer(ConfigReader& pool, BrokerConfig& config) {
  ConfigReader reader = pool.Map("peer");
  PeerPool& peer = config.peer.emplace();
  peer.gpu = static_cast<int>(reader.Int("gpu", 0, kMaxGpu));
  peer.bytes = reader.Size("bytes", config.slab_bytes, config.slab_bytes * kMaxPeerSlabs);
  if (config.backend != BrokerConfig::Backend::kCuda) {
    reader.Error("gpu", "only with backend: cuda");
  } else if (std::find(config.gpus.begin(), config.gpus.end(), peer.gpu) != config.gpus.end()) {
    reader.Error("gpu", "expected a GPU that is not in pool.gpus");
  }
}

void ReadPool(ConfigReader pool, BrokerConfig& config) {
  using Backend = BrokerConfig::Backend;
  config.backend = pool.Choice<Backend>(
      "backend", {{"host", Backend::kHost}, {"cuda", Backend::kCuda}}, Backend::kHost);
  const bool cuda = config.backend == Backend::kCuda;
  config.gpus = ReadGpus(pool, cuda);
  config.trusted_workers = pool.Bool("trusted_workers", cuda);
  if (config.trusted_workers && !cuda) {
    pool.Error("trusted_workers", "slabs of host memory are always replaced: expected false");
  }
  config.slab_bytes = pool.Size("slab_bytes", MiB(2), GiB(1), cuda ? MiB(32) : MiB(2));
  if (config.slab_bytes.count() % MiB(2).count() != 0) {
    pool.Error("slab_bytes", "expected a multiple of 2 MiB");
  }
  config.pool_bytes = pool.Size("bytes", config.slab_bytes, config.slab_bytes * kMaxPoolSlabs);
  if (config.pool_bytes.count() % config.slab_bytes.count() != 0) {
    pool.Error("bytes", absl::StrCat("expected a multiple of pool.slab_bytes (",
                                     config.slab_bytes.ToString(), ")"));
  }
  if (pool.Has("peer")) ReadPeer(pool, config);
}

// What the contexts leave.
void SizePool(BrokerConfig& config, ConfigReader& root) {
  Bytes contexts;
  for (const BrokerTenant& tenant : config.tenants) contexts += tenant.context;
  if (contexts + config.slab_bytes > config.pool_bytes) {
    root.Error("pool", absl::StrCat("the tenants' contexts take ", contexts.ToString(),
                                    " of the pool's ", config.pool_bytes.ToString(),
                                    " and leave no slab: raise pool.bytes, or lower `context` of "
                                    "the tenants"));
    return;
  }
  config.policy.pool_slabs =
      static_cast<uint32_t>((config.pool_bytes - contexts) / config.slab_bytes);
}

void ShareOut(BrokerConfig& config, ConfigReader& root) {
  std::vector<SaidBudgets> said;
  for (const BrokerTenant& tenant : config.tenants) said.push_back(tenant.blocks);
  auto budgets = ShareBudgets(*config.tiers, said);
  if (budgets.ok()) {
    config.block_budgets = *std::move(budgets);
  } else {
    root.Error("tiers", budgets.status().message());
  }
}

void CheckSockets(const BrokerConfig& config, ConfigReader& root) {
  if (config.control_socket.empty() != config.descriptor_socket.empty()) {
    root.Error("control_socket", "control_socket and descriptor_socket are set together or not");
  }
  for (const BrokerTenant& tenant : config.tenants) {
    if (config.control_socket.empty() && tenant.socket_dir.empty()) {
      root.Error("tenants",
                 absl::StrCat("tenant ", tenant.name,
                              " has no socket: set control_socket and descriptor_socket, "
                              "or its socket_dir"));
    }
  }
}

}  // namespace

absl::StatusOr<BrokerConfig> ReadBrokerConfig(YamlConfig& yaml, const std::string& default_packer) {
  ConfigReader root = yaml.root();
  BrokerConfig config;
  config.node = root.String("node");
  config.state_dir = root.String("state_dir");
  config.control_socket = root.String("control_socket", "");
  config.descriptor_socket = root.String("descriptor_socket", "");
  config.metrics_listen = root.String("metrics_listen", "");
  config.packer = root.String("packer", default_packer);
  config.pack_at_start = root.Bool("pack_at_start", true);
  config.pack_deadline =
      root.Duration("pack_deadline", absl::Seconds(1), absl::Hours(24), absl::Minutes(30));
  config.token_lifetime =
      root.Duration("token_lifetime", absl::Milliseconds(100), absl::Hours(1), absl::Seconds(30));
  config.log_level = ReadLogLevel(root);

  ReadPool(root.Map("pool"), config);
  ConfigReader policy = root.Map("policy");
  config.memory_policy = ReadMemoryPolicy(policy);
  config.policy = ReadPolicy(policy);
  config.policy.slab_bytes = config.slab_bytes;

  if (root.Has("tiers")) config.tiers = ReadTiers(root.Map("tiers"), config.node);
  std::vector<ConfigReader> tenants = root.Maps("tenants", kMaxTenants);
  if (tenants.empty()) root.Error("tenants", "expected at least one tenant");
  std::set<std::string> names;
  for (ConfigReader& reader : tenants) {
    config.tenants.push_back(ReadTenant(reader, config));
    if (!names.insert(config.tenants.back().name).second) {
      reader.Error("name", absl::StrCat("a second tenant ", config.tenants.back().name));
    }
  }
  CheckSockets(config, root);
  SizePool(config, root);
  if (config.tiers.has_value()) ShareOut(config, root);
  if (absl::Status status = yaml.Finish(); !status.ok()) return status;
  return config;
}

}  // namespace palimpsest
