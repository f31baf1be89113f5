#include "router/server/token_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

namespace palimpsest::router {
namespace {

constexpr char kFirst[] = "Bearer first-token-0123456789";
constexpr char kSecond[] = "Bearer second-token-0123456789";

class TokenFileTest : public ::testing::Test {
 protected:
  TokenFileTest() : folder_(std::string(std::getenv("TEST_TMPDIR")) + "/tokens.XXXXXX") {
    EXPECT_NE(mkdtemp(folder_.data()), nullptr);
    path_ = folder_ + "/tenants";
  }
  ~TokenFileTest() override { std::filesystem::remove_all(folder_); }

  void Write(const std::string& text, mode_t mode = 0600) {
    std::ofstream(path_) << text;
    chmod(path_.c_str(), mode);
  }

  std::string folder_;
  std::string path_;
};

TEST_F(TokenFileTest, ChangesAreTakenOverAndMistakesAreNot) {
  Write("alpha first-token-0123456789\n");
  const std::unique_ptr<TokenFile> file = TokenFile::Open(path_).value();
  EXPECT_EQ(file->Authenticate(kFirst).value(), "alpha");

  Write("alpha second-token-0123456789 # two words too many\n");
  // The file's own thread may have looked first; then there is nothing left to complain about.
  file->ReloadIfChanged().IgnoreError();
  EXPECT_TRUE(file->Authenticate(kFirst).ok()) << "the last good file stays";

  Write("alpha second-token-0123456789\n");
  EXPECT_TRUE(file->ReloadIfChanged().ok());
  EXPECT_EQ(file->Authenticate(kSecond).value(), "alpha");
  EXPECT_FALSE(file->Authenticate(kFirst).ok());
}

TEST_F(TokenFileTest, FilesThatOthersMayReadOrWriteAreRefused) {
  for (const mode_t mode : {0604, 0602, 0620, 0666}) {
    Write("alpha first-token-0123456789\n", mode);
    const absl::Status status = TokenFile::Open(path_).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("chmod 600"));
  }
  Write("alpha first-token-0123456789\n", 0440);
  EXPECT_TRUE(TokenFile::Open(path_).ok()) << "as Kubernetes mounts secrets for a group";
}

TEST_F(TokenFileTest, AMissingFileIsNamed) {
  const absl::Status status = TokenFile::Open(path_).status();
  EXPECT_TRUE(absl::IsNotFound(status)) << status;
  EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(path_));
}

}  // namespace
}  // namespace palimpsest::router
