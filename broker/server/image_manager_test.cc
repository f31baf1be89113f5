#include "broker/server/image_manager.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "broker/server/testing/test_node.h"
#include "common/memory_file.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/model/image_checksums.h"

namespace palimpsest {
namespace {

using ::testing::HasSubstr;

constexpr Bytes kSlab = MiB(2);
constexpr TenantId kAlpha(0), kEightBit(1);
const std::string kFingerprint(32, 'f');

// What a worker may bring to a broker that was started again.
class ImageAdoptionTest : public ::testing::Test {
 protected:
  ImageAdoptionTest() : manifest_(*PlanImage(model_, kSlab)) {
    auto journal = Journal::Open(Journal::Options{.directory = node_.folder() + "/state",
                                                  .boot_id = "boot",
                                                  .slab_bytes = kSlab,
                                                  .pool_slabs = 4});
    if (!journal.ok()) abort();
    journal_ = *std::move(journal);
    SetUpImages();
    manifest_.set_fingerprint(kFingerprint);
  }

  void SetUpImages() {
    images_ = std::make_unique<ImageManager>(
        ImageManager::Options{.models = {model_, eight_bit_model_}, .slab_bytes = kSlab}, *journal_,
        broker_metrics_);
  }

  // Memory of `size` that holds `content` and zeros, sealed or not; the descriptor is read-only.
  static UniqueFd Memory(Bytes size, const std::string& content, bool sealed) {
    const UniqueFd memory(memfd_create("image", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    EXPECT_EQ(ftruncate(memory.get(), size.count()), 0);
    EXPECT_EQ(pwrite(memory.get(), content.data(), content.size(), 0),
              static_cast<ssize_t>(content.size()));
    if (sealed) {
      EXPECT_TRUE(
          SealMemory(memory.get(), F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL).ok());
    }
    return UniqueFd(
        open(absl::StrCat("/proc/self/fd/", memory.get()).c_str(), O_RDONLY | O_CLOEXEC));
  }

  Bytes image_bytes() const { return Bytes(static_cast<int64_t>(manifest_.image_bytes())); }

  // The record of an image that holds `content`, in the file behind `memory`.
  journal::Image Recorded(const UniqueFd& memory, const std::string& content) {
    std::vector<std::byte> bytes(manifest_.image_bytes());
    memcpy(bytes.data(), content.data(), content.size());
    const std::vector<uint64_t> sums = ImageChecksums(bytes, kSlab, [](Bytes, Bytes) {});
    manifest_.mutable_slab_checksums()->Assign(sums.begin(), sums.end());
    struct stat file;
    EXPECT_EQ(fstat(memory.get(), &file), 0);
    journal::Image record;
    record.set_fingerprint(kFingerprint);
    record.set_device(file.st_dev);
    record.set_inode(file.st_ino);
    record.set_manifest(manifest_.SerializeAsString());
    return record;
  }

  std::string Refusal(const journal::Image& record, UniqueFd memory) {
    const absl::Status status = images_->Adopt(record, std::move(memory));
    EXPECT_FALSE(status.ok());
    EXPECT_EQ(images_->Find(kFingerprint, kAlpha), nullptr);
    return std::string(status.message());
  }

  TestNode node_;
  const TenantModel model_{node_.model(), 256, 16};
  const TenantModel eight_bit_model_{node_.model(), 128, 32, KvDtype::kFp8E4m3};
  v1::ImageManifest manifest_;
  Metrics metrics_{MetricProcess::kBroker};
  BrokerMetrics broker_metrics_{metrics_};
  std::unique_ptr<Journal> journal_;
  std::unique_ptr<ImageManager> images_;
};

TEST_F(ImageAdoptionTest, TheRecordedImageIsTakenBack) {
  UniqueFd memory = Memory(image_bytes(), "weights", true);
  const journal::Image record = Recorded(memory, "weights");
  const absl::Status adopted = images_->Adopt(record, std::move(memory));
  ASSERT_TRUE(adopted.ok()) << adopted;
  ASSERT_NE(images_->Find(kFingerprint, kAlpha), nullptr);
}

TEST_F(ImageAdoptionTest, TenantsOfOneImageHaveTheirOwnKvBlocks) {
  for (const bool named : {true, false}) {
    if (!named) manifest_.clear_kv_dtype();  // as earlier releases recorded it
    SetUpImages();
    UniqueFd memory = Memory(image_bytes(), "weights", true);
    const journal::Image record = Recorded(memory, "weights");
    ASSERT_TRUE(images_->Adopt(record, std::move(memory)).ok());
    for (const auto& [tenant, model] : {std::pair(kAlpha, model_), {kEightBit, eight_bit_model_}}) {
      const v1::ImageManifest planned = *PlanImage(model, kSlab);
      const v1::ImageManifest got = images_->Find(kFingerprint, tenant)->manifest;
      EXPECT_EQ(got.kv_dtype(), planned.kv_dtype());
      EXPECT_EQ(got.kv_block_bytes(), planned.kv_block_bytes());
      EXPECT_EQ(got.kv_block_tokens(), planned.kv_block_tokens());
    }
  }
}

TEST_F(ImageAdoptionTest, EqualBytesInOtherMemoryAreRefused) {
  const UniqueFd memory = Memory(image_bytes(), "weights", true);
  EXPECT_THAT(Refusal(Recorded(memory, "weights"), Memory(image_bytes(), "weights", true)),
              HasSubstr("other memory"));
}

TEST_F(ImageAdoptionTest, OtherBytesAreRefused) {
  UniqueFd memory = Memory(image_bytes(), "poison!", true);
  const journal::Image record = Recorded(memory, "weights");
  EXPECT_THAT(Refusal(record, std::move(memory)), HasSubstr("checksums"));
}

TEST_F(ImageAdoptionTest, MemoryThatMayStillChangeIsRefused) {
  UniqueFd memory = Memory(image_bytes(), "weights", false);
  const journal::Image record = Recorded(memory, "weights");
  EXPECT_THAT(Refusal(record, std::move(memory)), HasSubstr("not sealed"));
}

TEST_F(ImageAdoptionTest, AnotherSizeIsRefused) {
  UniqueFd memory = Memory(kSlab, "weights", true);
  const journal::Image record = Recorded(memory, "weights");
  EXPECT_THAT(Refusal(record, std::move(memory)), HasSubstr("expected"));
}

}  // namespace
}  // namespace palimpsest
