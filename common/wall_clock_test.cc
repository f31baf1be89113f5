// The wall clock is set while others wait: nobody may notice. This program has a clock_gettime of
// its own, which every library in the process calls too.
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <ctime>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>

#include "absl/time/clock.h"
#include "common/clock.h"
#include "common/descriptor_channel.h"
#include "common/grpc_time.h"
#include "common/monotonic_time.h"
#include "common/mutex.h"
#include "common/process.h"
#include "gtest/gtest.h"

namespace {

std::atomic<int64_t> wall_shift_seconds{0};

}  // namespace

extern "C" __attribute__((no_sanitize("thread", "address"))) int clock_gettime(
    clockid_t clock, timespec* time) noexcept {
  const long result = ::syscall(SYS_clock_gettime, clock, time);
  if (clock == CLOCK_REALTIME && result == 0) {
    time->tv_sec += wall_shift_seconds.load(std::memory_order_relaxed);
  }
  return static_cast<int>(result);
}

namespace palimpsest {
namespace {

constexpr absl::Duration kShort = absl::Milliseconds(20);
constexpr absl::Duration kPatience = absl::Seconds(60);

// By a clock that nothing here touches.
absl::Duration RealTimeOf(const std::function<void()>& action) {
  const auto start = std::chrono::steady_clock::now();
  action();
  return absl::FromChrono(std::chrono::steady_clock::now() - start);
}

class WallClock : public testing::TestWithParam<absl::Duration> {
 protected:
  // Sets the wall clock and waits until absl, which looks at it now and then, has seen it.
  void Set() {
    const absl::Time expected = absl::Now() + GetParam();
    wall_shift_seconds += absl::ToInt64Seconds(GetParam());
    const auto start = std::chrono::steady_clock::now();
    while (absl::AbsDuration(absl::Now() - expected) > absl::Minutes(1)) {
      ASSERT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30))
          << "the wall clock of this process cannot be set";
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Steps, WallClock, testing::Values(absl::Hours(9), -absl::Hours(9)),
                         [](const auto& info) {
                           return info.param > absl::ZeroDuration() ? "Forward" : "Back";
                         });

TEST_P(WallClock, ClocksGoOnAsIfNothingHappened) {
  const absl::Time monotonic = MonotonicNow();
  const absl::Time clock = Clock::Real().Now();
  Set();
  for (const absl::Duration passed : {MonotonicNow() - monotonic, Clock::Real().Now() - clock}) {
    EXPECT_GE(passed, absl::ZeroDuration());
    EXPECT_LT(passed, kPatience);
  }
}

TEST_P(WallClock, ADeadlineIsNeitherFiredNorPutOff) {
  Mutex mutex;
  CondVar changed;
  const absl::Time far = MonotonicNow() + kPatience;
  const absl::Time near = MonotonicNow() + kShort;
  Set();
  bool fired = true;
  std::thread waits([&] {
    MutexLock lock(&mutex);
    fired = changed.WaitWithDeadline(&mutex, far);
  });
  EXPECT_LT(RealTimeOf([&] {
              CondVar never;
              MutexLock lock(&mutex);
              while (!never.WaitWithDeadline(&mutex, near)) {
              }
              while (!never.WaitWithTimeout(&mutex, kShort)) {
              }
              changed.Signal();
            }),
            kPatience);
  waits.join();
  EXPECT_FALSE(fired);
}

TEST_P(WallClock, AWaitThatRunsIsNeitherCutShortNorPutOff) {
  Notification never, begun, happened;
  std::thread waits([&] {
    begun.Notify();
    EXPECT_FALSE(never.WaitForNotificationWithTimeout(absl::Milliseconds(200)));
    EXPECT_TRUE(happened.WaitForNotificationWithTimeout(kPatience));
  });
  begun.WaitForNotification();
  EXPECT_LT(RealTimeOf([&] {
              Set();
              happened.Notify();
              waits.join();
            }),
            kPatience);
}

TEST_P(WallClock, DescriptorSocketsTimeOutAsAsked) {
  std::string folder = "/tmp/palimpsest-clock.XXXXXX";
  ASSERT_NE(::mkdtemp(folder.data()), nullptr);
  absl::StatusOr<DescriptorListener> listener = DescriptorListener::Listen(folder + "/s", 0600);
  ASSERT_TRUE(listener.ok()) << listener.status();
  absl::StatusOr<DescriptorChannel> client = DescriptorChannel::Connect(folder + "/s");
  ASSERT_TRUE(client.ok()) << client.status();
  absl::Status status;
  std::thread receives([&] { status = client->Receive(absl::Seconds(1)).status(); });
  EXPECT_LT(RealTimeOf([&] {
              Set();
              receives.join();
            }),
            kPatience);
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  std::filesystem::remove_all(folder);
}

TEST_P(WallClock, AChildIsAwaitedAsLongAsAsked) {
  absl::StatusOr<ChildProcess> child = ChildProcess::Spawn({.argv = {"/bin/sleep", "1"}});
  ASSERT_TRUE(child.ok()) << child.status();
  absl::Status status;
  std::thread waits([&] { status = child->Wait(kPatience); });
  Set();
  waits.join();
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(WallClock, DeadlinesOfGrpcStayWhereTheyAre) {
  const gpr_timespec deadline = GrpcTimeout(kPatience);
  Set();
  const absl::Duration left = FromGrpcDeadline(deadline) - MonotonicNow();
  EXPECT_LE(left, kPatience);
  EXPECT_GT(left, absl::ZeroDuration());
}

TEST(GrpcTime, InfiniteAndHugeTimeoutsAreNever) {
  EXPECT_EQ(FromGrpcDeadline(GrpcTimeout(absl::InfiniteDuration())), absl::InfiniteFuture());
  EXPECT_EQ(FromGrpcDeadline(GrpcDeadline(absl::InfiniteFuture())), absl::InfiniteFuture());
  EXPECT_GT(FromGrpcDeadline(GrpcTimeout(absl::Hours(1e12))), MonotonicNow() + absl::Hours(1e5));
  const absl::Time past = FromGrpcDeadline(GrpcDeadline(absl::InfinitePast()));
  EXPECT_LE(past, MonotonicNow());
}

}  // namespace
}  // namespace palimpsest
