// What becomes of slabs on GPUs that workers share, and of copies of images.
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "worker/memory/cuda/cuda_session_fixture.h"

namespace palimpsest {
namespace {

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
  void Await(const std::vector<Tenant*>& tenants, Condition condition) {
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
  const std::string bytes = absl::StrCat((kSlab * whole()).count());
  for (const char* metric : {"image_bytes", "filled_bytes_total"}) {
    EXPECT_THAT(alpha.metrics.Text(), ::testing::HasSubstr(absl::StrCat("\npalimpsest_worker_peer_",
                                                                        metric, " ", bytes)));
  }
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
