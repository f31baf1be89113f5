#include "worker/memory/grpc_memory_client.h"

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <random>
#include <thread>
#include <utility>

#include "common/monotonic_time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/memory/testing/fake_broker.h"

namespace palimpsest {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;
using Case = v1::WorkerMessage::MessageCase;

constexpr absl::Duration kPatience = absl::Seconds(20);
constexpr size_t kSlabBytes = FakeBroker::kSlab.count();

std::vector<RegionIndex> Indexes(const std::vector<uint32_t>& values) {
  std::vector<RegionIndex> indexes;
  for (const uint32_t value : values) indexes.push_back(RegionIndex(value));
  return indexes;
}

class GrpcMemoryClientTest : public ::testing::Test {
 protected:
  GrpcMemoryClientTest() : folder_(MakeFolder()), broker_(folder_) {}
  ~GrpcMemoryClientTest() override {
    client_ = nullptr;
    broker_.Kill();
    std::filesystem::remove_all(folder_);
  }

  static std::string MakeFolder() {
    char name[] = "/tmp/memory_client_test.XXXXXX";
    return ::mkdtemp(name);
  }

  GrpcMemoryClient::Options ClientOptions() {
    GrpcMemoryClient::Options options;
    options.connection.address = broker_.address();
    options.connection.descriptor_socket = broker_.descriptor_socket();
    options.connection.tenant = "alpha";
    options.connection.secret = "hush";
    options.connection.on_progress = [this](const v1::ImageProgress& progress) {
      progress_ += progress.phase();
      std::function<void()> act;
      {
        MutexLock lock(&mu_);
        act = std::exchange(while_attaching_, nullptr);
      }
      if (act) act();
    };
    options.connect_timeout = kPatience;
    options.min_backoff = absl::Milliseconds(1);
    options.max_backoff = absl::Milliseconds(20);
    options.gate_patience = kPatience;
    options.give_back_part = give_back_part_;
    options.on_fatal = [this](const absl::Status& status) {
      MutexLock lock(&mu_);
      fatal_ = status;
      changed_.SignalAll();
    };
    return options;
  }

  absl::Status TryConnect() {
    absl::StatusOr<std::unique_ptr<GrpcMemoryClient>> client =
        GrpcMemoryClient::Connect(ClientOptions());
    if (!client.ok()) return client.status();
    client_ = *std::move(client);
    client_->SetWakeup([this] {
      MutexLock lock(&mu_);
      woken_ = true;
      changed_.SignalAll();
    });
    return absl::OkStatus();
  }

  void Connect() {
    broker_.Start();
    const absl::Status status = TryConnect();
    ASSERT_TRUE(status.ok()) << status;
    broker_.AwaitAttached(1);
  }

  // Waits for the next event of type T; events before it are dropped, as is proper for an engine
  // that only cares for this one.
  template <typename T>
  T AwaitEvent() {
    const absl::Time deadline = MonotonicNow() + kPatience;
    for (;;) {
      for (MemoryEvent& event : client_->TakeEvents()) events_.push_back(std::move(event));
      while (!events_.empty()) {
        MemoryEvent event = std::move(events_.front());
        events_.pop_front();
        if (T* wanted = std::get_if<T>(&event)) return std::move(*wanted);
      }
      MutexLock lock(&mu_);
      while (!woken_) {
        if (changed_.WaitWithDeadline(&mu_, deadline) && !woken_) {
          ADD_FAILURE() << "timeout: no such event";
          return {};
        }
      }
      woken_ = false;
    }
  }

  absl::Status AwaitFatal() {
    const absl::Time deadline = MonotonicNow() + kPatience;
    MutexLock lock(&mu_);
    while (fatal_.ok()) {
      if (changed_.WaitWithDeadline(&mu_, deadline)) break;
    }
    return fatal_;
  }

