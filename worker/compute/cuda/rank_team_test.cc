#include "worker/compute/cuda/rank_team.h"

#include <thread>
#include <vector>

#include "common/mutex.h"
#include "gtest/gtest.h"
#include "worker/compute/cuda/lockstep_gate.h"
#include "worker/compute/cuda/rank_meeting.h"

namespace palimpsest::cuda {
namespace {

TEST(RankTeam, RunsWorkOnEachRanksOwnThread) {
  RankTeam team(3);
  std::vector<std::thread::id> first(3), second(3);
  team.Run([&](int rank) { first[rank] = std::this_thread::get_id(); });
  team.Run([&](int rank) { second[rank] = std::this_thread::get_id(); });
  EXPECT_EQ(first, second);
  EXPECT_NE(first[0], first[1]);
  EXPECT_NE(first[1], first[2]);
}

TEST(RankTeam, ReturnsWhenAllAreDone) {
  RankTeam team(2);
  int sum = 0;
  Mutex mutex;
  for (int round = 0; round < 500; ++round) {
    team.Run([&](int rank) {
      MutexLock lock(&mutex);
      sum += 1 + rank;
    });
    MutexLock lock(&mutex);
    ASSERT_EQ(sum, 3 * (round + 1));
  }
}

TEST(RankMeeting, OneDecidesForAll) {
  constexpr int kRanks = 3, kMeetings = 400;
  RankMeeting meeting(kRanks);
  RankTeam team(kRanks);
  int decided = 0;
  int shared = 0;
  team.Run([&](int) {
    for (int i = 0; i < kMeetings; ++i) {
      const absl::Status status = meeting.Meet([&] {
        ++decided;
        shared = i;
        return i % 7 == 3 ? absl::UnavailableError("closed") : absl::OkStatus();
      });
      ASSERT_EQ(status.ok(), i % 7 != 3);
      ASSERT_EQ(shared, i);
    }
  });
  EXPECT_EQ(decided, kMeetings);
}

TEST(RankMeeting, AbortEndsThoseWhoWaitAndLaterMeetings) {
  RankMeeting meeting(2);
  const absl::Status error = absl::InternalError("rank 1 lost its GPU");
  absl::Status waited, later;
  RankTeam team(2);
  team.Run([&](int rank) {
    if (rank == 0) {
      waited = meeting.Meet([] { return absl::OkStatus(); });
      later = meeting.Meet([] { return absl::OkStatus(); });
    } else {
      meeting.Abort(error);
      meeting.Abort(absl::InternalError("another"));
    }
  });
  EXPECT_EQ(waited, error);
  EXPECT_EQ(later, error);
  EXPECT_EQ(meeting.aborted(), error);
}

TEST(RankMeeting, AbortWhileOneDecidesEndsTheMeetingForAll) {
  RankMeeting meeting(2);
  std::vector<absl::Status> statuses(2);
  RankTeam team(2);
  team.Run([&](int rank) {
    statuses[rank] = meeting.Meet([&] {
      meeting.Abort(absl::InternalError("lost"));
      return absl::OkStatus();
    });
  });
  EXPECT_EQ(statuses[0], absl::InternalError("lost"));
  EXPECT_EQ(statuses[1], statuses[0]);
}

class CountingGate : public ParameterGate {
 public:
  absl::Status AwaitStage(int stage) override {
    ++asked;
    return stage == closed ? absl::UnavailableError("closed") : absl::OkStatus();
  }
  absl::Status StageEvents(int stage, absl::Span<void*> events) override {
    for (size_t rank = 0; rank < events.size(); ++rank) {
      events[rank] = reinterpret_cast<void*>(static_cast<uintptr_t>(100 * (stage + 1)) + rank);
    }
    return AwaitStage(stage);
  }

  int asked = 0;
  int closed = -1;
};

TEST(LockstepGate, IsAskedOnceAndGivesEachRankItsEvent) {
  constexpr int kRanks = 3, kStages = 50;
  CountingGate gate;
  gate.closed = 20;
  RankMeeting meeting(kRanks);
  LockstepGate lockstep(&gate, &meeting, kRanks);
  RankTeam team(kRanks);
  team.Run([&](int rank) {
    for (int stage = 0; stage < kStages; ++stage) {
      void* event = nullptr;
      const absl::Status status =
          lockstep.rank(rank)->StageEvents(stage, absl::MakeSpan(&event, 1));
      ASSERT_EQ(status.ok(), stage != gate.closed);
      if (status.ok()) {
        ASSERT_EQ(reinterpret_cast<uintptr_t>(event),
                  static_cast<uintptr_t>(100 * (stage + 1) + rank));
      }
    }
    ASSERT_TRUE(lockstep.rank(rank)->AwaitStage(0).ok());
  });
  EXPECT_EQ(gate.asked, kStages + 1);
}

}  // namespace
}  // namespace palimpsest::cuda
