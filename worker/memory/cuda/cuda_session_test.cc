// A broker with a pool of GPU memory, on one GPU or on two, and workers of two tenants, all in this
// process, over the test double of the driver: everything that happens to slabs on GPUs but the
// GPUs.
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/time/clock.h"
#include "broker/device/cuda_slab_device.h"
#include "broker/server/broker_server.h"
#include "broker/server/testing/test_node.h"
#include "common/slab_checksum.h"
#include "common/yaml_config.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/memory/cuda/cuda_memory.h"
#include "worker/memory/cuda/testing/fake_kernels.h"
#include "worker/memory/grpc_memory_client.h"

namespace palimpsest {
namespace {

constexpr Bytes kSlab = MiB(2);
constexpr auto kSlabSize = static_cast<size_t>(kSlab.count());
constexpr uint32_t kPool = 24;
constexpr uint32_t kWorkspace = 2;

// Whether the next broker measures its links; takes a while.
bool measure_links = false;

absl::StatusOr<std::unique_ptr<SlabDevice>> FakePool(const CudaPool& pool) {
  auto device = CudaSlabDevice::Open({.driver = &FakeCudaDriver(),
                                      .gpus = pool.gpus,
                                      .slabs = pool.slabs,
                                      .slab_bytes = pool.slab_bytes,
                                      .generation = pool.generation});
  if (!device.ok()) return device.status();
  if (measure_links) {
    EXPECT_TRUE((*device)->MeasureLinks().ok());
  }
  return *std::move(device);
}

// One tenant's client, and what a test wants to know of it.
struct Tenant {
  std::unique_ptr<CudaMemory> memory;
  std::unique_ptr<GrpcMemoryClient> client;
  std::vector<RegionIndex> kv;
  int lost = 0;
  // Rotations, which a moving image is to an engine.
  bool finishes = true;
  std::vector<RotationId> wanted;
  int settled = 0;

  void FinishRotations() {
    for (const RotationId id : std::exchange(wanted, {})) client->FinishRotation(id);
  }

  void Take() {
    for (const MemoryEvent& event : client->TakeEvents()) {
      if (const auto* mapped = std::get_if<KvMapped>(&event)) {
        kv.insert(kv.end(), mapped->indexes.begin(), mapped->indexes.end());
      } else if (const auto* revoked = std::get_if<ParametersRevoked>(&event)) {
        client->FinishParameterRevoke(revoked->id);
      } else if (const auto* slabs = std::get_if<KvRevoked>(&event)) {
        const size_t count = std::min<size_t>(kv.size(), slabs->slabs);
        client->FinishKvRevoke(slabs->id, absl::MakeConstSpan(kv).last(count));
        kv.resize(kv.size() - count);
      } else if (std::holds_alternative<BrokerLost>(event)) {
        ++lost;
      } else if (const auto* rotation = std::get_if<RotationWanted>(&event)) {
        wanted.push_back(rotation->id);
        if (finishes) FinishRotations();
      } else if (std::holds_alternative<RotationSettled>(event)) {
        ++settled;
      }
    }
  }

  // A KV slab, or the workspace's first, on every GPU.
  std::vector<char*> At(RegionIndex index) const {
    std::vector<char*> pieces;
    for (int rank = 0; rank < client->ranks(); ++rank) {
      pieces.push_back(reinterpret_cast<char*>(client->kv(rank)) + index.value() * kSlabSize);
    }
    return pieces;
  }
  // Another value on each GPU.
  void Fill(RegionIndex index, int value) const {
    for (char* piece : At(index)) std::memset(piece, value++, kSlabSize);
  }
  bool Holds(RegionIndex index, int value) const {
    for (const char* piece : At(index)) {
      const auto expected = static_cast<char>(value++);
      if (!std::all_of(piece, piece + kSlabSize, [&](char c) { return c == expected; })) {
        return false;
      }
    }
    return true;
  }
  bool IsZero(RegionIndex index) const {
    for (const char* piece : At(index)) {
      if (!std::all_of(piece, piece + kSlabSize, [](char c) { return c == 0; })) return false;
    }
    return true;
  }
};

struct Setup {
  bool trusted = false;
  std::vector<int> gpus;
};

class CudaSessionTest : public ::testing::TestWithParam<Setup> {
 protected:
  CudaSessionTest() {
    FakeCuda::Reset();
    for (const int gpu : GetParam().gpus) {
      FakeCuda::SetMemory(gpu, kSlab * kPool + FakeCuda::InUse(gpu));
    }
    RegisterFakeKernels();
    StartBroker();
  }

