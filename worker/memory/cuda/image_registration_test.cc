#include "worker/memory/cuda/image_registration.h"

#include <fcntl.h>
#include <sys/mman.h>

#include "common/bytes.h"
#include "common/cuda/testing/fake_driver.h"
#include "common/fd.h"
#include "common/mapping.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

constexpr size_t kPiece = 64 << 10;

class ImageRegistrationTest : public ::testing::Test {
 protected:
  // Three pieces and a half.
  static constexpr size_t kSize = 3 * kPiece + kPiece / 2;

  ImageRegistrationTest() {
    FakeCuda::Reset();
    context_ = *CudaContext::Open(FakeCudaDriver(), 0);
    const UniqueFd file(::memfd_create("image", MFD_CLOEXEC));
    EXPECT_EQ(::ftruncate(file.get(), kSize), 0);
    mapping_ = *Mapping::Map(file.get(), Bytes(kSize), MapAccess::kRead);
  }

  absl::Span<std::byte> image() { return {mapping_.data(), mapping_.size()}; }

  CudaContextPtr context_;
  Mapping mapping_;
};

TEST_F(ImageRegistrationTest, EveryPieceIsRegisteredOnceAndLetGoAtTheEnd) {
  for (const int threads : {1, 3, 9}) {
    ImageRegistration registration(context_, image(), kPiece, threads);
    for (const size_t offset : {kSize - 1, size_t{0}, kPiece, 3 * kPiece - 1}) {
      const absl::Status status = registration.Await(offset);
      EXPECT_TRUE(status.ok()) << status;
    }
    EXPECT_EQ(FakeCuda::Registered(), 4u);
  }
  EXPECT_EQ(FakeCuda::Registered(), 0u);
}

TEST_F(ImageRegistrationTest, RefusalOfOnePieceReachesWhoeverWaits) {
  ASSERT_TRUE(context_->MakeCurrent().ok());
  std::byte* const taken = mapping_.data() + 2 * kPiece;
  ASSERT_EQ(FakeCudaDriver().cuMemHostRegister(taken, kPiece, CU_MEMHOSTREGISTER_READ_ONLY),
            CUDA_SUCCESS);
  {
    ImageRegistration registration(context_, image(), kPiece, 2);
    EXPECT_FALSE(registration.Await(2 * kPiece).ok());
    EXPECT_FALSE(registration.Await(kSize - 1).ok());
  }
  EXPECT_EQ(FakeCuda::Registered(), 1u);
  EXPECT_EQ(FakeCudaDriver().cuMemHostUnregister(taken), CUDA_SUCCESS);
}

TEST_F(ImageRegistrationTest, PartsBeginSideBySide) {
  ASSERT_TRUE(context_->MakeCurrent().ok());
  const absl::Span<std::byte> two_parts = image().first(2 * kPiece);
  // Half a piece at a time: 0, 2, then 1, which is refused.
  std::byte* const taken = mapping_.data() + kPiece / 2;
  ASSERT_EQ(FakeCudaDriver().cuMemHostRegister(taken, kPiece / 2, CU_MEMHOSTREGISTER_READ_ONLY),
            CUDA_SUCCESS);
  {
    ImageRegistration registration(context_, two_parts, kPiece / 2, /*threads=*/1, /*parts=*/2);
    EXPECT_FALSE(registration.Await(kPiece / 2).ok());
    EXPECT_EQ(FakeCuda::Registered(), 3u);
  }
  EXPECT_EQ(FakeCudaDriver().cuMemHostUnregister(taken), CUDA_SUCCESS);
  for (const int parts : {2, 3}) {
    ImageRegistration registration(context_, image(), kPiece, 2, parts);
    for (size_t offset = 0; offset < kSize; offset += kPiece) {
      EXPECT_TRUE(registration.Await(offset).ok());
    }
    EXPECT_EQ(FakeCuda::Registered(), 4u);
  }
}

TEST_F(ImageRegistrationTest, CutsCoverTheirBytesAndEndWherePiecesDo) {
  const ImageRegistration registration(context_, image(), kPiece, 1);
  for (const size_t offset : {size_t{0}, size_t{1}, kPiece - 1, kPiece, kPiece + 7}) {
    for (const size_t size : {size_t{0}, size_t{1}, kPiece, 2 * kPiece, kSize - offset}) {
      if (offset + size > kSize) continue;
      size_t at = offset;
      for (const absl::Span<const std::byte> piece : registration.Cut(offset, size)) {
        EXPECT_EQ(piece.data(), mapping_.data() + at);
        ASSERT_GT(piece.size(), 0u);
        EXPECT_EQ(at / kPiece, (at + piece.size() - 1) / kPiece);
        at += piece.size();
      }
      EXPECT_EQ(at, offset + size);
    }
  }
}

TEST_F(ImageRegistrationTest, EndingEarlyLeavesNothingRegistered) {
  for (int i = 0; i < 50; ++i) {
    { ImageRegistration registration(context_, image(), kPiece, 2); }
    EXPECT_EQ(FakeCuda::Registered(), 0u);
  }
}

}  // namespace
}  // namespace palimpsest
