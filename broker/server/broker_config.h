// The broker's configuration file.
#ifndef PALIMPSEST_BROKER_SERVER_BROKER_CONFIG_H_
#define PALIMPSEST_BROKER_SERVER_BROKER_CONFIG_H_

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "broker/blocks/tiers_config.h"
#include "broker/core/arbiter.h"
#include "broker/core/pool_config.h"
#include "broker/server/image_manager.h"
#include "common/bytes.h"
#include "common/log.h"
#include "common/yaml_config.h"

namespace palimpsest {

struct BrokerTenant {
  std::string name;
  // How the tenant's worker proves to be the tenant's: its uid, a shared secret, or both.
  std::optional<uid_t> uid;
  std::string secret_file;
  // A folder with sockets (broker.sock, descriptors.sock) for this tenant alone; may be empty.
  std::string socket_dir;
  TenantModel model;
  // Activations, logits and kernel workspaces of its worker.
  Bytes workspace;
  // With backend cuda: what its worker takes of a GPU beside slabs (CUDA's context, loaded kernels,
  // graphs, communicators). Kept of the pool's bytes and of the tenant's quota, so that all of it
  // is inside the pool's cap.
  Bytes context;
  // Whether its worker keeps a copy of the parameter image in BrokerConfig::peer.
  bool peer_image = false;
  int32_t priority = 0;
  bool pin = false;
  // Time without requests after which its worker's process ends; zero: never.
  absl::Duration hibernate_after;
  // Nothing: what WithDefaultFloors gives it, or its policy.
  std::optional<Bytes> floor;
  Bytes quota;
  SaidBudgets blocks;
};

// Memory of a GPU that is not the pool's.
struct PeerPool {
  int gpu = 0;
  Bytes bytes;
};

struct BrokerConfig {
  std::string node;
  std::string state_dir;
  // Sockets for every tenant; both may be empty if each tenant has a socket_dir.
  std::string control_socket;
  std::string descriptor_socket;
  // "" serves no metrics.
  std::string metrics_listen;
  // Path of the packer's executable.
  std::string packer;
  bool pack_at_start = true;
  absl::Duration pack_deadline;
  enum class Backend { kHost, kCuda };
  Backend backend = Backend::kHost;
  // With backend cuda: where copies of parameter images may be.
  std::optional<PeerPool> peer;
  // With backend cuda: the GPUs on each of which a slab has a piece, in the order of their ranks.
  std::vector<int> gpus = {0};
  // Slabs are scrubbed, not replaced, when they come back; with backend cuda alone.
  bool trusted_workers = false;
  // On each GPU; slabs and contexts together.
  Bytes pool_bytes;
  Bytes slab_bytes;
  std::vector<BrokerTenant> tenants;
  // Nothing: blocks are kept in T0 alone.
  std::optional<TiersConfig> tiers;
  // By tenant; ShareBudgets.
  std::vector<std::vector<Bytes>> block_budgets;
  MemoryPolicy memory_policy = MemoryPolicy::kRemap;
  // pool_slabs is set, generation is not.
  ArbiterOptions policy;
  absl::Duration token_lifetime;
  LogLevel log_level = LogLevel::kInfo;
};

// Reads all settings. InvalidArgument with one line for each error, file and line first.
// `default_packer` stands where the file names none.
absl::StatusOr<BrokerConfig> ReadBrokerConfig(YamlConfig& yaml, const std::string& default_packer);

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_SERVER_BROKER_CONFIG_H_
