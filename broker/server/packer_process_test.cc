// Packers that misbehave, as shell scripts in the place of the real one.
#include "broker/server/packer_process.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/file.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

using ::testing::HasSubstr;

class RunPackerTest : public ::testing::Test {
 protected:
  RunPackerTest() {
    std::string pattern = ::testing::TempDir() + "/packer_XXXXXX";
    folder_ = mkdtemp(pattern.data());
    run_.packer = folder_ + "/packer";
    run_.model_folder = folder_;
    run_.deadline = absl::Seconds(20);
    // Two ranks of one slab each.
    run_.expected.set_image_bytes(4096);
    run_.expected.set_ranks(2);
    run_.expected.set_slab_bytes(4096);
    Save("manifest", run_.expected.SerializeAsString());
  }
  ~RunPackerTest() override { std::filesystem::remove_all(folder_); }

  void Save(const std::string& name, const std::string& content, mode_t mode = 0600) {
    ASSERT_TRUE(WriteFileAtomically(absl::StrCat(folder_, "/", name), content, mode).ok());
  }

  // Descriptors: 3 the memory, 4 the manifest, 5 progress.
  absl::StatusOr<UniqueFd> Run(const std::string& script) {
    Save("packer", absl::StrCat("#!/bin/sh\ncd ", folder_, "\n", script), 0700);
    return RunPacker(
        run_, [this](Bytes done, Bytes) { progress_.push_back(done); },
        [this] { return cancelled_; });
  }

  static constexpr char kGood[] =
      "echo pack 4096 8192 >&5\n"
      "/usr/bin/head -c 8192 /dev/zero >&3\n"
      "/bin/cat manifest >&4\n";

  std::string folder_;
  PackerRun run_;
  std::vector<Bytes> progress_;
  bool cancelled_ = false;
};

TEST_F(RunPackerTest, TheImageIsSealedAndReadOnly) {
  const auto image = Run(kGood);
  ASSERT_TRUE(image.ok()) << image.status();
  EXPECT_EQ(progress_, std::vector<Bytes>{Bytes(4096)});
  EXPECT_TRUE(CheckSealed(image->get(), Bytes(8192)).ok());
  EXPECT_LT(write(image->get(), "x", 1), 0);
  const std::string path = absl::StrCat("/proc/self/fd/", image->get());
  const UniqueFd writer(open(path.c_str(), O_RDWR | O_CLOEXEC));
  EXPECT_TRUE(!writer.valid() || write(writer.get(), "x", 1) < 0);
  EXPECT_EQ(mmap(nullptr, 4096, PROT_WRITE, MAP_SHARED, image->get(), 0), MAP_FAILED);
}

TEST_F(RunPackerTest, ASeedIsPassedOn) {
  const std::string expects = "case \"$*\" in *--dummy-seed=*) ;; *) exit 9;; esac\n";
  EXPECT_THAT(std::string(Run(expects + kGood).status().message()), HasSubstr("status 9"));
  run_.dummy_seed = 0;
  EXPECT_TRUE(Run(expects + kGood).ok());
}

TEST_F(RunPackerTest, AFailureCarriesTheLastWords) {
  const auto image = Run("echo the tensor is missing >&2\nexit 3\n");
  EXPECT_EQ(image.status().code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(image.status().message()), HasSubstr("status 3"));
  EXPECT_THAT(std::string(image.status().message()), HasSubstr("the tensor is missing"));
}

TEST_F(RunPackerTest, AKilledPackerIsAFailure) {
  EXPECT_THAT(std::string(Run("kill -9 $$\n").status().message()), HasSubstr("killed by signal 9"));
}

TEST_F(RunPackerTest, AManifestThatLiesIsRefused) {
  v1::ImageManifest lie = run_.expected;
  lie.set_ranks(1);
  Save("manifest", lie.SerializeAsString());
  EXPECT_EQ(Run(kGood).status().code(), absl::StatusCode::kDataLoss);
}

TEST_F(RunPackerTest, MemoryOfAnotherSizeIsRefused) {
  const auto image = Run("/usr/bin/head -c 4096 /dev/zero >&3\n/bin/cat manifest >&4\n");
  EXPECT_EQ(image.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(image.status().message()), HasSubstr("4096 bytes, expected 8192"));
}

TEST_F(RunPackerTest, NoManifestIsNoImage) {
  EXPECT_EQ(Run("exit 0\n").status().code(), absl::StatusCode::kDataLoss);
}

TEST_F(RunPackerTest, EndlessTalkIsBounded) {
  const auto image =
      Run("/usr/bin/head -c 100000 /dev/zero >&5\n/usr/bin/head -c 100000 /dev/zero >&2\nexit 1\n");
  EXPECT_EQ(image.status().code(), absl::StatusCode::kAborted);
  EXPECT_LT(image.status().message().size(), 4096);
}

TEST_F(RunPackerTest, ADeadlineKillsIt) {
  run_.deadline = absl::Milliseconds(200);
  EXPECT_EQ(Run("exec /bin/sleep 1000\n").status().code(), absl::StatusCode::kDeadlineExceeded);
}

TEST_F(RunPackerTest, CancellingKillsIt) {
  cancelled_ = true;
  EXPECT_EQ(Run("exec /bin/sleep 1000\n").status().code(), absl::StatusCode::kCancelled);
}

TEST_F(RunPackerTest, AMissingExecutableIsNamed) {
  run_.packer = folder_ + "/none";
  const auto image = RunPacker(run_, nullptr, [] { return false; });
  EXPECT_THAT(std::string(image.status().message()), HasSubstr(run_.packer));
}

TEST_F(RunPackerTest, UnsealedMemoryIsTold) {
  const UniqueFd memory(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_EQ(CheckSealed(memory.get(), Bytes(0)).code(), absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace palimpsest