  // Further lines: of the pool, of each tenant, of beta alone.
  absl::StatusOr<BrokerConfig> Config(const std::string& pool, const std::string& tenant,
                                      const std::string& beta) {
    const std::string yaml = absl::StrReplaceAll(
        node_.Config(kPool, "  min_residence: 10ms\n  residence_restores: 0\n",
                     "    workspace: 4 MiB\n    context: 0 MiB\n" + tenant),
        {{"- name: beta\n", absl::StrCat("- name: beta\n", beta)},
         {"pool:\n", absl::StrCat("pool:\n  backend: cuda\n  slab_bytes: 2 MiB\n  gpus: [",
                                  absl::StrJoin(GetParam().gpus, ", "), "]\n  trusted_workers: ",
                                  GetParam().trusted ? "true" : "false", "\n", pool)}});
    auto parsed = YamlConfig::Parse(yaml, "broker.yaml");
    if (!parsed.ok()) return parsed.status();
    return ReadBrokerConfig(*parsed, "");
  }
  void StartBroker(const std::string& pool = "", const std::string& tenant = "",
                   const std::string& beta = "") {
    auto config = Config(pool, tenant, beta);
    ASSERT_TRUE(config.ok()) << config.status();
    auto server = BrokerServer::Start(
        *config, [](const absl::Status& status) { FAIL() << "fatal: " << status; }, FakePool);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }

  void Connect(const std::string& name, Tenant& tenant) {
    auto memory = CudaMemory::Open({.driver = &FakeCudaDriver(), .gpus = GetParam().gpus});
    ASSERT_TRUE(memory.ok()) << memory.status();
    tenant.memory = *std::move(memory);
    GrpcMemoryClient::Options options;
    options.connection.address = "unix:" + node_.control();
    options.connection.descriptor_socket = node_.descriptors();
    options.connection.tenant = name;
    options.connection.secret = TestNode::Secret(name);
    options.backend = tenant.memory.get();
    options.min_backoff = absl::Milliseconds(1);
    options.max_backoff = absl::Milliseconds(20);
    auto client = GrpcMemoryClient::Connect(std::move(options));
    ASSERT_TRUE(client.ok()) << client.status();
    tenant.client = *std::move(client);
  }

  void Activate(Tenant& tenant) {
    tenant.client->RequestActivation(ActivationReason::kRequest);
    ASSERT_TRUE(Eventually([&] {
      tenant.Take();
      return tenant.client->Mapped().parameters == tenant.client->Mapped().image;
    }));
  }

  void AwaitKv(Tenant& tenant, size_t slabs) {
    tenant.client->SetKvTarget(static_cast<int32_t>(slabs), static_cast<int32_t>(slabs));
    ASSERT_TRUE(Eventually([&] {
      tenant.Take();
      return tenant.kv.size() == slabs;
    }));
  }

  bool ParametersAreTheImages(Tenant& tenant) {
    const v1::ImageManifest& manifest = tenant.client->manifest();
    const int slabs = manifest.slab_checksums_size() / tenant.client->ranks();
    for (int i = 0; i < manifest.slab_checksums_size(); ++i) {
      const std::byte* slab = tenant.client->parameters(i / slabs) + i % slabs * kSlabSize;
      if (SlabChecksum({slab, kSlabSize}) != manifest.slab_checksums(i)) return false;
    }
    return true;
  }

