// The settings of a worker process, from its YAML file. Paths are relative to the directory in
// which the process runs.
#ifndef PALIMPSEST_WORKER_SERVER_WORKER_CONFIG_H_
#define PALIMPSEST_WORKER_SERVER_WORKER_CONFIG_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/bytes.h"
#include "common/log.h"
#include "common/yaml_config.h"

namespace palimpsest {

struct WorkerConfig {
  // The tenant that this worker serves, and the secret by which the broker knows it (may be empty
  // if the broker knows the tenant's uid).
  std::string tenant;
  std::string secret_file;

  // Name under which the model is served, its Hugging Face folder, and the longest sequence in
  // tokens (0: as long as the broker's image allows).
  std::string model_name;
  std::string model_path;
  int32_t max_sequence_tokens = 0;

  std::string control_socket;
  std::string descriptor_socket;

  // gRPC address; port 0 takes a free one.
  std::string listen;
  // The bearer token that the router presents.
  std::string router_token_file;
  std::string metrics_listen;
  // Whether a parent process owns the address, runs the worker as its child, starts it again when
  // it fails, and lets it hibernate when the broker says so (supervisor.h).
  bool supervise = false;
  // How long running requests may go on after SIGTERM.
  absl::Duration drain_timeout;
  LogLevel log_level = LogLevel::kInfo;

  // Where the model is computed, which is where the broker's slabs are; and on which GPUs: those of
  // the broker's pool in the same order, as this process counts them.
  enum class Device { kCpu, kCuda };
  Device device = Device::kCpu;
  std::vector<int> gpus = {0};
  // GPU only: file in which the chosen algorithms of matrix products are kept.
  std::string gemm_cache_file;
  // Compute threads; 0: one per CPU.
  int32_t threads = 0;
  // Threads that copy parameters back, and whether the copies are compared with the checksums.
  int32_t restore_threads = 2;
  bool verify_parameters = true;
  // A GPU takes larger steps by default.
  int32_t max_batch_sequences = 0;
  int32_t max_step_tokens = 0;
  int32_t queue_capacity = 0;
  // Marks between which the reserve of KV slabs is left alone, and how long demand must have been
  // lower before it shrinks.
  int32_t kv_low_water_slabs = 0;
  int32_t kv_high_water_slabs = 0;
  absl::Duration kv_shrink_delay;
  // Host memory for the KV of preempted sequences, on a GPU pinned; taken where the broker's
  // memory_policy is swap. Sequences that it has no room for are computed again.
  Bytes swap_space;
  // Whether KV blocks go to the broker's tiers, if it has any; and a secret that the names of
  // blocks begin with, the same on all nodes (empty: none).
  bool block_store = true;
  std::string block_salt_file;
  // KV heads (docs/policies.md). A step in so many is sampled, 0: none; what was seen goes to the
  // measured file when the worker ends, if one is named. Lossy: the far keys of all heads but the
  // share `keep` of them, those of greatest effect by the profile, are dropped; it changes the
  // output.
  struct Heads {
    int32_t sample_every = 0;
    int32_t recent_tokens = 0;
    std::string measured_file;
    std::string profile;
    bool lossy = false;
    double keep = 1;
    // Blocks go to the tiers in so many parts by groups of heads of like mass (by the profile).
    // When a request ends and this worker's parts take more of tier 1 than these bytes (0: no
    // limit), those that are worth least go below. Lossless.
    int32_t groups = 1;
    Bytes tier_1_bytes;
  };
  Heads heads;
  // Tokens that a client may be behind before it loses its request.
  int32_t stream_tokens = 0;
  // How long requests wait without any step succeeding.
  absl::Duration stall_timeout;
};

// InvalidArgument lists every error with its line.
absl::StatusOr<WorkerConfig> ReadWorkerConfig(YamlConfig& yaml);

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_SERVER_WORKER_CONFIG_H_
