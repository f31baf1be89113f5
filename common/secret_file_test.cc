#include "common/secret_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "absl/time/clock.h"
#include "common/monotonic_time.h"

namespace palimpsest {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class SecretFileTest : public ::testing::Test {
 protected:
  SecretFileTest() : folder_(std::string(std::getenv("TEST_TMPDIR")) + "/secret.XXXXXX") {
    EXPECT_NE(mkdtemp(folder_.data()), nullptr);
    path_ = folder_ + "/token";
  }
  ~SecretFileTest() override { fs::remove_all(folder_); }

  static void Write(const std::string& path, const std::string& text) {
    std::ofstream(path) << text;
    chmod(path.c_str(), 0600);
  }

  std::string folder_;
  std::string path_;
};

TEST_F(SecretFileTest, EveryLineIsASecret) {
  Write(path_, "one\r\ntwo\n\n");
  EXPECT_THAT(*SecretFile::Open(path_).value()->secrets(), ElementsAre("one", "two"));
}

TEST_F(SecretFileTest, MistakesLeaveTheLastGoodSecrets) {
  Write(path_, "good\n");
  const auto file = SecretFile::Open(path_).value();
  for (const std::string& wrong :
       {std::string("a\n\nb\n"), std::string("\n"), std::string("a\na\na\na\na\na\na\na\na\n")}) {
    Write(path_, wrong);
    // The file's own thread may have looked first; then there is nothing left to complain about.
    file->ReloadIfChanged().IgnoreError();
    EXPECT_THAT(*file->secrets(), ElementsAre("good"));
    EXPECT_TRUE(absl::IsInvalidArgument(SecretFile::Open(path_).status()));
  }
  fs::remove(path_);
  EXPECT_TRUE(absl::IsNotFound(file->ReloadIfChanged()));
  EXPECT_THAT(*file->secrets(), ElementsAre("good"));
  Write(path_, "better\n");
  EXPECT_TRUE(file->ReloadIfChanged().ok());
  EXPECT_THAT(*file->secrets(), ElementsAre("better"));
}

// Kubernetes replaces a symbolic link to a folder that holds the files.
TEST_F(SecretFileTest, ASecretThatIsExchangedIsSeenWithoutBeingAskedFor) {
  for (const char* version : {"v1", "v2"}) {
    fs::create_directory(folder_ + "/" + version);
    Write(folder_ + "/" + version + "/token", version);
  }
  fs::create_symlink("v1", folder_ + "/..data");
  fs::create_symlink("..data/token", path_);
  const auto file = SecretFile::Open(path_).value();
  EXPECT_THAT(*file->secrets(), ElementsAre("v1"));
  fs::create_symlink("v2", folder_ + "/..data_tmp");
  fs::rename(folder_ + "/..data_tmp", folder_ + "/..data");
  const absl::Time deadline = MonotonicNow() + absl::Seconds(20);
  while (file->secrets()->front() != "v2" && MonotonicNow() < deadline) {
    absl::SleepFor(absl::Milliseconds(5));
  }
  EXPECT_THAT(*file->secrets(), ElementsAre("v2"));
}

TEST_F(SecretFileTest, AFileThatOthersMayReadIsRefused) {
  Write(path_, "secret\n");
  chmod(path_.c_str(), 0644);
  const absl::Status status = SecretFile::Open(path_).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("chmod 600"));
}

}  // namespace
}  // namespace palimpsest
