#include "worker/memory/grpc_memory_client.h"

#include <sys/resource.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <thread>
#include <utility>

#include "gmock/gmock.h"
#include "worker/memory/grpc_memory_client_fixture.h"

namespace palimpsest {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

TEST_F(GrpcMemoryClientTest, AttachingMapsNothingAndSaysSo) {
  Connect();
  EXPECT_EQ(progress_, "pack");
  EXPECT_FALSE(AwaitEvent<BrokerConnected>().reattached);
  EXPECT_EQ(client_->pool_slabs(), FakeBroker::kPoolSlabs);
  EXPECT_FALSE(client_->ParametersAvailable());
  EXPECT_TRUE(absl::IsUnavailable(client_->gate().AwaitStage(0)));
  EXPECT_EQ(client_->Mapped().kv, 0);
  EXPECT_EQ(client_->Mapped().image, 4);
  EXPECT_FALSE(broker_.last_attach().has_reattach());
}

TEST_F(GrpcMemoryClientTest, DescriptorsOfEverySlabMayBeHeld) {
  rlimit before;
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit low = {512, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &low), 0);
  Connect();
  rlimit after;
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &after), 0);
  EXPECT_GE(after.rlim_cur, FakeBroker::kPoolSlabs + 1024);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
}

TEST_F(GrpcMemoryClientTest, ActivationIsAskedForOnceAndRestoresTheImage) {
  Connect();
  client_->RequestActivation(ActivationReason::kEager);
  EXPECT_EQ(broker_.Await(Case::kActivate).activate().reason(), v1::Activate::REASON_EAGER);
  client_->RequestActivation(ActivationReason::kRequest);
  client_->RequestActivation(ActivationReason::kRequest);
  client_->RequestActivation(ActivationReason::kEager);
  EXPECT_EQ(broker_.Await(Case::kActivate).activate().reason(), v1::Activate::REASON_REQUEST);

  const uint64_t first = broker_.Grant(v1::SLAB_ROLE_PARAMETER, {5, 9}, {0, 1});
  const v1::WorkerMessage mapped = broker_.Await(Case::kGrantMapped);
  EXPECT_EQ(mapped.grant_mapped().grant_id(), first);
  EXPECT_GT(mapped.grant_mapped().restore_seconds(), 0);
  ASSERT_TRUE(client_->gate().AwaitStage(0).ok());
  EXPECT_TRUE(SlabIsRestored(0));
  EXPECT_FALSE(client_->ParametersAvailable());
  EXPECT_TRUE(absl::IsUnavailable(client_->gate().AwaitStage(1)));  // half of it

  const uint64_t second = broker_.Grant(v1::SLAB_ROLE_PARAMETER, {7, 8}, {3, 2});
  AwaitEvent<ParametersComing>();
  EXPECT_TRUE(client_->ParametersAvailable());
  ASSERT_TRUE(AwaitAllStages().ok());
  for (uint32_t slab = 0; slab < 4; ++slab) EXPECT_TRUE(SlabIsRestored(slab)) << slab;
  EXPECT_EQ(broker_.Await(Case::kGrantMapped).grant_mapped().grant_id(), second);
  EXPECT_EQ(client_->Mapped().parameters, 4);
}

TEST_F(GrpcMemoryClientTest, RefusedActivationIsReportedAndCanBeRepeated) {
  Connect();
  client_->RequestActivation(ActivationReason::kRequest);
  broker_.Await(Case::kActivate);
  v1::BrokerMessage message;
  message.mutable_activate_refused()->set_message("the pool is full");
  message.mutable_activate_refused()->set_retry_after_seconds(1.5);
  broker_.Send(message);
  const ActivationRefused refused = AwaitEvent<ActivationRefused>();
  EXPECT_EQ(refused.message, "the pool is full");
  EXPECT_EQ(refused.retry_after, absl::Milliseconds(1500));
  client_->RequestActivation(ActivationReason::kRequest);
  broker_.Await(Case::kActivate);
}