  TestNode node_;
  std::unique_ptr<BrokerServer> server_;
};

INSTANTIATE_TEST_SUITE_P(Pools, CudaSessionTest,
                         ::testing::Values(Setup{true, {0}}, Setup{false, {0}}, Setup{true, {1, 0}},
                                           Setup{false, {1, 0}}),
                         [](const auto& info) {
                           return absl::StrCat(info.param.trusted ? "Scrub" : "Retire",
                                               info.param.gpus.size());
                         });

TEST_P(CudaSessionTest, WorkspaceParametersAndKvComeAndNothingIsLeftAfterwards) {
  Tenant alpha;
  Connect("alpha", alpha);
  ASSERT_EQ(alpha.client->workspace_bytes(), kSlab * kWorkspace);
  EXPECT_EQ(alpha.client->workspace(), alpha.client->kv() + kPool * kSlabSize);
  std::memset(alpha.client->workspace(), 1, kWorkspace * kSlabSize);
  Activate(alpha);
  EXPECT_TRUE(ParametersAreTheImages(alpha));
  EXPECT_TRUE(alpha.client->gate().CheckPassed().ok());
  AwaitKv(alpha, 5);
  for (const RegionIndex index : alpha.kv) {
    EXPECT_TRUE(alpha.IsZero(index));
    alpha.Fill(index, 3);
  }
  const v1::TenantMemory status = server_->broker().Status().tenants(0);
  EXPECT_EQ(status.workspace_slabs(), kWorkspace);
  EXPECT_EQ(status.kv_slabs(), 5u);
  alpha.client->ReleaseKv(alpha.kv);
  alpha.kv.clear();
  AwaitKv(alpha, 5);
  for (const RegionIndex index : alpha.kv) EXPECT_TRUE(alpha.IsZero(index));
}

TEST_P(CudaSessionTest, SlabsThatChangeTenantsShowNothingOfTheFirst) {
  Tenant alpha, beta;
  Connect("alpha", alpha);
  Connect("beta", beta);
  // Back and forth, so that kept memory is mapped again.
  for (int round = 0; round < 4; ++round) {
    Tenant& owner = round % 2 == 0 ? alpha : beta;
    // Room for its parameters and its workspace stays within its quota.
    AwaitKv(owner, kPool - kWorkspace - TestNode::kImageSlabs);
    for (const RegionIndex index : owner.kv) {
      ASSERT_TRUE(owner.IsZero(index)) << "round " << round;
      owner.Fill(index, 17 + round);
    }
    owner.client->SetKvTarget(0, 0);
    owner.client->ReleaseKv(owner.kv);
    owner.kv.clear();
  }
}

TEST_P(CudaSessionTest, BrokerRestartKeepsContentAndBringsEverySlabBack) {
  Tenant alpha;
  Connect("alpha", alpha);
  Activate(alpha);
  AwaitKv(alpha, 6);
  for (const RegionIndex index : alpha.kv) alpha.Fill(index, 5);
  // Behind the KV region.
  alpha.Fill(RegionIndex(kPool), 6);
  // Two that the worker keeps at most, and the broker does not know of after its restart.
  alpha.client->SetKvTarget(4, 4);
  alpha.client->ReleaseKv(absl::MakeConstSpan(alpha.kv).last(2));
  alpha.kv.resize(4);
  ASSERT_TRUE(Eventually([&] { return server_->broker().Status().tenants(0).kv_slabs() == 4; }));
  server_->Shutdown();
  server_.reset();
  ASSERT_TRUE(Eventually([&] {
    alpha.Take();
    return alpha.lost == 1;
  }));
  StartBroker();
  ASSERT_TRUE(Eventually([&] { return server_->broker().Status().tenants(0).attached(); }));
  for (const RegionIndex index : alpha.kv) EXPECT_TRUE(alpha.Holds(index, 5));
  EXPECT_TRUE(alpha.Holds(RegionIndex(kPool), 6));
  EXPECT_TRUE(ParametersAreTheImages(alpha));
  const v1::TenantMemory status = server_->broker().Status().tenants(0);
  EXPECT_EQ(status.kv_slabs(), 4u);
  EXPECT_EQ(status.workspace_slabs(), kWorkspace);
  EXPECT_EQ(status.parameter_slabs(), status.image_slabs());
  EXPECT_TRUE(server_->broker().CheckConsistency().ok());
  // The pool is whole: another may have everything else.
  Tenant beta;
  Connect("beta", beta);
  AwaitKv(beta, kPool - 2 * kWorkspace - 4 - status.image_slabs());
  for (const RegionIndex index : beta.kv) EXPECT_TRUE(beta.IsZero(index));
}

TEST_P(CudaSessionTest, WorkersKnowTheLinkFromTheBrokerAndTellTheNextOne) {
  const auto told = [this](Tenant& tenant, int index) {
    tenant.client->SendReport({.running_sequences = 1});
    const auto load = [&] { return server_->broker().Status().tenants(index).load(); };
    EXPECT_TRUE(Eventually([&] { return load().running_sequences() == 1; }));
    return load().image_bytes_per_second();
  };
  server_.reset();
  measure_links = true;
  StartBroker();
  measure_links = false;
  Tenant alpha, beta;
  Connect("alpha", alpha);
  const double rate = told(alpha, 0);
  EXPECT_GT(rate, 0);
  server_->Shutdown();
  server_.reset();
  StartBroker();
  ASSERT_TRUE(Eventually([&] { return server_->broker().Status().tenants(0).attached(); }));
  EXPECT_EQ(told(alpha, 0), rate);
  Connect("beta", beta);
  EXPECT_EQ(told(beta, 1), rate);
}

TEST_P(CudaSessionTest, ParametersLeaveForKvAndComeBack) {
  Tenant alpha, beta;
  Connect("alpha", alpha);
  Connect("beta", beta);
  Activate(alpha);
  for (const bool active : {true, false}) {
    alpha.client->SendReport({.active = active});
    ASSERT_TRUE(Eventually(
        [&] { return server_->broker().Status().tenants(0).load().active() == active; }));
  }
  beta.client->SendReport({.active = true});
  constexpr int kMost = kPool - kWorkspace - TestNode::kImageSlabs;
  beta.client->SetKvTarget(kMost, kMost);
  ASSERT_TRUE(Eventually([&] {
    alpha.Take();
    beta.Take();
    return beta.kv.size() == kMost;
  }));
  EXPECT_EQ(alpha.client->Mapped().parameters, kPool - 2 * kWorkspace - kMost);
  for (const RegionIndex index : beta.kv) ASSERT_TRUE(beta.IsZero(index));
  beta.client->SetKvTarget(0, 0);
  beta.client->ReleaseKv(beta.kv);
  beta.kv.clear();
  Activate(alpha);
  EXPECT_TRUE(ParametersAreTheImages(alpha));
}

TEST_P(CudaSessionTest, WorkersWithAnotherNumberOfGpusAreRefused) {
  Tenant alpha;
  alpha.memory = *CudaMemory::Open({.driver = &FakeCudaDriver(), .gpus = {0, 1, 2}});
  GrpcMemoryClient::Options options;
  options.connection.address = "unix:" + node_.control();
  options.connection.descriptor_socket = node_.descriptors();
  options.connection.tenant = "alpha";
  options.connection.secret = TestNode::Secret("alpha");
  options.backend = alpha.memory.get();
  const absl::Status status = GrpcMemoryClient::Connect(std::move(options)).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("engine.gpus"));
}

TEST_P(CudaSessionTest, HostWorkersAreRefused) {
  GrpcMemoryClient::Options options;
  options.connection.address = "unix:" + node_.control();
  options.connection.descriptor_socket = node_.descriptors();
  options.connection.tenant = "alpha";
  options.connection.secret = TestNode::Secret("alpha");
  const absl::Status status = GrpcMemoryClient::Connect(std::move(options)).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("engine.device"));
}

