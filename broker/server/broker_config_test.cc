#include "broker/server/broker_config.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

using ::testing::HasSubstr;

constexpr char kHead[] =
    "node: n1\n"
    "state_dir: state\n"
    "control_socket: broker.sock\n"
    "descriptor_socket: descriptors.sock\n"
    "pool: {backend: host, bytes: 64 MiB}\n"
    "tenants:\n";
constexpr char kTenant[] =
    "  - name: alpha\n"
    "    secret_file: secrets/alpha\n"
    "    model: {path: model, max_sequence_tokens: 512}\n";

absl::StatusOr<BrokerConfig> Read(const std::string& text) {
  auto yaml = YamlConfig::Parse(text, "broker.yaml");
  if (!yaml.ok()) return yaml.status();
  return ReadBrokerConfig(*yaml, "default-packer");
}

std::string Refusal(const std::string& text) { return std::string(Read(text).status().message()); }

TEST(ReadBrokerConfig, FillsInDefaults) {
  const auto config = Read(absl::StrCat(kHead, kTenant, "    floor: 10 MiB\n"));
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->policy.pool_slabs, 32);
  EXPECT_EQ(config->packer, "default-packer");
  EXPECT_EQ(config->tenants[0].quota, MiB(64));
  EXPECT_EQ(config->tenants[0].floor, MiB(10));
  EXPECT_FALSE(Read(absl::StrCat(kHead, kTenant))->tenants[0].floor.has_value());
  EXPECT_EQ(config->tenants[0].model.kv_block_tokens, 16);
  EXPECT_FALSE(config->tenants[0].uid.has_value());
  EXPECT_EQ(config->policy.revoke_deadline, absl::Seconds(10));
  EXPECT_EQ(config->policy.report_patience, absl::Seconds(3));
  EXPECT_EQ(config->policy.victims, VictimPolicy::kExpected);
  EXPECT_EQ(config->policy.slab_bytes, config->slab_bytes);
  EXPECT_EQ(config->log_level, LogLevel::kInfo);
}

TEST(ReadBrokerConfig, ReadsHowWeightsAreLoaded) {
  const auto with = [](absl::string_view more) {
    return absl::StrCat(kHead, "  - {name: a, uid: 1, model: {path: m, max_sequence_tokens: 5",
                        more, "}}\n");
  };
  const auto seed = [&](absl::string_view more) {
    const auto config = Read(with(more));
    EXPECT_TRUE(config.ok()) << config.status();
    return config->tenants[0].model.dummy_seed;
  };
  EXPECT_EQ(seed(""), std::nullopt);
  EXPECT_EQ(seed(", load_format: safetensors"), std::nullopt);
  EXPECT_EQ(seed(", load_format: dummy"), 0);
  EXPECT_EQ(seed(", load_format: dummy, dummy_seed: 9"), 9);
  EXPECT_THAT(Refusal(with(", load_format: gguf")), HasSubstr("load_format"));
  EXPECT_THAT(Refusal(with(", dummy_seed: 9")), HasSubstr("only with load_format: dummy"));
}

TEST(ReadBrokerConfig, ReadsHowKvIsStored) {
  const auto with = [](absl::string_view more) {
    return absl::StrCat(kHead, "  - {name: a, uid: 1, model: {path: m, max_sequence_tokens: 5",
                        more, "}}\n");
  };
  EXPECT_EQ(Read(with(""))->tenants[0].model.kv_dtype, KvDtype::kBf16);
  EXPECT_EQ(Read(with(", kv_dtype: bf16"))->tenants[0].model.kv_dtype, KvDtype::kBf16);
  EXPECT_EQ(Read(with(", kv_dtype: fp8_e4m3"))->tenants[0].model.kv_dtype, KvDtype::kFp8E4m3);
  EXPECT_THAT(Refusal(with(", kv_dtype: fp8_e5m2")), HasSubstr("kv_dtype"));
}

