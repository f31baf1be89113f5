#include "broker/core/peer_images.h"

#include <algorithm>
#include <map>
#include <random>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

constexpr absl::Time kNow = absl::UnixEpoch();
const SessionId kAlpha(1), kBeta(2);

class PeerImagesTest : public ::testing::Test {
 protected:
  // The only offer that is made now.
  PeerImages::Offer One() {
    const std::vector<PeerImages::Offer> offers = peers_.Decide(kNow);
    EXPECT_EQ(offers.size(), 1u);
    return offers.empty() ? PeerImages::Offer() : offers[0];
  }
  // Offered and taken.
  void Give(SessionId session, uint32_t slabs) {
    const PeerImages::Offer offer = One();
    EXPECT_EQ(offer.session, session);
    EXPECT_EQ(offer.slabs, slabs);
    peers_.Answer(session, offer.id, slabs);
  }

  PeerImages peers_{{.slabs = 10}};
};

TEST_F(PeerImagesTest, WhoComesLastHasWhatIsLeft) {
  peers_.Connect(kAlpha, 0, 3, 2);
  peers_.Connect(kBeta, 0, 6, 1);
  const auto offers = peers_.Decide(kNow);
  ASSERT_EQ(offers.size(), 2u);
  EXPECT_EQ(offers[0].slabs, 3u);
  EXPECT_EQ(offers[0].ranks, 2u);
  EXPECT_EQ(offers[1].slabs, 4u);
  EXPECT_EQ(peers_.free(), 0u);
  EXPECT_THAT(peers_.Decide(kNow), ::testing::IsEmpty());
}

TEST_F(PeerImagesTest, AHigherPriorityTakesCopiesBackAndWaitsForThem) {
  peers_.Connect(kAlpha, 0, 8, 1);
  Give(kAlpha, 8);
  peers_.Connect(kBeta, 1, 8, 1);
  const PeerImages::Offer back = One();
  EXPECT_EQ(back.session, kAlpha);
  EXPECT_EQ(back.slabs, 0u);
  EXPECT_EQ(peers_.Held(kAlpha), 8u);  // until it answers
  EXPECT_THAT(peers_.Decide(kNow), ::testing::IsEmpty());
  peers_.Answer(kAlpha, back.id, 0);
  const auto offers = peers_.Decide(kNow);
  ASSERT_EQ(offers.size(), 2u);
  EXPECT_EQ(offers[0].session, kBeta);
  EXPECT_EQ(offers[0].slabs, 8u);
  EXPECT_EQ(offers[1].session, kAlpha);
  EXPECT_EQ(offers[1].slabs, 2u);
}

TEST_F(PeerImagesTest, WhatAnEndedSessionHadMakesAPartWhole) {
  peers_.Connect(kAlpha, 0, 8, 1);
  Give(kAlpha, 8);
  peers_.Connect(kBeta, 0, 8, 1);
  Give(kBeta, 2);
  peers_.End(kAlpha);
  Give(kBeta, 0);
  Give(kBeta, 8);
}

TEST_F(PeerImagesTest, WhoCannotUseItIsOfferedNothingUntilItConnectsAgain) {
  peers_.Connect(kAlpha, 0, 8, 1);
  peers_.Answer(kAlpha, One().id, 0);
  EXPECT_EQ(peers_.free(), 10u);
  EXPECT_THAT(peers_.Decide(kNow), ::testing::IsEmpty());
  peers_.Disconnect(kAlpha);
  peers_.Connect(kAlpha, 0, 8, 1);
  Give(kAlpha, 8);
}

TEST_F(PeerImagesTest, DisconnectedSessionsKeepWhatTheyHad) {
  peers_.Connect(kAlpha, 0, 8, 1);
  Give(kAlpha, 8);
  peers_.Disconnect(kAlpha);
  peers_.Connect(kBeta, 5, 8, 1);
  Give(kBeta, 2);
  EXPECT_EQ(peers_.Held(kAlpha), 8u);
  peers_.Connect(kAlpha, 0, 8, 1);  // came back without
  EXPECT_EQ(peers_.Held(kAlpha), 0u);
  const auto offers = peers_.Decide(kNow);
  ASSERT_EQ(offers.size(), 2u);
  EXPECT_EQ(offers[0].session, kBeta);
  EXPECT_EQ(offers[0].slabs, 0u);
  EXPECT_EQ(offers[1].session, kAlpha);
  EXPECT_EQ(offers[1].slabs, 2u);
}