TEST_F(GrpcMemoryClientTest, RefusalOfAnEagerActivationIsNoneOfWhatRequestsAskedForMeanwhile) {
  Connect();
  client_->RequestActivation(ActivationReason::kEager);
  broker_.Await(Case::kActivate);
  client_->RequestActivation(ActivationReason::kRequest);
  broker_.Await(Case::kActivate);
  v1::BrokerMessage message;
  message.mutable_activate_refused()->set_message("not for nobody");
  message.mutable_activate_refused()->set_reason(v1::Activate::REASON_EAGER);
  broker_.Send(message);
  message.mutable_activate_refused()->set_message("not now");
  message.mutable_activate_refused()->set_reason(v1::Activate::REASON_REQUEST);
  broker_.Send(message);
  EXPECT_EQ(AwaitEvent<ActivationRefused>().message, "not now");
}

TEST_F(GrpcMemoryClientTest, RevokedStagesCloseAtOnceAndComeBack) {
  Connect();
  Activate();
  const uint64_t id = broker_.RevokeParameters({3, 1, 2});
  const ParametersRevoked revoked = AwaitEvent<ParametersRevoked>();
  EXPECT_EQ(revoked.id, RevokeId(id));
  EXPECT_GT(revoked.deadline, MonotonicNow());
  EXPECT_THAT(revoked.indexes,
              UnorderedElementsAre(RegionIndex(1), RegionIndex(2), RegionIndex(3)));
  EXPECT_TRUE(client_->gate().AwaitStage(0).ok());
  EXPECT_TRUE(absl::IsUnavailable(client_->gate().AwaitStage(1)));
  EXPECT_FALSE(client_->ParametersAvailable());
  EXPECT_TRUE(SlabIsRestored(2));  // until it is finished

  client_->FinishParameterRevoke(revoked.id);
  const v1::WorkerMessage done = broker_.Await(Case::kRevokeDone);
  EXPECT_EQ(done.revoke_done().revoke_id(), id);
  EXPECT_THAT(done.revoke_done().slab_ids(), UnorderedElementsAre(1, 2, 3));
  EXPECT_EQ(client_->Mapped().parameters, 1);

  client_->RequestActivation(ActivationReason::kRequest);
  broker_.Await(Case::kActivate);
  broker_.Grant(v1::SLAB_ROLE_PARAMETER, {11, 12, 13}, {1, 2, 3});
  AwaitEvent<ParametersComing>();
  ASSERT_TRUE(AwaitAllStages().ok());
  for (uint32_t slab = 0; slab < 4; ++slab) EXPECT_TRUE(SlabIsRestored(slab)) << slab;
}

TEST_F(GrpcMemoryClientTest, KvSlabsComeGoWhereTheEngineSaysAndComeAgain) {
  Connect();
  client_->SetKvTarget(5, 3);
  const v1::WorkerMessage target = broker_.Await(Case::kSetKvTarget);
  EXPECT_EQ(target.set_kv_target().target_slabs(), 5);
  EXPECT_EQ(target.set_kv_target().needed_slabs(), 3);
  EXPECT_EQ(GrantKv({10, 11, 12, 13, 14}), Indexes({0, 1, 2, 3, 4}));
  std::memset(client_->kv(), 1, 5 * kSlabBytes);

  const uint64_t id = broker_.RevokeKv(2);
  const KvRevoked revoked = AwaitEvent<KvRevoked>();
  EXPECT_EQ(revoked.slabs, 2);
  client_->FinishKvRevoke(revoked.id, Indexes({1, 3}));
  const v1::WorkerMessage done = broker_.Await(Case::kRevokeDone);
  EXPECT_EQ(done.revoke_done().revoke_id(), id);
  EXPECT_THAT(done.revoke_done().slab_ids(), UnorderedElementsAre(11, 13));

  client_->ReleaseKv(Indexes({0}));
  EXPECT_THAT(broker_.Await(Case::kReleaseKv).release_kv().slab_ids(), ElementsAre(10));
  EXPECT_EQ(client_->Mapped().kv, 2);
  EXPECT_EQ(GrantKv({2, 3}), Indexes({0, 1}));
  EXPECT_EQ(client_->kv()[0], std::byte{0});
  EXPECT_EQ(client_->kv()[2 * kSlabBytes], std::byte{1});
}

TEST_F(GrpcMemoryClientTest, PressureIsPassedOn) {
  Connect();
  v1::BrokerMessage message;
  message.mutable_kv_pressure()->set_target_slabs(7);
  broker_.Send(message);
  EXPECT_EQ(AwaitEvent<KvPressureSeen>().target_slabs, 7);
}