TEST(ReadBrokerConfig, ReadsWhereCopiesOfImagesAre) {
  const auto with = [](absl::string_view pool, absl::string_view tenant) {
    return absl::StrCat("node: n\nstate_dir: s\ncontrol_socket: b\ndescriptor_socket: d\npool: {",
                        pool, "}\ntenants:\n  - {name: a, uid: 1, ", tenant,
                        "model: {path: m, max_sequence_tokens: 5}}\n");
  };
  constexpr char kCuda[] = "backend: cuda, bytes: 2 GiB, peer: {gpu: 1, bytes: 1 GiB}";
  const auto config = Read(with(kCuda, "image: peer_gpu, "));
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->peer->gpu, 1);
  EXPECT_EQ(config->peer->bytes, GiB(1));
  EXPECT_TRUE(config->tenants[0].peer_image);
  EXPECT_FALSE(Read(with(kCuda, ""))->tenants[0].peer_image);
  EXPECT_FALSE(Read(with("backend: cuda, bytes: 2 GiB", "image: host, "))->peer.has_value());
  EXPECT_THAT(Refusal(with("backend: cuda, bytes: 2 GiB", "image: peer_gpu, ")),
              HasSubstr("pool.peer"));
  EXPECT_THAT(Refusal(with("bytes: 2 GiB, peer: {gpu: 1, bytes: 1 GiB}", "")),
              HasSubstr("only with backend: cuda"));
  EXPECT_THAT(Refusal(with("backend: cuda, bytes: 2 GiB, peer: {gpu: 0, bytes: 1 GiB}", "")),
              HasSubstr("not in pool.gpus"));
  EXPECT_THAT(Refusal(with("backend: cuda, bytes: 2 GiB, peer: {gpu: 1}", "")), HasSubstr("bytes"));
}

TEST(ReadBrokerConfig, ReadsHowLayersRotate) {
  const auto with = [](absl::string_view rotation) {
    return Read(absl::StrCat("policy: {rotation: ", rotation, "}\n", kHead, kTenant));
  };
  const auto config = with("{enabled: true, slots: 2, cap: 0.25, reversion: false}");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_TRUE(config->policy.rotation.enabled);
  EXPECT_EQ(config->policy.rotation.slots, SlotPreference::kTwo);
  EXPECT_EQ(config->policy.rotation.cap, 0.25);
  EXPECT_FALSE(config->policy.rotation.reversion);
  EXPECT_EQ(with("{slots: auto}")->policy.rotation.slots, SlotPreference::kAuto);
  for (const char* bad : {"{slots: 3}", "{cap: 1.5}", "{caps: 1}"}) {
    EXPECT_FALSE(with(bad).ok()) << bad;
  }
}

TEST(ReadBrokerConfig, ReadsPolicy) {
  const auto config = Read(absl::StrCat(
      "policy: {revoke_deadline: 3s, hysteresis: 0.5, report_patience: 7s, victims: lru, "
      "sharing: temporal, quantum: 500ms, turn_deadline: 4s}\n",
      kHead, kTenant));
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->policy.revoke_deadline, absl::Seconds(3));
  EXPECT_EQ(config->policy.reversion_hysteresis, 0.5);
  EXPECT_EQ(config->policy.report_patience, absl::Seconds(7));
  EXPECT_EQ(config->policy.victims, VictimPolicy::kLru);
  EXPECT_EQ(config->policy.sharing, Sharing::kTemporal);
  EXPECT_EQ(config->policy.quantum, absl::Milliseconds(500));
  EXPECT_EQ(config->policy.turn_deadline, absl::Seconds(4));
  EXPECT_EQ(Read(absl::StrCat(kHead, kTenant))->policy.sharing, Sharing::kSpatial);
  EXPECT_THAT(Refusal(absl::StrCat("policy: {sharing: both}\n", kHead, kTenant)),
              HasSubstr("sharing"));
}

TEST(ReadBrokerConfig, PrintsHowTenantsShareAndWhenTheySleep) {
  auto yaml =
      YamlConfig::Parse(absl::StrCat(kHead, kTenant, "    hibernate_after: 90s\n"), "b.yaml");
  ASSERT_TRUE(yaml.ok()) << yaml.status();
  const auto config = ReadBrokerConfig(*yaml, "default-packer");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->tenants[0].hibernate_after, absl::Seconds(90));
  const std::string printed = yaml->EffectiveYaml();
  for (const char* line :
       {"sharing: spatial", "quantum: 2s", "turn_deadline: 10s", "hibernate_after: "}) {
    EXPECT_THAT(printed, HasSubstr(line));
  }
  EXPECT_EQ(Read(absl::StrCat(kHead, kTenant))->tenants[0].hibernate_after, absl::ZeroDuration());
  EXPECT_THAT(Refusal(absl::StrCat(kHead, kTenant, "    hibernate_after: -1s\n")),
              HasSubstr("hibernate_after"));
}

