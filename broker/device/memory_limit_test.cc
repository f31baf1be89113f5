#include "broker/device/memory_limit.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

using ::testing::HasSubstr;

class MemoryLimitTest : public ::testing::Test {
 protected:
  MemoryLimitTest() {
    char name[] = "/tmp/memory_limit_test.XXXXXX";
    root_ = ::mkdtemp(name);
    Write("/proc/meminfo", "MemTotal:       33554432 kB\nMemAvailable:   16777216 kB\n");
  }
  ~MemoryLimitTest() override { std::filesystem::remove_all(root_); }

  void Write(const std::string& path, const std::string& text) {
    const std::filesystem::path full = root_ + path;
    std::filesystem::create_directories(full.parent_path());
    std::ofstream(full) << text;
  }
  std::string Refusal(Bytes needed) {
    const absl::Status status = CheckMemoryLimit(needed, root_);
    EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
    return std::string(status.message());
  }

  std::string root_;
};

TEST_F(MemoryLimitTest, AvailableMemoryIsTheBoundWithoutGroups) {
  EXPECT_TRUE(CheckMemoryLimit(GiB(16), root_).ok());
  EXPECT_THAT(Refusal(GiB(16) + Bytes(1)), HasSubstr("the machine has 16 GiB available"));
}

TEST_F(MemoryLimitTest, VersionTwoCountsUseWithoutDroppableCache) {
  Write("/proc/self/cgroup", "0::/pods/broker\n");
  Write("/sys/fs/cgroup/pods/broker/memory.max", "4294967296\n");
  Write("/sys/fs/cgroup/pods/broker/memory.current", "2147483648\n");
  Write("/sys/fs/cgroup/pods/broker/memory.stat", "anon 1\ninactive_file 1073741824\n");
  EXPECT_TRUE(CheckMemoryLimit(GiB(3), root_).ok());
  EXPECT_THAT(Refusal(GiB(3) + Bytes(1)), HasSubstr("pods/broker/memory.max is 4 GiB and 1 GiB"));
}

TEST_F(MemoryLimitTest, LimitsOfParentsCount) {
  Write("/proc/self/cgroup", "0::/pods/broker\n");
  Write("/sys/fs/cgroup/pods/broker/memory.max", "max\n");
  Write("/sys/fs/cgroup/pods/memory.max", "1073741824\n");
  EXPECT_TRUE(CheckMemoryLimit(GiB(1), root_).ok());
  EXPECT_THAT(Refusal(GiB(2)), HasSubstr("/pods/memory.max"));
}

TEST_F(MemoryLimitTest, ContainerRootIsItsOwnGroup) {
  for (const char* path : {"0::/\n", "0::/../../outside\n"}) {
    Write("/proc/self/cgroup", path);
    Write("/sys/fs/cgroup/memory.max", "1073741824\n");
    EXPECT_THAT(Refusal(GiB(2)), HasSubstr("/sys/fs/cgroup/memory.max"));
  }
}

TEST_F(MemoryLimitTest, VersionOne) {
  Write("/proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/\n");
  Write("/sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes", "2147483648\n");
  Write("/sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes", "1073741824\n");
  EXPECT_TRUE(CheckMemoryLimit(GiB(1), root_).ok());
  EXPECT_THAT(Refusal(GiB(1) + MiB(1)), HasSubstr("memory.limit_in_bytes is 2 GiB"));
  // "Unlimited" is a number close to 2^63.
  Write("/sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_TRUE(CheckMemoryLimit(GiB(8), root_).ok());
}

TEST_F(MemoryLimitTest, NonsenseIsNoLimit) {
  Write("/proc/self/cgroup", "junk\n\n1:\n");
  Write("/proc/meminfo", "MemAvailable: lots\n");
  EXPECT_TRUE(CheckMemoryLimit(GiB(1000), root_).ok());
}

TEST(MemoryLimit, ThisMachineHasAMegabyte) { EXPECT_TRUE(CheckMemoryLimit(MiB(1)).ok()); }

}  // namespace
}  // namespace palimpsest