constexpr int kPeer = 2;

// Copies of images in the memory of GPU 2.
class PeerImageSessionTest : public CudaSessionTest {
 protected:
  PeerImageSessionTest() : before_(FakeCuda::InUse(kPeer)) {}

  // Slabs for so many whole images; beta's priority is above alpha's.
  void StartPeers(int images) {
    server_.reset();
    StartBroker(absl::StrCat("  peer: {gpu: ", kPeer, ", bytes: ", 2 * images * whole(), " MiB}\n"),
                "    image: peer_gpu\n", "    priority: 1\n");
  }
  // Slabs of a copy of the whole image.
  int whole() const { return TestNode::kImageSlabs * static_cast<int>(GetParam().gpus.size()); }
  int Copied(int tenant) {
    return static_cast<int>(server_->broker().Status().tenants(tenant).peer_image_slabs());
  }
  // Mapped by workers.
  int Mapped() const { return static_cast<int>((FakeCuda::InUse(kPeer) - before_) / kSlab); }
  static const std::byte* ImageOf(const Tenant& tenant) { return tenant.client->image()[0].data; }
  template <typename Condition>
  void Await(std::vector<Tenant*> tenants, Condition condition) {
    ASSERT_TRUE(Eventually([&] {
      for (Tenant* tenant : tenants) tenant->Take();
      return condition();
    }));
  }
  // Until the engine knows of a copy of the whole image.
  void AwaitCopy(Tenant& tenant, const std::byte* host) {
    Await({&tenant}, [&] { return ImageOf(tenant) != host && tenant.settled > 0; });
    EXPECT_EQ(tenant.client->image()[0].size, kSlab * TestNode::kImageSlabs);
  }

  const Bytes before_;
};

INSTANTIATE_TEST_SUITE_P(Pools, PeerImageSessionTest,
                         ::testing::Values(Setup{true, {0}}, Setup{false, {1, 0}}),
                         [](const auto& info) {
                           return absl::StrCat(info.param.trusted ? "Scrub" : "Retire",
                                               info.param.gpus.size());
                         });

