#include "common/file_lock.h"

#include <atomic>
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

}  // namespace
}  // namespace palimpsest
