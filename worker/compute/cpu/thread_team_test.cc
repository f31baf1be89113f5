#include "worker/compute/cpu/thread_team.h"

#include <atomic>
#include <random>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace palimpsest {
namespace {

// Phases of random sizes, each unit of which checks that the phase before is complete.
TEST(ThreadTeam, EveryUnitIsDoneOnceAndAfterAllOfThePhaseBefore) {
  std::mt19937 random(1);
  for (int threads = 1; threads <= 5; ++threads) {
    std::vector<int64_t> totals(60);
    for (int64_t& total : totals) total = static_cast<int64_t>(random() % 40);
    totals.back() = 3;
    std::vector<std::vector<std::atomic<int>>> done;
    for (const int64_t total : totals) done.emplace_back(total);
    std::vector<int> finished(totals.size());
    std::atomic<int> early{0};
    const auto complete = [&](size_t phase, int times) {
      for (const std::atomic<int>& unit : done[phase]) {
        if (unit.load(std::memory_order_relaxed) != times) return false;
      }
      return true;
    };
    int run = 0;
    ThreadTeam team(threads, [&](ThreadTeam::Member& member) {
      for (size_t phase = 0; phase < totals.size(); ++phase) {
        member.ForEach(
            totals[phase], 1 + static_cast<int64_t>(phase % 3),
            [&](int64_t first, int64_t last) {
              if (phase > 0 && !complete(phase - 1, run)) ++early;
              for (int64_t i = first; i < last; ++i) done[phase][i].fetch_add(1);
            },
            [&] { ++finished[phase]; });
      }
    });
    for (run = 1; run <= 30; ++run) {
      team.Start();
      team.Join();
      for (size_t phase = 0; phase < totals.size(); ++phase) {
        EXPECT_TRUE(complete(phase, run)) << "phase " << phase << " of run " << run;
        EXPECT_EQ(finished[phase], totals[phase] == 0 ? 0 : run);
      }
    }
    EXPECT_EQ(early, 0) << threads << " threads";
  }
}

TEST(ThreadTeam, RunGoesOnWithoutAThreadThatIsHeldUp) {
  std::atomic<bool> over{false};
  std::atomic<int> units{0};
  ThreadTeam team(3, [&](ThreadTeam::Member& member) {
    // Two threads enter, but get no CPU until all is done.
    while (member.thread() > 0 && !over.load()) std::this_thread::yield();
    for (int phase = 0; phase < 50; ++phase) {
      member.ForEach(8, 1,
                     [&](int64_t first, int64_t last) { units += static_cast<int>(last - first); });
    }
    over = true;
  });
  for (int run = 1; run <= 10; ++run) {
    over = false;
    team.Start();
    team.Join();
    EXPECT_EQ(units, run * 8 * 50);
  }
}

TEST(ThreadTeam, WritesOfAPhaseAreVisibleInTheNext) {
  // Plain memory: a missing synchronisation shows under the thread sanitizer.
  constexpr int64_t kSize = 64;
  std::vector<int64_t> a(kSize), b(kSize);
  int64_t sum = 0;
  ThreadTeam team(4, [&](ThreadTeam::Member& member) {
    member.ForEach(kSize, 1, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) a[i] = sum + i;
    });
    member.ForEach(kSize, 3, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) b[i] = a[kSize - 1 - i];
    });
    member.ForEach(1, 1, [&](int64_t, int64_t) {
      for (const int64_t v : b) sum += v;
    });
  });
  int64_t expected = 0;
  for (int run = 0; run < 5; ++run) {
    team.Start();
    team.Join();
    expected = expected + kSize * expected + kSize * (kSize - 1) / 2;
    EXPECT_EQ(sum, expected);
  }
}

TEST(ThreadTeam, JoinWithoutStartReturns) {
  ThreadTeam team(2, [](ThreadTeam::Member&) {});
  team.Join();
  team.Start();
  team.Join();
  team.Join();
}

}  // namespace
}  // namespace palimpsest
