// Brokers that die, come back and say no.
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "worker/memory/grpc_memory_client_fixture.h"

namespace palimpsest {
namespace {

using ::testing::ElementsAre;
using ::testing::UnorderedElementsAre;
using ::testing::UnorderedElementsAreArray;
using MemoryClientReattachTest = GrpcMemoryClientTest;

TEST_F(MemoryClientReattachTest, EverythingHeldIsReturnedToTheNextBroker) {
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

TEST_F(MemoryClientReattachTest, SlabsGivenBackWithoutABrokerAreEitherNotClaimedOrReleased) {
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

TEST_F(MemoryClientReattachTest, OpenRevokesAreVoidWhenTheBrokerIsLost) {
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

TEST_F(MemoryClientReattachTest, TurnsArePassedOnAndOldOnesAreNotAnswered) {
  broker_.set_turns(true);
  Connect();
  EXPECT_TRUE(AwaitEvent<BrokerConnected>().turns);
  broker_.TakeTurn(7);
  EXPECT_EQ(AwaitEvent<TurnBegun>().id, TurnId(7));
  broker_.EndTurn(7);
  EXPECT_EQ(AwaitEvent<TurnEnding>().id, TurnId(7));
  client_->FinishTurn(TurnId(7));
  EXPECT_EQ(broker_.Await(Case::kTurnEnded).turn_ended().turn_id(), 7u);

  broker_.TakeTurn(8);
  broker_.EndTurn(8);
  AwaitEvent<TurnEnding>();
  broker_.Kill();
  AwaitEvent<BrokerLost>();
  broker_.Start();
  EXPECT_TRUE(AwaitEvent<BrokerConnected>().turns);
  broker_.AwaitAttached(2);
  client_->FinishTurn(TurnId(8));
  broker_.TakeTurn(9);
  broker_.EndTurn(9);
  EXPECT_EQ(AwaitEvent<TurnEnding>().id, TurnId(9));
  client_->FinishTurn(TurnId(9));
  EXPECT_EQ(broker_.Await(Case::kTurnEnded).turn_ended().turn_id(), 9u);
}

TEST_F(MemoryClientReattachTest, PendingActivationIsRepeatedAfterReattach) {
  Connect();
  client_->RequestActivation(ActivationReason::kRequest);
  broker_.Await(Case::kActivate);
  broker_.Kill();
  AwaitEvent<BrokerLost>();
  broker_.Start();
  broker_.AwaitAttached(2);
  EXPECT_EQ(broker_.Await(Case::kActivate).activate().reason(), v1::Activate::REASON_REQUEST);
}

// Otherwise the broker would see a demand for what just came back, and grant it again. Both wait to
// be sent when the session begins.
TEST_F(MemoryClientReattachTest, ALowerTargetIsToldBeforeTheSlabsAboveItComeBack) {
  Connect();
  client_->SetKvTarget(2, 0);
  ASSERT_EQ(GrantKv({10, 11}), Indexes({0, 1}));
  WhileAttaching([this] {
    client_->ReleaseKv(Indexes({1}));
    const absl::Time deadline = MonotonicNow() + kPatience;
    while (client_->Mapped().kv == 2 && MonotonicNow() < deadline) std::this_thread::yield();
    client_->SetKvTarget(1, 0);
  });
  broker_.Kill();
  broker_.Start();
  broker_.AwaitAttached(2);
  const std::vector<Case> either = {Case::kSetKvTarget, Case::kReleaseKv};
  EXPECT_EQ(broker_.Await(either).set_kv_target().target_slabs(), 1);
  EXPECT_THAT(broker_.Await(either).release_kv().slab_ids(), ElementsAre(11));
}

TEST_F(MemoryClientReattachTest, BrokerKilledRightAfterAGrantLeavesAWholeState) {
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

TEST_F(MemoryClientReattachTest, RefusalAtReattachIsFatal) {
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

TEST_F(MemoryClientReattachTest, DetachWithoutABrokerDoesNotHang) {
  Connect();
  Activate();
  broker_.Kill();
  AwaitEvent<BrokerLost>();
  client_->Detach();
  EXPECT_EQ(client_->Mapped().kv, 0);
}

// A random history of grants, revokes, releases and deaths of the broker; after each step the
// client holds exactly what the broker's book says, and every byte is what it should be.
class MemoryClientHistoryTest : public GrpcMemoryClientTest {
 protected:
  using Book = std::map<uint32_t, uint32_t>;  // place to slab

  MemoryClientHistoryTest() {
    for (uint32_t i = 0; i < FakeBroker::kPoolSlabs; ++i) free_.insert(i);
  }

  void Step() {
    switch (random_() % 6) {
      case 0:
        return GrantImage();
      case 1:
        return GrantSomeKv();
      case 2:
        return RevokeImage();
      case 3:
      case 4:
        return GiveBackKv();
      default:
        if (random_() % 3 == 0) RestartBroker();
    }
  }

  void ExpectAgreement() {
    ASSERT_EQ(client_->Mapped().kv, kv_.size());
    ASSERT_EQ(client_->ParametersAvailable(), parameters_.size() == FakeBroker::kImageSlabs);
    if (client_->ParametersAvailable()) {
      ASSERT_TRUE(AwaitAllStages().ok());
    }
    for (const auto& [place, slab] : parameters_) ASSERT_TRUE(SlabIsRestored(place));
    for (const auto& [place, slab] : kv_) {
      const std::byte* const bytes = client_->kv() + place * kSlabBytes;
      ASSERT_EQ(bytes[0], std::byte(slab + 1));
      ASSERT_EQ(std::memcmp(bytes, bytes + 1, kSlabBytes - 1), 0);
    }
  }

 private:
  uint32_t TakeFree() { return free_.extract(free_.begin()).value(); }

  std::vector<uint32_t> SomePlaces(const Book& book) {
    std::vector<uint32_t> places;
    for (const auto& [place, slab] : book) {
      if (random_() % 2 == 0) places.push_back(place);
    }
    return places;
  }

  // Strikes the places out of the book and returns their slabs.
  std::vector<uint32_t> StrikeOut(Book& book, const std::vector<uint32_t>& places) {
    std::vector<uint32_t> slabs;
    for (const uint32_t place : places) slabs.push_back(book.extract(place).mapped());
    free_.insert(slabs.begin(), slabs.end());
    return slabs;
  }

  void GrantImage() {
    std::vector<uint32_t> slabs, places;
    for (uint32_t place = 0; place < FakeBroker::kImageSlabs; ++place) {
      if (parameters_.contains(place) || free_.empty() || random_() % 4 == 0) continue;
      places.push_back(place);
      slabs.push_back(parameters_[place] = TakeFree());
    }
    if (places.empty()) return;
    broker_.Grant(v1::SLAB_ROLE_PARAMETER, slabs, places);
    broker_.Await(Case::kGrantMapped);
  }

  void GrantSomeKv() {
    std::vector<uint32_t> slabs;
    while (!free_.empty() && slabs.size() < 1 + random_() % 5) slabs.push_back(TakeFree());
    if (slabs.empty()) return;
    const std::vector<RegionIndex> places = GrantKv(slabs);
    ASSERT_EQ(places.size(), slabs.size());
    for (size_t i = 0; i < slabs.size(); ++i) {
      kv_[places[i].value()] = slabs[i];
      std::memset(client_->kv() + places[i].value() * kSlabBytes, slabs[i] + 1, kSlabBytes);
    }
  }

  void RevokeImage() {
    const std::vector<uint32_t> places = SomePlaces(parameters_);
    if (places.empty()) return;
    broker_.RevokeParameters(places);
    client_->FinishParameterRevoke(AwaitEvent<ParametersRevoked>().id);
    EXPECT_THAT(broker_.Await(Case::kRevokeDone).revoke_done().slab_ids(),
                UnorderedElementsAreArray(StrikeOut(parameters_, places)));
  }

  void GiveBackKv() {
    const std::vector<uint32_t> places = SomePlaces(kv_);
    if (places.empty()) return;
    const std::vector<uint32_t> slabs = StrikeOut(kv_, places);
    if (random_() % 2 == 0) {
      broker_.RevokeKv(static_cast<uint32_t>(places.size()));
      client_->FinishKvRevoke(AwaitEvent<KvRevoked>().id, Indexes(places));
      EXPECT_THAT(broker_.Await(Case::kRevokeDone).revoke_done().slab_ids(),
                  UnorderedElementsAreArray(slabs));
    } else {
      client_->ReleaseKv(Indexes(places));
      EXPECT_THAT(broker_.Await(Case::kReleaseKv).release_kv().slab_ids(),
                  UnorderedElementsAreArray(slabs));
    }
  }

  void RestartBroker() {
    const std::vector<uint32_t> places = SomePlaces(parameters_);
    if (!places.empty()) broker_.RevokeParameters(places);  // never answered
    broker_.Kill();
    AwaitEvent<BrokerLost>();
    broker_.Start();
    broker_.AwaitAttached(++attached_);
    AwaitEvent<BrokerConnected>();
    std::vector<std::string> held;
    for (const auto& [place, slab] : parameters_)
      held.push_back(absl::StrCat("p", place, "=", slab));
    for (const auto& [place, slab] : kv_) held.push_back(absl::StrCat("kv", place, "=", slab));
    ASSERT_THAT(HeldAtAttach(), UnorderedElementsAreArray(held));
    ASSERT_EQ(broker_.returned_slabs().size(), held.size());
  }

  std::mt19937 random_{11};
  Book parameters_;
  Book kv_;
  std::set<uint32_t> free_;
  int attached_ = 1;
};

TEST_F(MemoryClientHistoryTest, RandomHistoriesLeaveBothSidesInAgreement) {
  Connect();
  for (int step = 0; step < 150; ++step) {
    SCOPED_TRACE(step);
    Step();
    ExpectAgreement();
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace palimpsest