TEST_F(GrpcMemoryClientTest, LatestLoadIsReportedAgainAndAgain) {
  Connect();
  for (int i = 1; i <= 1000; ++i) client_->SendReport({.active = true, .running_sequences = i});
  uint32_t last = 0;
  int reports = 0;
  while (last != 1000) {
    last = broker_.Await(Case::kReport).report().running_sequences();
    ++reports;
  }
  EXPECT_LE(reports, 3);
  EXPECT_EQ(broker_.Await(Case::kReport).report().running_sequences(), 1000);
}

TEST_F(GrpcMemoryClientTest, DamagedImageIsFatalAndNeverServed) {
  broker_.lies().wrong_checksum = 2;
  Connect();
  client_->RequestActivation(ActivationReason::kRequest);
  broker_.Await(Case::kActivate);
  broker_.Grant(v1::SLAB_ROLE_PARAMETER, {0, 1, 2, 3}, {0, 1, 2, 3});
  const absl::Status fatal = AwaitFatal();
  EXPECT_TRUE(absl::IsDataLoss(fatal)) << fatal;
  EXPECT_THAT(std::string(fatal.message()), HasSubstr("slab 2"));
  EXPECT_TRUE(absl::IsDataLoss(client_->gate().AwaitStage(1)));
}

TEST_F(GrpcMemoryClientTest, HostileImagesAndManifestsAreRefused) {
  const std::vector<std::pair<void (*)(FakeBroker::Lies&), const char*>> cases = {
      {[](FakeBroker::Lies& lies) { lies.writable_image = true; }, "seals"},
      {[](FakeBroker::Lies& lies) { lies.short_image = true; }, "bytes"},
      {[](FakeBroker::Lies& lies) { lies.stage_gap = true; }, "gap"},
      {[](FakeBroker::Lies& lies) { lies.refuse_hello = true; }, "wrong secret"},
      {[](FakeBroker::Lies& lies) { lies.refuse_attach = true; }, "no such session"},
      {[](FakeBroker::Lies& lies) { lies.forget_tokens = true; }, "no such token"},
  };
  for (const auto& [lie, message] : cases) {
    broker_.lies() = {};
    lie(broker_.lies());
    broker_.Start();
    EXPECT_THAT(std::string(TryConnect().message()), HasSubstr(message));
    broker_.Kill();
  }
}

TEST_F(GrpcMemoryClientTest, ManifestOfAnotherModelIsRefused) {
  broker_.Start();
  GrpcMemoryClient::Options options = ClientOptions();
  options.check_manifest = [](const v1::ImageManifest& manifest) {
    return absl::FailedPreconditionError(absl::StrCat("slabs: ", manifest.slab_checksums_size()));
  };
  EXPECT_EQ(GrpcMemoryClient::Connect(std::move(options)).status(),
            absl::FailedPreconditionError("slabs: 4"));
}

TEST_F(GrpcMemoryClientTest, NoBrokerIsUnavailableAfterTheTimeout) {
  GrpcMemoryClient::Options options = ClientOptions();
  options.connect_timeout = absl::Milliseconds(10);
  const absl::Status status = GrpcMemoryClient::Connect(std::move(options)).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("descriptors.sock"));
}

TEST_F(GrpcMemoryClientTest, HostileGrantsEndTheSessionAndMapNothing) {
  Connect();
  int attached = 1;
  const auto refused = [&](const std::function<void()>& grant) {
    grant();
    AwaitEvent<BrokerLost>();
    EXPECT_TRUE(AwaitEvent<BrokerConnected>().reattached);
    broker_.AwaitAttached(++attached);
    EXPECT_TRUE(broker_.returned_slabs().empty());
    EXPECT_EQ(client_->Mapped().kv, 0);
    EXPECT_FALSE(client_->ParametersAvailable());
  };
  refused([&] { broker_.Grant(v1::SLAB_ROLE_KV, {1}, {}, /*valid_token=*/false); });
  refused([&] { broker_.Grant(v1::SLAB_ROLE_PARAMETER, {1}, {4}); });
  refused([&] { broker_.Grant(v1::SLAB_ROLE_PARAMETER, {1, 2}, {0, 0}); });
  refused([&] { broker_.Grant(v1::SLAB_ROLE_UNSPECIFIED, {1}); });
  refused([&] { broker_.Grant(v1::SLAB_ROLE_KV, {}); });
  refused([&] { broker_.RevokeParameters({0}); });
  refused([&] { broker_.RevokeParameters({}); });
  broker_.lies().small_slabs = true;
  refused([&] { broker_.Grant(v1::SLAB_ROLE_KV, {1, 2}); });
  broker_.lies().small_slabs = false;
  broker_.lies().unsealed_slabs = true;
  refused([&] { broker_.Grant(v1::SLAB_ROLE_PARAMETER, {1}, {1}); });
  broker_.lies().unsealed_slabs = false;
  EXPECT_EQ(GrantKv({1}), Indexes({0}));
}

