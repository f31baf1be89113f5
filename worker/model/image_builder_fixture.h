// Images of tests: zeroed memory, a folder for checkpoints, and what checking says of one.
#ifndef PALIMPSEST_WORKER_MODEL_IMAGE_BUILDER_FIXTURE_H_
#define PALIMPSEST_WORKER_MODEL_IMAGE_BUILDER_FIXTURE_H_

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "worker/model/image_builder.h"
#include "worker/model/testing.h"

namespace palimpsest {

inline constexpr Bytes kSlab = KiB(8);

// A zeroed image aligned as memory maps are.
class Image {
 public:
  explicit Image(Bytes size)
      : size_(static_cast<size_t>(size.count())),
        bytes_(static_cast<std::byte*>(std::aligned_alloc(4096, size_))) {
    std::fill_n(bytes_.get(), size_, std::byte{0});
  }

  absl::Span<std::byte> span() const { return {bytes_.get(), size_}; }
  const std::byte* at(Bytes offset) const { return bytes_.get() + offset.count(); }
  std::vector<std::byte> copy() const { return {bytes_.get(), bytes_.get() + size_}; }

 private:
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  size_t size_;
  std::unique_ptr<std::byte, Free> bytes_;
};

class ImageTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = ::testing::TempDir() + "/image_builder_XXXXXX";
    ASSERT_NE(mkdtemp(folder_.data()), nullptr);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  // What checking says about exactly these tensors.
  std::string Check(const ModelConfig& config, const std::vector<RandomTensor>& tensors) {
    EXPECT_TRUE(WriteSafetensors(folder_ + "/model.safetensors", "BF16", tensors).ok());
    auto checkpoint = Checkpoint::Open(folder_);
    EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
    auto layout = LayOutImage(config, kSlab);
    const absl::Status status = CheckTensors(*checkpoint, config, *layout);
    Image image(layout->total);
    EXPECT_EQ(BuildImage(*checkpoint, config, *layout, image.span()), status);
    return status.ok() ? "accepted" : std::string(status.message());
  }

  std::string folder_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MODEL_IMAGE_BUILDER_FIXTURE_H_
