#include "worker/server/worker_config.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

using ::testing::HasSubstr;

constexpr char kMinimal[] = R"(
tenant: alpha
model: {name: tiny, path: /models/tiny}
broker: {control_socket: b.sock, descriptor_socket: d.sock}
listen: 127.0.0.1:0
router_token_file: secrets/router
)";

absl::StatusOr<WorkerConfig> Read(const std::string& text) {
  auto yaml = YamlConfig::Parse(text, "worker.yaml");
  if (!yaml.ok()) return yaml.status();
  return ReadWorkerConfig(*yaml);
}

TEST(WorkerConfig, DefaultsFillAMinimalFile) {
  const auto config = Read(kMinimal);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->tenant, "alpha");
  EXPECT_EQ(config->secret_file, "");
  EXPECT_EQ(config->model_name, "tiny");
  EXPECT_EQ(config->max_sequence_tokens, 0);
  EXPECT_EQ(config->max_batch_sequences, 32);
  EXPECT_GE(config->max_step_tokens, config->max_batch_sequences);
  EXPECT_EQ(config->swap_space, GiB(4));
  EXPECT_TRUE(config->block_store);
  EXPECT_EQ(config->block_salt_file, "");
  EXPECT_FALSE(config->supervise);
  EXPECT_TRUE(Read(std::string(kMinimal) + "supervise: true\n")->supervise);
  EXPECT_EQ(config->log_level, LogLevel::kInfo);
}

TEST(WorkerConfig, PrintedConfigurationReadsBack) {
  auto yaml = YamlConfig::Parse(kMinimal, "worker.yaml");
  ASSERT_TRUE(yaml.ok());
  ASSERT_TRUE(ReadWorkerConfig(*yaml).ok());
  const auto again = Read(yaml->EffectiveYaml());
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->stall_timeout, absl::Seconds(60));
}

TEST(WorkerConfig, HeadsAreLeftAloneUnlessAskedAndLossySaysSo) {
  const auto config = Read(kMinimal);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->heads.sample_every, 0);
  EXPECT_FALSE(config->heads.lossy);
  const auto heads = [](const std::string& settings) {
    return Read(std::string(kMinimal) + "engine: {heads: {" + settings + "}}");
  };
  const auto sampled = heads("sample_every: 64, measured_file: heads.json");
  ASSERT_TRUE(sampled.ok()) << sampled.status();
  EXPECT_EQ(sampled->heads.recent_tokens, 256);
  const auto lossy = heads("lossy: true, profile: heads.json, keep: 0.75");
  ASSERT_TRUE(lossy.ok()) << lossy.status();
  EXPECT_EQ(lossy->heads.keep, 0.75);
  EXPECT_THAT(std::string(heads("keep: 0.5, profile: heads.json").status().message()),
              HasSubstr("needs lossy: true"));
  EXPECT_THAT(std::string(heads("lossy: true, keep: 0.5").status().message()),
              HasSubstr("profile"));
  EXPECT_THAT(std::string(heads("measured_file: heads.json").status().message()),
              HasSubstr("sample_every"));
  const auto groups = heads("groups: 3, tier_1_bytes: 8 MiB, profile: heads.json");
  ASSERT_TRUE(groups.ok()) << groups.status();
  EXPECT_EQ(groups->heads.groups, 3);
  EXPECT_EQ(groups->heads.tier_1_bytes, MiB(8));
  EXPECT_EQ(heads("groups: 3, profile: heads.json")->heads.tier_1_bytes, Bytes(0));
  EXPECT_THAT(std::string(heads("groups: 2").status().message()), HasSubstr("profile"));
  EXPECT_THAT(std::string(heads("tier_1_bytes: 8 MiB, profile: heads.json").status().message()),
              HasSubstr("needs groups above 1"));
  const auto cuda = Read(std::string(kMinimal) +
                         "engine: {device: cuda, heads: {lossy: true, profile: heads.json}}");
  EXPECT_THAT(std::string(cuda.status().message()), HasSubstr("CPU"));
}

TEST(WorkerConfig, StepsOnAGpuAreLargerUnlessSaid) {
  const auto cuda = Read(std::string(kMinimal) + "engine: {device: cuda, gpus: [1, 0]}");
  ASSERT_TRUE(cuda.ok()) << cuda.status();
  EXPECT_EQ(cuda->gpus, (std::vector<int>{1, 0}));
  EXPECT_EQ(cuda->max_batch_sequences, 256);
  EXPECT_EQ(cuda->max_step_tokens, 8192);
  EXPECT_FALSE(cuda->gemm_cache_file.empty());
  const auto small = Read(std::string(kMinimal) +
                          "engine: {device: cuda, max_step_tokens: 64, max_batch_sequences: 8}");
  ASSERT_TRUE(small.ok()) << small.status();
  EXPECT_EQ(small->max_step_tokens, 64);
}

TEST(WorkerConfig, LocalDeploymentIsValid) {
  for (const char* file : {"deploy/local/alpha.yaml", "deploy/local/beta.yaml"}) {
    auto yaml = YamlConfig::ReadFile(file);
    ASSERT_TRUE(yaml.ok()) << yaml.status();
    const auto config = ReadWorkerConfig(*yaml);
    EXPECT_TRUE(config.ok()) << config.status();
  }
}

TEST(WorkerConfig, ErrorsNameLineAndReason) {
  const auto expect = [](const std::string& more, const std::string& words) {
    const auto config = Read(kMinimal + more);
    ASSERT_FALSE(config.ok()) << more;
    EXPECT_EQ(config.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(config.status().message()), HasSubstr("worker.yaml:7"));
    EXPECT_THAT(std::string(config.status().message()), HasSubstr(words));
  };
  expect("engin: {}", "engin");
  expect("engine: {max_step_tokens: 8, max_batch_sequences: 16}", "max_batch_sequences (16)");
  expect("engine: {kv_low_water_slabs: 9, kv_high_water_slabs: 3}", "kv_low_water_slabs (9)");
  expect("engine: {queue_capacity: 0}", "queue_capacity");
  expect("engine: {thread: 2}", "thread");
  expect("engine: {device: tpu}", "device");
  expect("engine: {device: cuda, gpus: [-1]}", "gpus");
  expect("engine: {device: cuda, gpus: [1, 1]}", "gpus");
  expect("engine: {gpus: [0]}", "gpus");
  expect("drain_timeout: -1s", "drain_timeout");
  expect("log_level: loud", "log_level");
  const auto empty = Read("{}");
  ASSERT_FALSE(empty.ok());
  for (const char* key : {"tenant", "listen", "router_token_file", "path", "control_socket"}) {
    EXPECT_THAT(std::string(empty.status().message()), HasSubstr(key));
  }
}

}  // namespace
}  // namespace palimpsest