  absl::Status AwaitAllStages() {
    for (int stage = 0; stage < 3; ++stage) {
      if (absl::Status status = client_->gate().AwaitStage(stage); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

  bool SlabIsRestored(uint32_t slab) {
    const std::string image = broker_.ImageSlab(slab);
    return std::memcmp(client_->parameters() + slab * kSlabBytes, image.data(), kSlabBytes) == 0;
  }

  // Activates everything: slabs 0 .. 3 of the pool at places 0 .. 3.
  void Activate() {
    client_->RequestActivation(ActivationReason::kRequest);
    broker_.Await(Case::kActivate);
    broker_.Grant(v1::SLAB_ROLE_PARAMETER, {0, 1, 2, 3}, {0, 1, 2, 3});
    AwaitEvent<ParametersComing>();
    const absl::Status status = AwaitAllStages();
    ASSERT_TRUE(status.ok()) << status;
    broker_.Await(Case::kGrantMapped);
  }

  std::vector<RegionIndex> GrantKv(const std::vector<uint32_t>& slabs) {
    broker_.Grant(v1::SLAB_ROLE_KV, slabs);
    std::vector<RegionIndex> indexes = AwaitEvent<KvMapped>().indexes;
    broker_.Await(Case::kGrantMapped);
    return indexes;
  }

  // "kv2=12": slab 12 at place 2.
  std::vector<std::string> HeldAtAttach() {
    std::vector<std::string> held;
    const v1::Attach attach = broker_.last_attach();
    for (const v1::HeldSlab& slab : attach.reattach().slabs()) {
      EXPECT_GT(slab.epoch(), 0);
      held.push_back(absl::StrCat(slab.role() == v1::SLAB_ROLE_KV ? "kv" : "p", slab.region_index(),
                                  "=", slab.slab_id()));
    }
    return held;
  }

  Bytes give_back_part_ = MiB(256);
  std::string folder_;
  FakeBroker broker_;
  std::string progress_;
  std::deque<MemoryEvent> events_;
  Mutex mu_;
  CondVar changed_;
  bool woken_ = false;
  std::function<void()> while_attaching_;
  absl::Status fatal_;
  std::unique_ptr<GrpcMemoryClient> client_;
};

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

// Otherwise the broker would see a demand for what just came back, and grant it again. Both wait to
// be sent when the session begins.
TEST_F(GrpcMemoryClientTest, ALowerTargetIsToldBeforeTheSlabsAboveItComeBack) {
  Connect();
  client_->SetKvTarget(2, 0);
  ASSERT_EQ(GrantKv({10, 11}), Indexes({0, 1}));
  {
    MutexLock lock(&mu_);
    while_attaching_ = [this] {
      client_->ReleaseKv(Indexes({1}));
      const absl::Time deadline = MonotonicNow() + kPatience;
      while (client_->Mapped().kv == 2 && MonotonicNow() < deadline) std::this_thread::yield();
      client_->SetKvTarget(1, 0);
    };
  }
  broker_.Kill();
  broker_.Start();
  broker_.AwaitAttached(2);
  const std::vector<Case> either = {Case::kSetKvTarget, Case::kReleaseKv};
  EXPECT_EQ(broker_.Await(either).set_kv_target().target_slabs(), 1);
  EXPECT_THAT(broker_.Await(either).release_kv().slab_ids(), ElementsAre(11));
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
  refused([&] { broker_.Grant(v1::SLAB_ROLE_SLOT, {1}); });
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

TEST_F(GrpcMemoryClientTest, EverythingHeldIsReturnedToTheNextBroker) {
  Connect();
  Activate();
  ASSERT_EQ(GrantKv({10, 11, 12}), Indexes({0, 1, 2}));
  client_->SetKvTarget(6, 2);
  broker_.Await(Case::kSetKvTarget);
  client_->SendReport({.active = true, .running_sequences = 3});
  std::memset(client_->kv(), 5, 3 * kSlabBytes);

  broker_.Kill();
  AwaitEvent<BrokerLost>();
  // Running requests go on.
  EXPECT_TRUE(AwaitAllStages().ok());
  EXPECT_TRUE(client_->ParametersAvailable());
  EXPECT_EQ(client_->kv()[2 * kSlabBytes], std::byte{5});
  broker_.Start();
  EXPECT_TRUE(AwaitEvent<BrokerConnected>().reattached);
  broker_.AwaitAttached(2);
  const v1::Attach attach = broker_.last_attach();
  ASSERT_TRUE(attach.has_reattach());
  EXPECT_EQ(attach.reattach().session_id(), 42);
  EXPECT_TRUE(attach.reattach().has_image());
  EXPECT_TRUE(broker_.image_returned());
  EXPECT_THAT(broker_.returned_slabs(), UnorderedElementsAre(0, 1, 2, 3, 10, 11, 12));
  EXPECT_THAT(HeldAtAttach(),
              UnorderedElementsAre("p0=0", "p1=1", "p2=2", "p3=3", "kv0=10", "kv1=11", "kv2=12"));
  EXPECT_EQ(broker_.Await(Case::kSetKvTarget).set_kv_target().target_slabs(), 6);
  EXPECT_EQ(broker_.Await(Case::kReport).report().running_sequences(), 3);
  EXPECT_EQ(client_->kv()[2 * kSlabBytes], std::byte{5});
}

TEST_F(GrpcMemoryClientTest, SlabsGivenBackWithoutABrokerAreEitherNotClaimedOrReleased) {
  Connect();
  ASSERT_EQ(GrantKv({10, 11, 12}), Indexes({0, 1, 2}));
  broker_.Kill();
  AwaitEvent<BrokerLost>();
  client_->ReleaseKv(Indexes({1}));
  broker_.Start();
  broker_.AwaitAttached(2);
  const std::vector<std::string> held = HeldAtAttach();
  if (held.size() == 3) {  // it was attached before it came to unmapping
    EXPECT_THAT(broker_.Await(Case::kReleaseKv).release_kv().slab_ids(), ElementsAre(11));
  } else {
    EXPECT_THAT(held, UnorderedElementsAre("kv0=10", "kv2=12"));
  }
  EXPECT_EQ(GrantKv({4}), Indexes({1}));
}

TEST_F(GrpcMemoryClientTest, OpenRevokesAreVoidWhenTheBrokerIsLost) {
  Connect();
  Activate();
  ASSERT_EQ(GrantKv({10, 11}), Indexes({0, 1}));
  broker_.RevokeParameters({3});
  broker_.RevokeKv(1);
  const ParametersRevoked parameters = AwaitEvent<ParametersRevoked>();
  const KvRevoked kv = AwaitEvent<KvRevoked>();
  broker_.Kill();
  AwaitEvent<BrokerLost>();
  EXPECT_TRUE(AwaitAllStages().ok());
  broker_.Start();
  AwaitEvent<BrokerConnected>();
  broker_.AwaitAttached(2);
  EXPECT_THAT(broker_.returned_slabs(), UnorderedElementsAre(0, 1, 2, 3, 10, 11));
  // The engine answers late.
  client_->FinishParameterRevoke(parameters.id);
  client_->FinishKvRevoke(kv.id, Indexes({1}));
  EXPECT_THAT(broker_.Await(Case::kReleaseKv).release_kv().slab_ids(), ElementsAre(11));
  EXPECT_TRUE(AwaitAllStages().ok());
}

TEST_F(GrpcMemoryClientTest, PendingActivationIsRepeatedAfterReattach) {
  Connect();
  client_->RequestActivation(ActivationReason::kRequest);
  broker_.Await(Case::kActivate);
  broker_.Kill();
  AwaitEvent<BrokerLost>();
  broker_.Start();
  broker_.AwaitAttached(2);
  EXPECT_EQ(broker_.Await(Case::kActivate).activate().reason(), v1::Activate::REASON_REQUEST);
}

TEST_F(GrpcMemoryClientTest, BrokerKilledRightAfterAGrantLeavesAWholeState) {
  Connect();
  int attached = 1;
  for (int round = 0; round < 10; ++round) {
    broker_.Grant(v1::SLAB_ROLE_PARAMETER, {0, 1, 2, 3}, {0, 1, 2, 3});
    broker_.Kill();
    AwaitEvent<BrokerLost>();
    broker_.Start();
    broker_.AwaitAttached(++attached);
    AwaitEvent<BrokerConnected>();
    // All descriptors came with one answer or none; whatever is held is restored.
    const std::set<uint32_t> held = broker_.returned_slabs();
    if (held.empty()) {
      EXPECT_FALSE(client_->ParametersAvailable());
      continue;
    }
    EXPECT_EQ(held.size(), 4);
    ASSERT_TRUE(AwaitAllStages().ok());
    for (uint32_t slab = 0; slab < 4; ++slab) EXPECT_TRUE(SlabIsRestored(slab)) << slab;
    broker_.RevokeParameters({0, 1, 2, 3});
    client_->FinishParameterRevoke(AwaitEvent<ParametersRevoked>().id);
    broker_.Await(Case::kRevokeDone);
  }
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

// A random history of grants, revokes, releases and deaths of the broker; after each step the
// client holds exactly what the broker's book says, and every byte is what it should be.
TEST_F(GrpcMemoryClientTest, RandomHistoriesLeaveBothSidesInAgreement) {
  Connect();
  std::mt19937 random(11);
  std::map<uint32_t, uint32_t> parameters, kv;  // place to slab
  std::set<uint32_t> free;
  for (uint32_t i = 0; i < FakeBroker::kPoolSlabs; ++i) free.insert(i);
  const auto take = [&] { return free.extract(free.begin()).value(); };
  const auto give = [&](std::map<uint32_t, uint32_t>& from, uint32_t place) {
    const uint32_t slab = from.extract(place).mapped();
    free.insert(slab);
    return slab;
  };
  const auto some = [&](const std::map<uint32_t, uint32_t>& of) {
    std::vector<uint32_t> places;
    for (const auto& [place, slab] : of) {
      if (random() % 2 == 0) places.push_back(place);
    }
    return places;
  };
  int attached = 1;
  for (int step = 0; step < 150; ++step) {
    switch (random() % 6) {
      case 0: {
        std::vector<uint32_t> slabs, places;
        for (uint32_t place = 0; place < FakeBroker::kImageSlabs; ++place) {
          if (parameters.contains(place) || free.empty() || random() % 4 == 0) continue;
          places.push_back(place);
          slabs.push_back(parameters[place] = take());
        }
        if (places.empty()) break;
        broker_.Grant(v1::SLAB_ROLE_PARAMETER, slabs, places);
        broker_.Await(Case::kGrantMapped);
        break;
      }
      case 1: {
        std::vector<uint32_t> slabs;
        while (!free.empty() && slabs.size() < 1 + random() % 5) slabs.push_back(take());
        if (slabs.empty()) break;
        const std::vector<RegionIndex> places = GrantKv(slabs);
        ASSERT_EQ(places.size(), slabs.size());
        for (size_t i = 0; i < slabs.size(); ++i) {
          kv[places[i].value()] = slabs[i];
          std::memset(client_->kv() + places[i].value() * kSlabBytes, slabs[i] + 1, kSlabBytes);
        }
        break;
      }
      case 2: {
        const std::vector<uint32_t> places = some(parameters);
        if (places.empty()) break;
        broker_.RevokeParameters(places);
        client_->FinishParameterRevoke(AwaitEvent<ParametersRevoked>().id);
        std::vector<uint32_t> slabs;
        for (const uint32_t place : places) slabs.push_back(give(parameters, place));
        EXPECT_THAT(broker_.Await(Case::kRevokeDone).revoke_done().slab_ids(),
                    ::testing::UnorderedElementsAreArray(slabs));
        break;
      }
      case 3:
      case 4: {
        const std::vector<uint32_t> places = some(kv);
        if (places.empty()) break;
        std::vector<uint32_t> slabs;
        for (const uint32_t place : places) slabs.push_back(give(kv, place));
        if (random() % 2 == 0) {
          broker_.RevokeKv(static_cast<uint32_t>(places.size()));
          client_->FinishKvRevoke(AwaitEvent<KvRevoked>().id, Indexes(places));
          EXPECT_THAT(broker_.Await(Case::kRevokeDone).revoke_done().slab_ids(),
                      ::testing::UnorderedElementsAreArray(slabs));
        } else {
          client_->ReleaseKv(Indexes(places));
          EXPECT_THAT(broker_.Await(Case::kReleaseKv).release_kv().slab_ids(),
                      ::testing::UnorderedElementsAreArray(slabs));
        }
        break;
      }
      default: {
        if (random() % 3 != 0) break;
        const std::vector<uint32_t> places = some(parameters);
        if (!places.empty()) broker_.RevokeParameters(places);  // never answered
        broker_.Kill();
        AwaitEvent<BrokerLost>();
        broker_.Start();
        broker_.AwaitAttached(++attached);
        AwaitEvent<BrokerConnected>();
        std::vector<std::string> held;
        for (const auto& [place, slab] : parameters)
          held.push_back(absl::StrCat("p", place, "=", slab));
        for (const auto& [place, slab] : kv) held.push_back(absl::StrCat("kv", place, "=", slab));
        ASSERT_THAT(HeldAtAttach(), ::testing::UnorderedElementsAreArray(held));
        ASSERT_EQ(broker_.returned_slabs().size(), held.size());
      }
    }
    ASSERT_EQ(client_->Mapped().kv, kv.size());
    ASSERT_EQ(client_->ParametersAvailable(), parameters.size() == FakeBroker::kImageSlabs);
    if (client_->ParametersAvailable()) {
      ASSERT_TRUE(AwaitAllStages().ok());
    }
    for (const auto& [place, slab] : parameters) ASSERT_TRUE(SlabIsRestored(place)) << step;
    for (const auto& [place, slab] : kv) {
      const std::byte* const bytes = client_->kv() + place * kSlabBytes;
      ASSERT_EQ(bytes[0], std::byte(slab + 1));
      ASSERT_EQ(std::memcmp(bytes, bytes + 1, kSlabBytes - 1), 0);
    }
  }
}

TEST_F(GrpcMemoryClientTest, RefusalAtReattachIsFatal) {
  Connect();
  Activate();
  broker_.Kill();
  AwaitEvent<BrokerLost>();
  broker_.lies().refuse_attach = true;
  broker_.Start();
  const absl::Status fatal = AwaitFatal();
  EXPECT_TRUE(absl::IsNotFound(fatal)) << fatal;
  EXPECT_FALSE(client_->gate().AwaitStage(0).ok());
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

TEST_F(GrpcMemoryClientTest, DetachWithoutABrokerDoesNotHang) {
  Connect();
  Activate();
  broker_.Kill();
  AwaitEvent<BrokerLost>();
  client_->Detach();
  EXPECT_EQ(client_->Mapped().kv, 0);
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
