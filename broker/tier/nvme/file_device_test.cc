#include "broker/tier/nvme/file_device.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "common/mutex.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

constexpr Bytes kSize = MiB(8);

class FreshFolder {
 public:
  FreshFolder() {
    std::string name = testing::TempDir() + "/nvme.XXXXXX";
    path_ = mkdtemp(name.data());
  }
  ~FreshFolder() { std::filesystem::remove_all(path_); }

  std::string File() const { return path_ + "/blocks"; }

 private:
  std::string path_;
};

struct Engine {
  bool direct, io_uring;
};

class FileDevice : public testing::TestWithParam<Engine> {
 protected:
  FileDeviceOptions Options() const {
    FileDeviceOptions options{folder_.File(), kSize};
    options.depth = 4;
    options.threads = 3;
    options.direct = GetParam().direct;
    options.io_uring = GetParam().io_uring;
    return options;
  }

  FreshFolder folder_;
};

// How many requests are under way; waits until it is a few at most.
class Outstanding {
 public:
  void Add() {
    MutexLock lock(&mutex_);
    ++count_;
  }
  void Done(const absl::Status& status) {
    MutexLock lock(&mutex_);
    EXPECT_TRUE(status.ok()) << status;
    --count_;
    changed_.SignalAll();
  }
  void WaitFor(int at_most) {
    MutexLock lock(&mutex_);
    while (count_ > at_most) changed_.Wait(&mutex_);
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  int count_ ABSL_GUARDED_BY(mutex_) = 0;
};

TEST_P(FileDevice, ReadsGiveWhatWasWrittenAtAnyDepthAndAfterReopening) {
  constexpr int kPieces = 32;
  constexpr Bytes kPiece = kSize / kPieces;
  std::vector<AlignedBuffer> written, read;
  std::mt19937_64 random(3);
  for (int i = 0; i < kPieces; ++i) {
    written.emplace_back(kPiece);
    read.emplace_back(kPiece);
    for (std::byte& byte : written.back().span()) byte = static_cast<std::byte>(random());
  }
  Outstanding outstanding;
  const auto done = [&](const absl::Status& status) { outstanding.Done(status); };
  {
    const auto device = OpenFileDevice(Options());
    ASSERT_TRUE(device.ok()) << device.status();
    EXPECT_EQ((*device)->size(), kSize);
    for (int i = 0; i < kPieces; ++i) {
      outstanding.Add();
      (*device)->Submit(IoRequest::Write(kPiece * i, written[i].span(), done));
    }
    outstanding.WaitFor(0);
    EXPECT_TRUE(FlushAndWait(**device).ok());
  }
  const auto device = OpenFileDevice(Options());
  ASSERT_TRUE(device.ok()) << device.status();
  for (int i = 0; i < kPieces; ++i) {
    outstanding.Add();
    (*device)->Submit(IoRequest::Read(kPiece * i, read[i].span(), done));
  }
  outstanding.WaitFor(0);
  for (int i = 0; i < kPieces; ++i) {
    EXPECT_TRUE(
        std::equal(read[i].span().begin(), read[i].span().end(), written[i].span().begin()));
  }
}

// Each completion submits the next request, as a log does.
TEST_P(FileDevice, CompletionsMaySubmitAndTheEndWaitsForThem) {
  const AlignedBuffer buffer(kIoUnit);
  int steps = 0;
  BlockDevice* user = nullptr;
  std::function<void(absl::Status)> next = [&](const absl::Status& status) {
    EXPECT_TRUE(status.ok()) << status;
    if (++steps >= 40) return;
    user->Submit(steps % 3 == 0 ? IoRequest::Flush(next)
                                : IoRequest::Write(kIoUnit * steps, buffer.span(), next));
  };
  {
    const auto device = OpenFileDevice(Options());
    ASSERT_TRUE(device.ok()) << device.status();
    user = device->get();
    user->Submit(IoRequest::Flush(next));
  }
  EXPECT_EQ(steps, 40);
}

TEST_P(FileDevice, EndOfATruncatedFileIsAnError) {
  const auto device = OpenFileDevice(Options());
  ASSERT_TRUE(device.ok()) << device.status();
  ASSERT_EQ(truncate(folder_.File().c_str(), (kIoUnit * 3).count()), 0);
  const AlignedBuffer buffer(kIoUnit * 2);
  EXPECT_TRUE(ReadAndWait(**device, kIoUnit, buffer.span()).ok());
  EXPECT_EQ(ReadAndWait(**device, kIoUnit * 2, buffer.span()).code(), absl::StatusCode::kDataLoss);
}

INSTANTIATE_TEST_SUITE_P(Engines, FileDevice,
                         testing::Values(Engine{true, true}, Engine{false, true},
                                         Engine{true, false}, Engine{false, false}));

TEST(OpenFileDevice, OneFileHasOneUser) {
  const FreshFolder folder;
  const FileDeviceOptions options{folder.File(), kSize};
  auto first = OpenFileDevice(options);
  ASSERT_TRUE(first.ok()) << first.status();
  const auto second = OpenFileDevice(options);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kFailedPrecondition) << second.status();
  first->reset();
  EXPECT_TRUE(OpenFileDevice(options).ok());
}

TEST(OpenFileDevice, FileHasAllItsRoomAndIsPrivate) {
  const FreshFolder folder;
  ASSERT_TRUE(OpenFileDevice({folder.File(), kSize}).ok());
  struct stat info = {};
  ASSERT_EQ(stat(folder.File().c_str(), &info), 0);
  EXPECT_EQ(info.st_size, kSize.count());
  EXPECT_GE(info.st_blocks * 512, kSize.count());
  EXPECT_EQ(info.st_mode & 0777, 0600);
}

TEST(OpenFileDevice, WrongSizesAreRefusedAndNothingIsTaken) {
  const FreshFolder folder;
  EXPECT_EQ(OpenFileDevice({folder.File(), Bytes(1000)}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(OpenFileDevice({folder.File(), GiB(1 << 20)}).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(std::filesystem::file_size(folder.File()), 0u);
  ASSERT_TRUE(OpenFileDevice({folder.File(), kSize}).ok());
  EXPECT_EQ(OpenFileDevice({folder.File(), kSize * 2}).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace palimpsest
