#include "common/file_lock.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace palimpsest {
namespace {

TEST(FileLock, OneHolderAtATime) {
  const std::string path = ::testing::TempDir() + "/locks/of-a-test";
  std::atomic<int> holders = 0;
  std::atomic<int> turns = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int turn = 0; turn < 200; ++turn) {
        const absl::StatusOr<FileLock> lock = FileLock::Acquire(path);
        ASSERT_TRUE(lock.ok()) << lock.status();
        EXPECT_EQ(++holders, 1);
        ++turns;
        --holders;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(turns, 800);
}

TEST(FileLock, PathThatCannotBeMadeIsNamed) {
  const absl::Status status = FileLock::Acquire("/proc/no/lock").status();
  EXPECT_NE(status.message().find("/proc/no/lock"), std::string::npos) << status;
}

class StartLockTest : public ::testing::Test {
 protected:
  StartLockTest() {
    std::string name = ::testing::TempDir() + "/start-lock-XXXXXX";
    EXPECT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
    for (const char* tenant : {"alpha", "beta"}) {
      std::filesystem::create_directory(folder_ + "/" + tenant);
      sockets_.push_back(folder_ + "/" + tenant + "/broker.sock");
    }
  }
  ~StartLockTest() override { std::filesystem::remove_all(folder_); }

  absl::StatusOr<FileLock> Join(size_t socket, absl::Duration patience = absl::ZeroDuration()) {
    return FileLock::Join(StartLockPath(sockets_[socket]), patience);
  }

  std::string folder_;
  std::vector<std::string> sockets_;
};

TEST_F(StartLockTest, IsOneLockInAllFoldersAndStaysSoWhenTheBrokerRestarts) {
  EXPECT_TRUE(absl::IsNotFound(Join(0).status()));
  ASSERT_TRUE(MakeStartLocks(sockets_).ok());
  absl::StatusOr<FileLock> alpha = Join(0);
  ASSERT_TRUE(alpha.ok()) << alpha.status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(Join(1, absl::Milliseconds(1)).status()));
  ASSERT_TRUE(MakeStartLocks(sockets_).ok());
  EXPECT_TRUE(absl::IsDeadlineExceeded(Join(1).status()));
  // Something else at the place of a name.
  ASSERT_TRUE(std::filesystem::remove(StartLockPath(sockets_[1])));
  ASSERT_EQ(symlink("/dev/null", StartLockPath(sockets_[1]).c_str()), 0);
  EXPECT_FALSE(Join(1).ok());
  ASSERT_TRUE(MakeStartLocks(sockets_).ok());
  EXPECT_TRUE(absl::IsDeadlineExceeded(Join(1).status()));
  alpha = absl::CancelledError("let go");
  EXPECT_TRUE(Join(1).ok());
}

TEST_F(StartLockTest, AFolderThatIsNotThereDoesNotConcernTheOthers) {
  sockets_.insert(sockets_.begin() + 1, folder_ + "/gone/broker.sock");
  EXPECT_FALSE(MakeStartLocks(sockets_).ok());
  const absl::StatusOr<FileLock> alpha = Join(0);
  ASSERT_TRUE(alpha.ok()) << alpha.status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(Join(2).status()));
}

TEST_F(StartLockTest, AHolderThatIsKilledHoldsNobodyUp) {
  ASSERT_TRUE(MakeStartLocks(sockets_).ok());
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t holder = fork();
  if (holder == 0) {
    const absl::StatusOr<FileLock> lock = Join(0);
    const char held = lock.ok() ? 'y' : 'n';
    (void)!write(ready[1], &held, 1);
    for (;;) pause();
  }
  char held = 0;
  ASSERT_EQ(read(ready[0], &held, 1), 1);
  EXPECT_EQ(held, 'y');
  EXPECT_TRUE(absl::IsDeadlineExceeded(Join(1).status()));
  ASSERT_EQ(kill(holder, SIGKILL), 0);
  // It need not have been reaped.
  EXPECT_TRUE(Join(1, absl::Seconds(20)).ok());
  EXPECT_EQ(waitpid(holder, nullptr, 0), holder);
  close(ready[0]);
  close(ready[1]);
}

}  // namespace
}  // namespace palimpsest
