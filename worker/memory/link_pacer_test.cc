#include "worker/memory/link_pacer.h"

#include <algorithm>
#include <random>
#include <thread>
#include <vector>

#include "common/monotonic_time.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

using Kind = LinkPacer::Kind;

constexpr absl::Time kStart = absl::UnixEpoch();

double TurnAfter(PacedQueue& queue, double place, absl::Time now) {
  return absl::ToDoubleSeconds(queue.Turn(place, now) - kStart);
}

TEST(PacedQueue, WithoutARateEverythingGoesAtOnce) {
  PacedQueue queue;
  for (int i = 0; i < 3; ++i) EXPECT_EQ(queue.Turn(queue.Enter(GiB(1), kStart), kStart), kStart);
  EXPECT_FALSE(queue.limited());
}

TEST(PacedQueue, CopiesFollowEachOtherAtTheRate) {
  PacedQueue queue;
  queue.SetRate(100, kStart);
  const double first = queue.Enter(Bytes(200), kStart);
  const double second = queue.Enter(Bytes(300), kStart);
  const double third = queue.Enter(Bytes(100), kStart);
  EXPECT_EQ(TurnAfter(queue, first, kStart), 0);
  EXPECT_EQ(TurnAfter(queue, second, kStart), 2);
  EXPECT_EQ(TurnAfter(queue, third, kStart), 5);
}

TEST(PacedQueue, NothingIsSavedUp) {
  PacedQueue queue;
  queue.SetRate(100, kStart);
  const absl::Time later = kStart + absl::Hours(1);
  EXPECT_EQ(queue.Turn(queue.Enter(Bytes(500), later), later), later);
  EXPECT_EQ(queue.Turn(queue.Enter(Bytes(500), later), later), later + absl::Seconds(5));
}

TEST(PacedQueue, ANewRateCountsFromWhenItComes) {
  PacedQueue queue;
  queue.SetRate(100, kStart);
  queue.Enter(Bytes(1000), kStart);
  const double place = queue.Enter(Bytes(1), kStart);
  queue.SetRate(1000, kStart + absl::Seconds(5));
  EXPECT_EQ(TurnAfter(queue, place, kStart + absl::Seconds(5)), 5.5);
  queue.SetRate(0, kStart + absl::Seconds(5.25));
  EXPECT_EQ(TurnAfter(queue, place, kStart + absl::Seconds(5.25)), 5.25);
  // What went freely is not made up for.
  queue.SetRate(1, kStart + absl::Seconds(6));
  EXPECT_EQ(
      TurnAfter(queue, queue.Enter(Bytes(9), kStart + absl::Seconds(6)), kStart + absl::Seconds(6)),
      6);
}

// Copies of random sizes that ask at random times: whichever window one looks at, what begins in it
// is the rate times its length and one copy at most; nobody overtakes; and a backlog uses all of
// the rate.
TEST(PacedQueueProperty, NeverFasterThanTheRateAndNeverSlowerForThoseThatWait) {
  std::mt19937 random(5);
  const auto real = [&](double least, double most) {
    return std::uniform_real_distribution<double>(least, most)(random);
  };
  for (int round = 0; round < 200; ++round) {
    const double rate = real(1e3, 1e9);
    PacedQueue queue;
    queue.SetRate(rate, kStart);
    struct Begun {
      double asked, at, bytes;
    };
    std::vector<Begun> begun;
    absl::Time now = kStart;
    for (int i = 0; i < 40; ++i) {
      if (real(0, 1) < 0.3) now += absl::Seconds(real(0, 3));
      const Bytes bytes(static_cast<int64_t>(real(1, rate)));
      const double place = queue.Enter(bytes, now);
      begun.push_back({absl::ToDoubleSeconds(now - kStart), TurnAfter(queue, place, now),
                       static_cast<double>(bytes.count())});
    }
    double free_at = 0;
    for (size_t i = 0; i < begun.size(); ++i) {
      ASSERT_NEAR(begun[i].at, std::max(begun[i].asked, free_at), 1e-6);
      free_at = begun[i].at + begun[i].bytes / rate;
      double window = 0;
      for (size_t j = i; j < begun.size(); ++j) {
        ASSERT_GE(begun[j].at, begun[i].at - 1e-9);
        ASSERT_LE(window, rate * (begun[j].at - begun[i].at) + 1e-3 * rate);
        window += begun[j].bytes;
      }
    }
  }
}

TEST(LinkPacer, CountsByKindAndWaitsForNobodyWithoutALimit) {
  LinkPacer pacer([](Kind, absl::Duration) { ADD_FAILURE() << "nothing is limited"; });
  pacer.AwaitTurn(Kind::kRestore, MiB(2));
  pacer.AwaitTurn(Kind::kBlocks, MiB(3));
  pacer.AwaitTurn(Kind::kRestore, MiB(4));
  EXPECT_EQ(pacer.copied(Kind::kRestore), MiB(6));
  EXPECT_EQ(pacer.copied(Kind::kBlocks), MiB(3));
  EXPECT_EQ(pacer.waited(Kind::kRestore), absl::ZeroDuration());
}

TEST(LinkPacer, HoldsBackToTheLimit) {
  absl::Duration told;
  LinkPacer pacer([&](Kind kind, absl::Duration waited) {
    EXPECT_EQ(kind, Kind::kRestore);
    told += waited;
  });
  pacer.SetLimit(100e6);
  EXPECT_TRUE(pacer.limited());
  const absl::Time begin = MonotonicNow();
  for (int i = 0; i < 6; ++i) pacer.AwaitTurn(Kind::kRestore, Bytes(1'000'000));
  EXPECT_GE(MonotonicNow() - begin, absl::Milliseconds(50));
  EXPECT_EQ(pacer.waited(Kind::kRestore), told);
  EXPECT_GT(told, absl::ZeroDuration());
}

// With this rate a copy would wait for days.
TEST(LinkPacer, AHigherLimitAndTheEndWakeThoseThatWait) {
  for (const bool ends : {false, true}) {
    LinkPacer pacer;
    pacer.SetLimit(1);
    pacer.AwaitTurn(Kind::kRestore, MiB(1));
    std::vector<std::thread> copies;
    for (const Kind kind : {Kind::kRestore, Kind::kBlocks}) {
      copies.emplace_back([&pacer, kind] { pacer.AwaitTurn(kind, MiB(1)); });
    }
    if (ends) {
      pacer.Open();
    } else {
      pacer.SetLimit(1e15);
    }
    for (std::thread& copy : copies) copy.join();
    if (ends) pacer.SetLimit(1);
    if (ends) pacer.AwaitTurn(Kind::kBlocks, MiB(1));
    EXPECT_EQ(pacer.copied(Kind::kBlocks), ends ? MiB(2) : MiB(1));
  }
}

}  // namespace
}  // namespace palimpsest