TEST(ReadBrokerConfig, ReadsMemoryPolicy) {
  const auto with = [](absl::string_view policy) {
    return absl::StrCat("policy: {memory_policy: ", policy, "}\n", kHead, kTenant);
  };
  EXPECT_EQ(Read(absl::StrCat(kHead, kTenant))->memory_policy, MemoryPolicy::kRemap);
  for (const MemoryPolicy policy : {MemoryPolicy::kRemap, MemoryPolicy::kStatic,
                                    MemoryPolicy::kRecompute, MemoryPolicy::kSwap}) {
    EXPECT_EQ(Read(with(MemoryPolicyName(policy)))->memory_policy, policy);
  }
  EXPECT_THAT(Refusal(with("evict")), HasSubstr("memory_policy"));
}

TEST(ReadBrokerConfig, ReadsLogLevel) {
  const auto config = Read(absl::StrCat("log_level: warning\n", kHead, kTenant));
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->log_level, LogLevel::kWarning);
  EXPECT_THAT(Refusal(absl::StrCat("log_level: loud\n", kHead, kTenant)), HasSubstr("log_level"));
}

TEST(ReadBrokerConfig, ReadsAPoolOfGpuMemory) {
  constexpr char kCuda[] =
      "node: n1\nstate_dir: state\ncontrol_socket: b\ndescriptor_socket: d\n"
      "pool: {backend: cuda, gpus: [2, 0], bytes: 64 GiB}\ntenants:\n";
  const auto config = Read(absl::StrCat(kCuda, kTenant, "    workspace: 1 GiB\n"));
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->backend, BrokerConfig::Backend::kCuda);
  EXPECT_EQ(config->gpus, (std::vector<int>{2, 0}));
  EXPECT_TRUE(config->trusted_workers);
  EXPECT_EQ(config->slab_bytes, MiB(32));
  EXPECT_EQ(config->tenants[0].workspace, GiB(1));
}

TEST(ReadBrokerConfig, ContextsOfAGpuAreInsideThePool) {
  constexpr char kCuda[] =
      "node: n1\nstate_dir: state\ncontrol_socket: b\ndescriptor_socket: d\n"
      "pool: {backend: cuda, bytes: 1 GiB}\ntenants:\n";
  const auto standard = Read(absl::StrCat(kCuda, kTenant));
  ASSERT_TRUE(standard.ok()) << standard.status();
  EXPECT_EQ(standard->tenants[0].context, MiB(640));
  EXPECT_EQ(standard->policy.pool_slabs, (1024 - 640) / 32);
  const auto shared = Read(
      "node: n1\nstate_dir: state\ncontrol_socket: b\ndescriptor_socket: d\n"
      "pool: {backend: cuda, gpus: [0, 1], bytes: 2 GiB}\ntenants:\n" +
      std::string(kTenant));
  ASSERT_TRUE(shared.ok()) << shared.status();
  EXPECT_EQ(shared->tenants[0].context, MiB(1536));  // with what GPUs need to talk to each other
  EXPECT_EQ(shared->policy.pool_slabs, (2048 - 1536) / 32);
  const auto small = Read(absl::StrCat(kCuda, kTenant, "    context: 16 MiB\n"));
  ASSERT_TRUE(small.ok()) << small.status();
  EXPECT_EQ(small->policy.pool_slabs, 31);
  EXPECT_THAT(Refusal(absl::StrCat(kCuda, kTenant, "    context: 1000 MiB\n")),
              HasSubstr("leave no slab"));
  EXPECT_THAT(Refusal(absl::StrCat(kHead, kTenant, "    context: 16 MiB\n")),
              HasSubstr("only with backend: cuda"));
}