TEST_F(GrpcMemoryClientTest, CopiesOfTheImageThatMakeNoSenseEndTheSession) {
  broker_.Start();
  ASSERT_TRUE(TryConnect().ok());
  int attached = 0;
  v1::BrokerMessage message;
  v1::PeerImage& peer = *message.mutable_peer_image();
  const auto refused = [&] {
    broker_.AwaitAttached(++attached);
    broker_.Send(message);
    AwaitEvent<BrokerLost>();
  };
  peer.set_slabs(5);  // of an image of 4
  refused();
  peer.set_slabs(4);
  peer.set_token("a token of nothing");
  refused();
  // There is no copy to take back, and the client can say so.
  broker_.AwaitAttached(++attached);
  peer.set_slabs(0);
  peer.set_peer_image_id(8);
  broker_.Send(message);
  const v1::WorkerMessage done = broker_.Await(Case::kPeerImageDone);
  EXPECT_EQ(done.peer_image_done().peer_image_id(), 8);
  EXPECT_EQ(done.peer_image_done().slabs(), 0);
}

TEST_F(GrpcMemoryClientTest, RevokeRightAfterAGrantIsAnswered) {
  Connect();
  for (int round = 0; round < 10; ++round) {
    broker_.Grant(v1::SLAB_ROLE_PARAMETER, {0, 1, 2, 3}, {0, 1, 2, 3});
    broker_.RevokeParameters({3, 2});
    client_->FinishParameterRevoke(AwaitEvent<ParametersRevoked>().id);
    EXPECT_THAT(broker_.Await(Case::kRevokeDone).revoke_done().slab_ids(),
                UnorderedElementsAre(2, 3));
    ASSERT_TRUE(client_->gate().AwaitStage(0).ok());
    EXPECT_TRUE(SlabIsRestored(0));
    broker_.RevokeParameters({1, 0});
    client_->FinishParameterRevoke(AwaitEvent<ParametersRevoked>().id);
    broker_.Await(Case::kRevokeDone);
    EXPECT_EQ(client_->Mapped().parameters, 0);
  }
}

// At one byte per second a second slab would wait for weeks.
TEST_F(GrpcMemoryClientTest, RestoresAreHeldBackToTheLinkLimit) {
  Connect();
  broker_.LimitLink(1);
  broker_.Grant(v1::SLAB_ROLE_PARAMETER, {0, 1, 2, 3}, {0, 1, 2, 3});
  AwaitRestored(1);
  EXPECT_EQ(client_->pacer().copied(LinkPacer::Kind::kRestore), Bytes(kSlabBytes));
  broker_.LimitLink(0);
  ASSERT_TRUE(AwaitAllStages().ok());
  for (uint32_t slab = 0; slab < 4; ++slab) EXPECT_TRUE(SlabIsRestored(slab));
  broker_.Await(Case::kGrantMapped);
  client_->pacer().AwaitTurn(LinkPacer::Kind::kBlocks, Bytes(7));
  client_->SendReport({.active = true});
  const v1::Report report = broker_.Await(Case::kReport).report();
  EXPECT_EQ(report.restored_bytes(), 4u * kSlabBytes);
  EXPECT_EQ(report.block_bytes(), 7u);
}

