#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "broker/core/prefetch/prefetch_planner.h"
#include "broker/core/prefetch/return_times.h"

namespace palimpsest::prefetch {
namespace {

absl::Time At(double seconds) { return absl::UnixEpoch() + absl::Seconds(seconds); }
BlockKey Key(uint64_t number) { return {7, number}; }

PrefetchPlanner Planner(size_t most_wishes = 10, size_t most_watched = 100) {
  return PrefetchPlanner({.tiers = {{}, {.latency = absl::Seconds(1), .bytes_per_second = 1000}},
                          .max_wishes = most_wishes,
                          .max_watched = most_watched});
}

Wish WishFor(uint64_t subject, double start, double deadline,
             Trigger trigger = Trigger::kTransition) {
  return {.subject = SubjectId(subject),
          .trigger = trigger,
          .start = At(start),
          .deadline = At(deadline)};
}

TEST(ReturnTimes, ExpectsWhatUsuallyHappens) {
  ReturnTimes times;
  EXPECT_FALSE(times.Expect(cache::Ending::kToolCall).has_value());
  for (int i = 0; i < 100; ++i) {
    times.OnEnd(cache::Ending::kToolCall);
    if (i % 2 == 0) times.OnReturn(cache::Ending::kToolCall, absl::Seconds(8));
  }
  times.OnReturn(cache::Ending::kToolCall, absl::Hours(5));
  const auto window = times.Expect(cache::Ending::kToolCall);
  ASSERT_TRUE(window.has_value());
  EXPECT_LE(window->early, absl::Seconds(8));
  EXPECT_GE(window->late, absl::Seconds(8));
  EXPECT_LT(window->late - window->early, absl::Seconds(4)) << "one in fifty does not widen it";
  EXPECT_NEAR(window->probability, 0.5, 0.02);
  EXPECT_FALSE(times.Expect(cache::Ending::kEndOfTurn).has_value()) << "nothing is known of these";
}

TEST(ReturnTimes, FollowsAChange) {
  ReturnTimes times;
  for (int i = 0; i < 5000; ++i) {
    times.OnEnd(cache::Ending::kToolCall);
    times.OnReturn(cache::Ending::kToolCall, absl::Seconds(i < 1000 ? 1 : 100));
  }
  EXPECT_GT(times.Expect(cache::Ending::kToolCall)->early, absl::Seconds(60));
}

TEST(PrefetchPlanner, WishesAreDueInOrderAndNotBefore) {
  PrefetchPlanner planner = Planner();
  EXPECT_EQ(planner.NextStart(), std::nullopt);
  EXPECT_TRUE(planner.Want(WishFor(1, 20, 30)));
  EXPECT_TRUE(planner.Want(WishFor(2, 10, 30)));
  EXPECT_TRUE(planner.Want(WishFor(3, 15, 16)));
  EXPECT_EQ(planner.NextStart(), At(10));
  EXPECT_FALSE(planner.TakeDue(At(9.9)).has_value());
  EXPECT_EQ(planner.TakeDue(At(21))->subject, SubjectId(2));
  EXPECT_EQ(planner.TakeDue(At(21))->subject, SubjectId(1)) << "the third came too late";
  EXPECT_FALSE(planner.TakeDue(At(21)).has_value());
  EXPECT_EQ(planner.all().late, 1);
}

TEST(PrefetchPlanner, ASubjectHasOneWishAndWeakTriggersDoNotReplaceStrongOnes) {
  PrefetchPlanner planner = Planner();
  EXPECT_TRUE(planner.Want(WishFor(1, 10, 20)));
  EXPECT_FALSE(planner.Want(WishFor(1, 5, 20, Trigger::kNextBlocks)));
  EXPECT_TRUE(planner.Want(WishFor(1, 7, 20, Trigger::kAnnounced)));
  EXPECT_EQ(planner.TakeDue(At(7))->trigger, Trigger::kAnnounced);
  EXPECT_FALSE(planner.TakeDue(At(15)).has_value());
  planner.Want(WishFor(2, 16, 20));
  planner.Cancel(SubjectId(2));
  planner.Cancel(SubjectId(3));
  EXPECT_EQ(planner.NextStart(), std::nullopt);
}

TEST(PrefetchPlanner, WishesAreBounded) {
  PrefetchPlanner planner = Planner(2);
  EXPECT_TRUE(planner.Want(WishFor(1, 1, 2)));
  EXPECT_TRUE(planner.Want(WishFor(2, 1, 2)));
  EXPECT_FALSE(planner.Want(WishFor(3, 1, 2)));
  EXPECT_TRUE(planner.Want(WishFor(2, 3, 4))) << "replaces its own";
  EXPECT_EQ(planner.all().refused, 1);
}

TEST(PrefetchPlanner, BudgetsGrantWhatIsThereByTheDeadline) {
  PrefetchPlanner planner = Planner();
  // A second of latency, then ten blocks a second.
  const Wish wish = WishFor(1, 0, 3.05);
  const auto first = planner.Begin(At(0), 1, 15, Bytes(100), wish);
  EXPECT_EQ(first.blocks, 15);
  EXPECT_EQ(first.complete, At(2.5));
  EXPECT_EQ(planner.Begin(At(0), 1, 9, Bytes(100), wish).blocks, 0)
      << "behind the first, with a second of latency, it is too late";
  const auto second = planner.Begin(At(2), 1, 9, Bytes(100), WishFor(2, 0, 4));
  EXPECT_EQ(second.blocks, 5) << "from 3.5 s to 4 s";
  EXPECT_EQ(planner.Begin(At(2), 0, 9, Bytes(100), wish).blocks, 0) << "no budget there";
  EXPECT_EQ(planner.all().unaffordable, 9 + 4 + 9);
}

TEST(PrefetchPlanner, CountsUseAndWaste) {
  PrefetchPlanner planner = Planner();
  planner.OnFetched(Key(1), Trigger::kTransition);
  planner.OnFetched(Key(1), Trigger::kAnnounced);
  planner.OnFetched(Key(2), Trigger::kTransition);
  planner.OnFetched(Key(3), Trigger::kAnnounced);
  planner.OnUsed(Key(1));
  planner.OnGone(Key(1));
  planner.OnGone(Key(2));
  planner.OnUsed(Key(9));
  const PrefetchCounts& counts = planner.counts(Trigger::kTransition);
  EXPECT_EQ(counts.fetched, 2);
  EXPECT_EQ(counts.used, 1);
  EXPECT_EQ(counts.wasted, 1);
  EXPECT_DOUBLE_EQ(counts.Precision(), 0.5);
  EXPECT_EQ(planner.all().fetched, 3);
  EXPECT_EQ(planner.watched(), 1);
}

TEST(PrefetchPlannerProperty, BudgetsAreNeverExceededAndWatchesAreBounded) {
  std::mt19937 random(3);
  PrefetchPlanner planner = Planner(20, 50);
  double now = 0;
  int64_t granted = 0;
  uint64_t key = 0;
  for (int step = 0; step < 5000; ++step) {
    now += static_cast<double>(random() % 10) / 10;
    const double start = now + static_cast<double>(random() % 20);
    planner.Want(WishFor(random() % 40, start, start + static_cast<double>(random() % 20),
                         static_cast<Trigger>(random() % kTriggers)));
    while (const auto wish = planner.TakeDue(At(now))) {
      EXPECT_LE(wish->start, At(now));
      EXPECT_GE(wish->deadline, At(now));
      const auto grant = planner.Begin(At(now), 1, random() % 50, Bytes(100), *wish);
      EXPECT_TRUE(grant.blocks == 0 || grant.complete <= wish->deadline);
      granted += static_cast<int64_t>(grant.blocks);
      for (size_t i = 0; i < grant.blocks; ++i) planner.OnFetched(Key(++key), wish->trigger);
    }
    if (key > 0)
      random() % 2 == 0 ? planner.OnUsed(Key(random() % key + 1)) : planner.OnGone(Key(key));
    ASSERT_LE(planner.watched(), 50);
  }
  EXPECT_GT(granted, 1000);
  EXPECT_LE(static_cast<double>(granted) * 100, 1000 * (now + 40)) << "1,000 bytes a second";
  const PrefetchCounts all = planner.all();
  EXPECT_EQ(all.fetched, all.used + all.wasted + static_cast<int64_t>(planner.watched()));
}

}  // namespace
}  // namespace palimpsest::prefetch