TEST(ReadBrokerConfig, RefusesWhatABackendDoesNotHave) {
  const auto refusal = [](absl::string_view pool) {
    return Refusal(
        absl::StrCat("node: n1\nstate_dir: state\ncontrol_socket: b\ndescriptor_socket: d\npool: {",
                     pool, ", bytes: 64 MiB}\ntenants:\n", kTenant));
  };
  EXPECT_THAT(refusal("gpus: [0]"), HasSubstr("only with cuda"));
  EXPECT_THAT(refusal("trusted_workers: true"), HasSubstr("always replaced"));
  EXPECT_THAT(refusal("backend: cuda, gpus: [1, 1]"), HasSubstr("different numbers"));
  EXPECT_THAT(refusal("backend: cuda, gpus: [x]"), HasSubstr("different numbers"));
}

TEST(ReadBrokerConfig, ReadsTiersAndWhoHasHowMuchOfThem) {
  const auto config =
      Read(absl::StrCat(kHead, kTenant, "    blocks: {dram: 64 MiB}\n",
                        "tiers: {dram: {bytes: 128 MiB}, nvme: {bytes: 1 GiB, path: blocks}}\n"));
  ASSERT_TRUE(config.ok()) << config.status();
  ASSERT_TRUE(config->tiers.has_value());
  EXPECT_EQ(config->block_budgets[0], (std::vector<Bytes>{MiB(64), GiB(1)}));
  EXPECT_FALSE(Read(absl::StrCat(kHead, kTenant))->tiers.has_value());
  EXPECT_THAT(Refusal(absl::StrCat(kHead, kTenant, "    blocks: {dram: 64 MiB}\n")),
              HasSubstr("broker.yaml:10: "));
  EXPECT_THAT(
      Refusal(absl::StrCat(kHead, kTenant,
                           "tiers: {dram: {bytes: 2 GiB}, nvme: {bytes: 1 GiB, path: blocks}}\n")),
      HasSubstr("less than dram above it"));
}

TEST(ReadBrokerConfig, ErrorsNameTheLine) {
  EXPECT_THAT(Refusal(absl::StrCat(kHead, kTenant, "    flor: 10 MiB\n")),
              HasSubstr("broker.yaml:10"));
  EXPECT_THAT(Refusal(absl::StrCat(kHead, kTenant, "    floor: 65 MiB\n")),
              HasSubstr("broker.yaml:10"));
  EXPECT_THAT(Refusal(absl::StrCat(kHead, kTenant, kTenant)), HasSubstr("a second tenant alpha"));
}

TEST(ReadBrokerConfig, ATenantNeedsAnIdentityAndASocket) {
  const std::string anonymous =
      "  - name: alpha\n    model: {path: model, max_sequence_tokens: 512}\n";
  EXPECT_THAT(Refusal(absl::StrCat(kHead, anonymous)), HasSubstr("uid, a secret_file or both"));
  EXPECT_TRUE(Read(absl::StrCat(kHead, anonymous, "    uid: 0\n")).ok());
  const std::string unreachable = "node: n1\nstate_dir: s\npool: {bytes: 64 MiB}\ntenants:\n";
  EXPECT_THAT(Refusal(absl::StrCat(unreachable, kTenant)), HasSubstr("has no socket"));
  EXPECT_TRUE(Read(absl::StrCat(unreachable, kTenant, "    socket_dir: alpha\n")).ok());
}

TEST(ReadBrokerConfig, PoolAndSlabsMustBeWhole) {
  const std::string rest = "node: n\nstate_dir: s\ntenants:\n";
  const std::string tenant = absl::StrCat(kTenant, "    socket_dir: alpha\n");
  EXPECT_THAT(Refusal(absl::StrCat("pool: {bytes: 3 MiB}\n", rest, tenant)),
              HasSubstr("multiple of pool.slab_bytes"));
  EXPECT_THAT(Refusal(absl::StrCat("pool: {bytes: 64 MiB, slab_bytes: 3 MiB}\n", rest, tenant)),
              HasSubstr("multiple of 2 MiB"));
  EXPECT_FALSE(Read(absl::StrCat("pool: {bytes: 64 MiB, backend: tape}\n", rest, tenant)).ok());
}

}  // namespace
}  // namespace palimpsest