TEST_F(GrpcMemoryClientTest, NobodyIsHeldBackWhenTheBrokerOrTheWorkerEnds) {
  Connect();
  broker_.LimitLink(1);
  broker_.Grant(v1::SLAB_ROLE_PARAMETER, {0, 1, 2, 3}, {0, 1, 2, 3});
  AwaitRestored(1);
  // The next broker does not know of the limit.
  broker_.Kill();
  broker_.Start();
  ASSERT_TRUE(AwaitAllStages().ok());
  broker_.AwaitAttached(2);
  const std::vector<uint32_t> all = {0, 1, 2, 3};
  broker_.RevokeParameters(all);
  client_->FinishParameterRevoke(AwaitEvent<ParametersRevoked>().id);
  broker_.Await(Case::kRevokeDone);
  broker_.LimitLink(1);
  broker_.Grant(v1::SLAB_ROLE_PARAMETER, all, all);
  AwaitRestored(1);
  client_->Detach();
  broker_.Await(Case::kDetach);
}

TEST_F(GrpcMemoryClientTest, LimitsThatAreNoneEndTheSession) {
  Connect();
  int attached = 1;
  for (const double limit : {-1.0, std::nan(""), HUGE_VAL}) {
    broker_.LimitLink(limit);
    AwaitEvent<BrokerLost>();
    broker_.AwaitAttached(++attached);
    EXPECT_FALSE(client_->pacer().limited());
  }
}

TEST_F(GrpcMemoryClientTest, DetachUnmapsEverythingAndSaysSo) {
  Connect();
  Activate();
  GrantKv({10});
  client_->Detach();
  broker_.Await(Case::kDetach);
  EXPECT_EQ(client_->Mapped().kv, 0);
  EXPECT_TRUE(absl::IsCancelled(client_->gate().AwaitStage(0)));
}

TEST_F(GrpcMemoryClientTest, LargeAnswersComeInParts) {
  give_back_part_ = FakeBroker::kSlab * 2;
  Connect();
  const std::vector<RegionIndex> kv = GrantKv({5, 6, 7});
  const uint64_t revoke = broker_.RevokeKv(3);
  client_->FinishKvRevoke(AwaitEvent<KvRevoked>().id, kv);
  const v1::RevokeDone first = broker_.Await(Case::kRevokeDone).revoke_done();
  EXPECT_EQ(first.revoke_id(), revoke);
  EXPECT_THAT(first.slab_ids(), ElementsAre(5, 6));
  EXPECT_TRUE(first.more());
  const v1::RevokeDone last = broker_.Await(Case::kRevokeDone).revoke_done();
  EXPECT_EQ(last.revoke_id(), revoke);
  EXPECT_THAT(last.slab_ids(), ElementsAre(7));
  EXPECT_FALSE(last.more());
}

TEST_F(GrpcMemoryClientTest, ConnectWaitsForTheWorkspaceBehindTheKvRegion) {
  broker_.set_workspace_slabs(2);
  broker_.Start();
  std::thread grants([this] {
    broker_.AwaitAttached(1);
    broker_.Grant(v1::SLAB_ROLE_WORKSPACE, {9}, {1});
    broker_.Await(Case::kGrantMapped);
    broker_.Grant(v1::SLAB_ROLE_WORKSPACE, {8}, {0});
  });
  const absl::Status status = TryConnect();
  grants.join();
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(client_->workspace_bytes(), FakeBroker::kSlab * 2);
  EXPECT_EQ(client_->workspace(), client_->kv() + FakeBroker::kPoolSlabs * kSlabBytes);
  std::memset(client_->workspace(), 1, 2 * kSlabBytes);
  // It is returned like everything else.
  broker_.Kill();
  AwaitEvent<BrokerLost>();
  broker_.Start();
  broker_.AwaitAttached(2);
  EXPECT_THAT(broker_.returned_slabs(), UnorderedElementsAre(8, 9));
  ASSERT_EQ(broker_.last_attach().reattach().slabs_size(), 2);
  EXPECT_EQ(broker_.last_attach().reattach().slabs(0).role(), v1::SLAB_ROLE_WORKSPACE);
}

TEST_F(GrpcMemoryClientTest, WorkspaceThatDoesNotComeEndsConnect) {
  broker_.set_workspace_slabs(1);
  broker_.Start();
  GrpcMemoryClient::Options options = ClientOptions();
  options.connect_timeout = absl::Milliseconds(50);
  const absl::Status status = GrpcMemoryClient::Connect(std::move(options)).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("0 of 1 workspace slabs"));
}

}  // namespace
}  // namespace palimpsest