TEST_F(PeerImagesTest, WhoDoesNotAnswerIsLateOnce) {
  peers_.Connect(kAlpha, 0, 8, 1);
  const PeerImages::Offer offer = One();
  EXPECT_EQ(peers_.NextDeadline(), offer.deadline);
  EXPECT_THAT(peers_.TakeLate(offer.deadline - absl::Milliseconds(1)), ::testing::IsEmpty());
  EXPECT_THAT(peers_.TakeLate(offer.deadline), ::testing::ElementsAre(kAlpha));
  EXPECT_THAT(peers_.TakeLate(offer.deadline), ::testing::IsEmpty());
  EXPECT_EQ(peers_.Held(kAlpha), 8u);
  peers_.Answer(kAlpha, PeerImageId(offer.id.value() + 1), 0);  // of no open offer
  EXPECT_EQ(peers_.Held(kAlpha), 8u);
}

// Random sessions that come, go, answer and refuse: memory is never handed out twice, one offer is
// open for each, and once all answered, everybody has its share by priority and age.
TEST(PeerImagesModelTest, NeverMoreThanThereIsAndSharesInTheEnd) {
  std::mt19937 random(7);
  const auto below = [&random](uint32_t n) { return static_cast<uint32_t>(random() % n); };
  for (int run = 0; run < 200; ++run) {
    const uint32_t total = below(40);
    PeerImages peers({.slabs = total});
    struct Worker {
      int32_t priority;
      uint32_t image, ranks, has = 0;  // what its process may have mapped, all ranks
      bool connected = true;
      PeerImages::Offer open = {};
    };
    std::map<SessionId, Worker> workers;
    uint64_t next = 0;
    const auto decide = [&] {
      for (const PeerImages::Offer& offer : peers.Decide(kNow)) {
        Worker& worker = workers.at(offer.session);
        ASSERT_EQ(worker.open.id, PeerImageId(0));
        worker.open = offer;
        if (offer.slabs > 0) {
          ASSERT_EQ(worker.has, 0u);
          worker.has = offer.slabs * offer.ranks;
        }
      }
      uint32_t mapped = 0;
      for (const auto& [id, worker] : workers) mapped += worker.has;
      ASSERT_LE(mapped, total);
      ASSERT_EQ(peers.free(), total - mapped);
    };
    const auto answer = [&](SessionId id, Worker& worker) {
      if (worker.open.id == PeerImageId(0)) return;
      if (worker.open.slabs == 0) worker.has = 0;
      peers.Answer(id, worker.open.id, worker.open.slabs);
      worker.open = {};
    };
    for (int step = 0; step < 60; ++step) {
      const uint32_t what = below(5);
      if (what == 0 || workers.empty()) {
        const SessionId id(++next);
        Worker worker{static_cast<int32_t>(below(3)), 1 + below(12), 1 + below(2)};
        peers.Connect(id, worker.priority, worker.image, worker.ranks);
        workers[id] = worker;
      } else {
        auto at = std::next(workers.begin(), below(static_cast<uint32_t>(workers.size())));
        auto& [id, worker] = *at;
        if (what == 1) {
          peers.End(id);
          workers.erase(at);
        } else if (what == 2) {
          peers.Disconnect(id);
          worker.connected = false;
        } else if (what == 3 && !worker.connected) {
          worker.has = 0;
          worker.open = {};
          worker.connected = true;
          peers.Connect(id, worker.priority, worker.image, worker.ranks);
        } else if (worker.connected) {
          answer(id, worker);
        }
      }
      decide();
    }
    for (int round = 0; round < 4; ++round) {
      for (auto& [id, worker] : workers) {
        if (worker.connected) answer(id, worker);
      }
      decide();
    }
    uint32_t left = total;
    std::vector<std::pair<SessionId, Worker>> order;
    for (const auto& [id, worker] : workers) {
      if (worker.connected) {
        order.emplace_back(id, worker);
      } else {
        left -= worker.has;
      }
    }
    std::stable_sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
      return a.second.priority > b.second.priority;
    });
    for (const auto& [id, worker] : order) {
      const uint32_t share = std::min(worker.image, left / worker.ranks) * worker.ranks;
      EXPECT_EQ(peers.Held(id), share);
      left -= share;
    }
  }
}

}  // namespace
}  // namespace palimpsest