TEST_P(PeerImageSessionTest, ParametersComeFromTheCopy) {
  StartPeers(2);
  Tenant alpha, beta;
  Connect("alpha", alpha);
  const std::byte* const host = ImageOf(alpha);
  AwaitCopy(alpha, host);
  EXPECT_EQ(Copied(0), whole());
  EXPECT_EQ(Mapped(), whole());
  Activate(alpha);
  EXPECT_TRUE(ParametersAreTheImages(alpha));
  Connect("beta", beta);
  Await({&beta}, [&] { return Mapped() == 2 * whole(); });
  EXPECT_EQ(server_->broker().Status().peer_slabs(), 2u * static_cast<uint32_t>(whole()));
  EXPECT_EQ(server_->broker().Status().peer_slabs_free(), 0u);
}

TEST_P(PeerImageSessionTest, ACopyGoesToAHigherPriorityOnceItsReadersHaveStopped) {
  StartPeers(1);
  Tenant alpha, beta;
  Connect("alpha", alpha);
  const std::byte* const host = ImageOf(alpha);
  AwaitCopy(alpha, host);
  alpha.finishes = false;
  Connect("beta", beta);
  const std::byte* const betas_host = ImageOf(beta);
  Await({&alpha, &beta}, [&] { return !alpha.wanted.empty(); });
  EXPECT_NE(ImageOf(alpha), host);
  EXPECT_EQ(Copied(0), whole());
  EXPECT_EQ(Mapped(), whole());
  const int settled = alpha.settled;
  alpha.FinishRotations();
  Await({&alpha}, [&] { return alpha.settled > settled; });
  EXPECT_EQ(ImageOf(alpha), host);
  AwaitCopy(beta, betas_host);
  EXPECT_EQ(Copied(0), 0);
  EXPECT_EQ(Copied(1), whole());
  EXPECT_EQ(Mapped(), whole());
  Activate(alpha);
  EXPECT_TRUE(ParametersAreTheImages(alpha));
}

TEST_P(PeerImageSessionTest, WithoutAWayToThatMemoryTheHostServes) {
  FakeCuda::SetPeerAccess(false);
  StartPeers(1);
  Tenant alpha;
  Connect("alpha", alpha);
  const std::byte* const host = ImageOf(alpha);
  Activate(alpha);
  Await({&alpha}, [&] { return Copied(0) == 0; });
  EXPECT_EQ(ImageOf(alpha), host);
  EXPECT_EQ(Mapped(), 0);
  EXPECT_TRUE(ParametersAreTheImages(alpha));
}

TEST_P(PeerImageSessionTest, AGpuThatIsNotThereIsRefusedAtTheStart) {
  server_.reset();
  const auto config = Config("  peer: {gpu: 9, bytes: 2 MiB}\n", "    image: peer_gpu\n", "");
  ASSERT_TRUE(config.ok()) << config.status();
  const auto server = BrokerServer::Start(
      *config, [](const absl::Status&) {}, FakePool);
  EXPECT_TRUE(absl::IsFailedPrecondition(server.status())) << server.status();
  EXPECT_THAT(std::string(server.status().message()), ::testing::HasSubstr("pool.peer.gpu"));
}

TEST_P(PeerImageSessionTest, MemoryThatIsNotThereIsNotOffered) {
  FakeCuda::SetMemory(kPeer, FakeCuda::InUse(kPeer));
  StartPeers(1);
  Tenant alpha;
  Connect("alpha", alpha);
  Activate(alpha);
  Await({&alpha}, [&] { return Copied(0) == 0; });
  EXPECT_EQ(Mapped(), 0);
}

TEST_P(PeerImageSessionTest, ALostBrokersMemoryIsGivenUpBeforeTheNextIsAsked) {
  StartPeers(1);
  Tenant alpha;
  Connect("alpha", alpha);
  const std::byte* const host = ImageOf(alpha);
  AwaitCopy(alpha, host);
  Activate(alpha);
  alpha.finishes = false;
  server_.reset();
  Await({&alpha}, [&] { return !alpha.wanted.empty() && alpha.lost == 1; });
  StartPeers(1);
  EXPECT_EQ(Mapped(), whole());
  EXPECT_FALSE(server_->broker().Status().tenants(0).attached());
  alpha.finishes = true;
  const int settled = alpha.settled;
  alpha.FinishRotations();
  // One for the old copy, one for the new.
  Await({&alpha}, [&] { return alpha.settled == settled + 2; });
  EXPECT_NE(ImageOf(alpha), host);
  EXPECT_EQ(Copied(0), whole());
  EXPECT_EQ(Mapped(), whole());
  EXPECT_TRUE(ParametersAreTheImages(alpha));
  EXPECT_TRUE(server_->broker().CheckConsistency().ok());
}

}  // namespace
}  // namespace palimpsest
