#include "worker/server/worker_config.h"

#include "absl/strings/str_cat.h"
#include "common/gpu_list.h"
#include "common/log_config.h"
#include "worker/core/head_mass.h"

namespace palimpsest {
namespace {

void ReadHeads(ConfigReader reader, WorkerConfig& config) {
  WorkerConfig::Heads& heads = config.heads;
  heads.sample_every = static_cast<int32_t>(reader.Int("sample_every", 0, 1 << 20, 0));
  heads.recent_tokens = static_cast<int32_t>(reader.Int("recent_tokens", 1, 1 << 20, 256));
  heads.measured_file = reader.String("measured_file", "");
  heads.profile = reader.String("profile", "");
  heads.lossy = reader.Bool("lossy", false);
  heads.keep = reader.Double("keep", 0, 1, 1);
  heads.groups = static_cast<int32_t>(reader.Int("groups", 1, kMostHeadGroups, 1));
  heads.tier_1_bytes = reader.Size("tier_1_bytes", Bytes(0), GiB(1 << 20), Bytes(0));
  if (heads.groups > 1 && heads.profile.empty()) {
    reader.Error("groups", "needs a profile of the heads (palctl bench heads --profile FILE)");
  }
  if (heads.groups > 1 && config.device == WorkerConfig::Device::kCuda) {
    reader.Error("groups", "is of the host back-end alone");
  }
  if (heads.tier_1_bytes > Bytes(0) && heads.groups == 1) {
    reader.Error("tier_1_bytes", "needs groups above 1: what leaves tier 1 is parts of blocks");
  }
  if (!heads.measured_file.empty() && heads.sample_every == 0) {
    reader.Error("measured_file", "needs sample_every above 0: nothing is measured otherwise");
  }
  if (heads.keep < 1 && !heads.lossy) {
    reader.Error("keep", "needs lossy: true, since dropping heads changes what the model says");
  }
  if (heads.lossy && heads.profile.empty()) {
    reader.Error("lossy", "needs a profile of the heads (palctl bench heads --profile FILE)");
  }
  if (heads.lossy && config.device == WorkerConfig::Device::kCuda) {
    reader.Error("lossy", "is of the CPU's runner alone");
  }
}

void ReadEngine(ConfigReader engine, WorkerConfig& config) {
  const auto integer = [&engine](absl::string_view key, int64_t min, int64_t max,
                                 int64_t fallback) {
    return static_cast<int32_t>(engine.Int(key, min, max, fallback));
  };
  using Device = WorkerConfig::Device;
  config.device = engine.Choice<Device>("device", {{"cpu", Device::kCpu}, {"cuda", Device::kCuda}},
                                        Device::kCpu);
  const bool cuda = config.device == Device::kCuda;
  config.gpus = ReadGpus(engine, cuda);
  config.gemm_cache_file = engine.String("gemm_cache_file", "gemm-algorithms");
  config.threads = integer("threads", 0, 1024, 0);
  config.restore_threads = integer("restore_threads", 1, 256, 2);
  config.verify_parameters = engine.Bool("verify_parameters", true);
  config.max_batch_sequences = integer("max_batch_sequences", 1, 4096, cuda ? 256 : 32);
  config.max_step_tokens = integer("max_step_tokens", 1, 1 << 20, cuda ? 8192 : 256);
  config.queue_capacity = integer("queue_capacity", 1, 1 << 16, 256);
  config.kv_low_water_slabs = integer("kv_low_water_slabs", 0, 1 << 20, 4);
  config.kv_high_water_slabs = integer("kv_high_water_slabs", 0, 1 << 20, 16);
  config.kv_shrink_delay =
      engine.Duration("kv_shrink_delay", absl::ZeroDuration(), absl::Hours(24), absl::Seconds(10));
  config.swap_space = engine.Size("swap_space", Bytes(0), GiB(1024), GiB(4));
  config.block_store = engine.Bool("block_store", true);
  config.block_salt_file = engine.String("block_salt_file", "");
  ReadHeads(engine.Map("heads"), config);
  config.stream_tokens = integer("stream_tokens", 1, 1 << 20, 4096);
  config.stall_timeout =
      engine.Duration("stall_timeout", absl::Milliseconds(100), absl::Hours(1), absl::Seconds(60));
  if (config.max_step_tokens < config.max_batch_sequences) {
    engine.Error("max_step_tokens",
                 absl::StrCat("expected at least max_batch_sequences (", config.max_batch_sequences,
                              "): every running sequence decodes one token in every step"));
  }
  if (config.kv_high_water_slabs < config.kv_low_water_slabs) {
    engine.Error("kv_high_water_slabs", absl::StrCat("expected at least kv_low_water_slabs (",
                                                     config.kv_low_water_slabs, ")"));
  }
}

}  // namespace

absl::StatusOr<WorkerConfig> ReadWorkerConfig(YamlConfig& yaml) {
  ConfigReader root = yaml.root();
  WorkerConfig config;
  config.tenant = root.String("tenant");
  config.secret_file = root.String("secret_file", "");
  ConfigReader model = root.Map("model");
  config.model_name = model.String("name");
  config.model_path = model.String("path");
  config.max_sequence_tokens =
      static_cast<int32_t>(model.Int("max_sequence_tokens", 0, 1 << 24, 0));
  ConfigReader broker = root.Map("broker");
  config.control_socket = broker.String("control_socket");
  config.descriptor_socket = broker.String("descriptor_socket");
  config.listen = root.String("listen");
  config.router_token_file = root.String("router_token_file");
  config.metrics_listen = root.String("metrics_listen", "127.0.0.1:0");
  config.supervise = root.Bool("supervise", false);
  config.drain_timeout =
      root.Duration("drain_timeout", absl::ZeroDuration(), absl::Hours(24), absl::Seconds(30));
  config.log_level = ReadLogLevel(root);
  ReadEngine(root.Map("engine"), config);
  if (absl::Status status = yaml.Finish(); !status.ok()) return status;
  return config;
}

}  // namespace palimpsest
