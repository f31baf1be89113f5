#include "worker/compute/cuda/nccl.h"

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include "common/mutex.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace palimpsest::cuda {
namespace {

// What was asked of the library; its functions have no argument for it.
struct Calls {
  std::atomic<int> sums = 0, gathers = 0, aborts = 0, destroyed = 0;
  std::atomic<int> inside = 0;
  std::atomic<bool> abort_inside = false;  // an abort ran while a call did
  std::atomic<bool> late = false;          // a call came after an abort
  std::function<void()> during_sum;
  int result = 0;
};
Calls* calls = nullptr;

NcclLibrary FakeLibrary() {
  NcclLibrary library;
  library.ncclGetErrorString = [](int) { return "a made-up error"; };
  library.ncclCommAbort = [](NcclLibrary::Comm) {
    if (calls->inside > 0) calls->abort_inside = true;
    ++calls->aborts;
    return 0;
  };
  library.ncclCommDestroy = [](NcclLibrary::Comm) {
    ++calls->destroyed;
    return 0;
  };
  library.ncclAllReduce = [](const void*, void*, size_t, int, int, NcclLibrary::Comm,
                             cudaStream_t) {
    ++calls->inside;
    if (calls->aborts > 0) calls->late = true;
    ++calls->sums;
    if (calls->during_sum) calls->during_sum();
    --calls->inside;
    return calls->result;
  };
  library.ncclAllGather = [](const void* send, void* receive, size_t count, int, NcclLibrary::Comm,
                             cudaStream_t) {
    EXPECT_EQ(static_cast<const float*>(send), static_cast<float*>(receive) + count);
    ++calls->gathers;
    return calls->result;
  };
  return library;
}

class NcclCommunicatorTest : public testing::Test {
 protected:
  NcclCommunicatorTest() { calls = &calls_; }
  ~NcclCommunicatorTest() override { calls = nullptr; }

  Calls calls_;
  const NcclLibrary library_ = FakeLibrary();
};

TEST(NcclLibrary, LoadsOrSaysWhatToInstall) {
  const auto library = NcclLibrary::Load();
  if (library.ok()) {
    int version = 0;
    EXPECT_EQ((*library)->ncclGetVersion(&version), 0);
    EXPECT_GT(version, 20000);
  } else {
    EXPECT_EQ(library.status().code(), absl::StatusCode::kNotFound);
    EXPECT_THAT(library.status().message(), testing::HasSubstr("libnccl2"));
  }
}

TEST_F(NcclCommunicatorTest, CallsGoThroughAndTheEndDestroysIt) {
  {
    NcclCommunicator communicator(library_, this);
    EXPECT_TRUE(communicator.AllReduce(nullptr, 8, nullptr).ok());
    std::vector<float> data(32);
    EXPECT_TRUE(communicator.AllGather(data.data(), 16, 1, nullptr).ok());
  }
  EXPECT_EQ(calls_.sums, 1);
  EXPECT_EQ(calls_.gathers, 1);
  EXPECT_EQ(calls_.destroyed, 1);
  EXPECT_EQ(calls_.aborts, 0);
}

TEST_F(NcclCommunicatorTest, ErrorsNameTheCallAndTheReason) {
  NcclCommunicator communicator(library_, this);
  calls_.result = 3;
  const absl::Status status = communicator.AllReduce(nullptr, 8, nullptr);
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(status.message(), testing::HasSubstr("all-reduce"));
  EXPECT_THAT(status.message(), testing::HasSubstr("a made-up error"));
}

TEST_F(NcclCommunicatorTest, AbortEndsItOnceAndCallsFailFromThenOn) {
  {
    NcclCommunicator communicator(library_, this);
    communicator.Abort();
    communicator.Abort();
    EXPECT_EQ(communicator.AllReduce(nullptr, 8, nullptr).code(), absl::StatusCode::kAborted);
  }
  EXPECT_EQ(calls_.aborts, 1);
  EXPECT_EQ(calls_.sums, 0);
  EXPECT_EQ(calls_.destroyed, 0);
}

TEST_F(NcclCommunicatorTest, AbortDuringACallComesAfterIt) {
  NcclCommunicator communicator(library_, this);
  calls_.during_sum = [&] {
    std::thread other([&] { communicator.Abort(); });
    other.join();
    EXPECT_EQ(calls_.aborts, 0);
  };
  EXPECT_EQ(communicator.AllReduce(nullptr, 8, nullptr).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(calls_.aborts, 1);
  EXPECT_FALSE(calls_.abort_inside);
}

TEST_F(NcclCommunicatorTest, AbortAtAnyInstantHappensOnceAndOutsideOfCalls) {
  for (int round = 0; round < 200; ++round) {
    calls_.aborts = 0;
    NcclCommunicator communicator(library_, this);
    std::thread caller([&] {
      while (communicator.AllReduce(nullptr, 8, nullptr).ok()) {
      }
    });
    std::thread first([&] { communicator.Abort(); });
    std::thread second([&] { communicator.Abort(); });
    first.join();
    second.join();
    caller.join();
    ASSERT_EQ(calls_.aborts, 1);
    ASSERT_FALSE(calls_.abort_inside);
    ASSERT_FALSE(calls_.late);
  }
}

}  // namespace
}  // namespace palimpsest::cuda
