#include "common/file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

using ::testing::HasSubstr;

class FileTest : public ::testing::Test {
 protected:
  FileTest() {
    char name[] = "/tmp/file_test.XXXXXX";
    folder_ = ::mkdtemp(name);
  }
  ~FileTest() override { std::filesystem::remove_all(folder_); }

  std::string Write(const std::string& name, const std::string& content, mode_t mode = 0600) {
    std::string path = folder_ + "/" + name;
    std::ofstream(path) << content;
    ::chmod(path.c_str(), mode);
    return path;
  }

  std::string folder_;
};

TEST_F(FileTest, ContentUpToTheLimit) {
  const std::string path = Write("a", "12345");
  EXPECT_EQ(*ReadFile(path, Bytes(5)), "12345");
  EXPECT_TRUE(absl::IsOutOfRange(ReadFile(path, Bytes(4)).status()));
  EXPECT_EQ(*ReadFile(Write("empty", ""), Bytes(0)), "");
}

TEST_F(FileTest, FilesWithoutASizeAreReadAndBounded) {
  EXPECT_THAT(*ReadFile("/proc/self/status", MiB(1)), HasSubstr("Pid:"));
  EXPECT_TRUE(absl::IsOutOfRange(ReadFile("/proc/self/status", Bytes(10)).status()));
}

TEST_F(FileTest, OnlyRegularFiles) {
  EXPECT_TRUE(absl::IsNotFound(ReadFile(folder_ + "/none", MiB(1)).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(ReadFile(folder_, MiB(1)).status()));
  const std::string pipe = folder_ + "/pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_TRUE(absl::IsInvalidArgument(ReadFile(pipe, MiB(1)).status()));
}

TEST_F(FileTest, SecretsLoseTheirLineEnd) {
  EXPECT_EQ(*ReadSecretFile(Write("s", "hush hush\r\n\n")), "hush hush");
  EXPECT_EQ(*ReadSecretFile(Write("group", "x", 0640)), "x");
}

TEST_F(FileTest, SecretsThatOthersCanReadOrChangeAreRefused) {
  for (const mode_t mode : {0644, 0604, 0620, 0602, 0777}) {
    const absl::Status status = ReadSecretFile(Write("s", "x", mode)).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << mode;
    EXPECT_THAT(std::string(status.message()), HasSubstr("chmod 600"));
  }
  if (::geteuid() == 0) {
    const std::string path = Write("foreign", "x");
    ASSERT_EQ(::chown(path.c_str(), 12345, 0), 0);
    EXPECT_TRUE(absl::IsFailedPrecondition(ReadSecretFile(path).status()));
  }
}

TEST_F(FileTest, EmptyAndLongSecretsAreRefused) {
  EXPECT_TRUE(absl::IsInvalidArgument(ReadSecretFile(Write("s", "\n")).status()));
  EXPECT_TRUE(absl::IsOutOfRange(ReadSecretFile(Write("s", std::string(5000, 'x'))).status()));
}

TEST_F(FileTest, AtomicWriteReplacesAndLeavesNothingBehind) {
  const std::string path = Write("a", "old");
  ASSERT_TRUE(WriteFileAtomically(path, "new", 0640).ok());
  EXPECT_EQ(*ReadFile(path, MiB(1)), "new");
  struct stat entry;
  ASSERT_EQ(::stat(path.c_str(), &entry), 0);
  EXPECT_EQ(entry.st_mode & 0777, 0640);
  EXPECT_FALSE(WriteFileAtomically(folder_ + "/none/a", "x").ok());
  // Cannot replace a folder; the temporary file goes away.
  ASSERT_EQ(::mkdir((folder_ + "/d").c_str(), 0700), 0);
  EXPECT_FALSE(WriteFileAtomically(folder_ + "/d", "x").ok());
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_), {}), 2);
}

}  // namespace
}  // namespace palimpsest
