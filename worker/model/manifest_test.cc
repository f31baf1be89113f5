#include "worker/model/manifest.h"

#include <functional>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/model/image_checksums.h"
#include "worker/model/testing.h"

namespace palimpsest {
namespace {

using ::testing::HasSubstr;

class ManifestTest : public ::testing::Test {
 protected:
  v1::ImageManifest Complete() const {
    v1::ImageManifest manifest = *MakeManifest(config_, layout_, 16, 256);
    manifest.set_fingerprint(std::string(32, 'f'));
    for (int i = 0; i < layout_.slabs(); ++i) manifest.add_slab_checksums(i);
    return manifest;
  }

  const ModelConfig config_ = TinyModelConfig();
  const ImageLayout layout_ = *LayOutImage(config_, KiB(8));
};

TEST_F(ManifestTest, DescribesTheLayout) {
  const v1::ImageManifest manifest = Complete();
  EXPECT_EQ(manifest.image_bytes(), layout_.total.count());
  EXPECT_EQ(manifest.slab_bytes(), 8192);
  ASSERT_EQ(manifest.stages_size(), 4);
  EXPECT_EQ(manifest.stages(3).name(), "head");
  // 16 tokens, 2 layers, K and V, 2 heads of 16 numbers in bf16.
  EXPECT_EQ(manifest.kv_block_bytes(), 16 * 2 * 2 * 2 * 16 * 2);
  EXPECT_TRUE(CheckManifest(manifest, config_, layout_).ok());
}

TEST_F(ManifestTest, KvInEightBitsIsToldAndTakesHalf) {
  ModelConfig config = config_;
  config.kv_dtype = KvDtype::kFp8E4m3;
  const auto manifest = MakeManifest(config, layout_, 16, 256);
  ASSERT_TRUE(manifest.ok()) << manifest.status();
  EXPECT_EQ(manifest->kv_dtype(), "fp8_e4m3");
  EXPECT_EQ(manifest->kv_block_bytes() * 2, Complete().kv_block_bytes());
  EXPECT_EQ(manifest->image_bytes(), Complete().image_bytes());
}

TEST_F(ManifestTest, LatentVectorsAreNotStoredInEightBits) {
  ModelConfig config = config_;
  config.latent = LatentAttention{.kv_lora_rank = 32, .qk_rope_head_dim = 16};
  EXPECT_TRUE(MakeManifest(config, layout_, 16, 256).ok());
  config.kv_dtype = KvDtype::kFp8E4m3;
  const absl::Status refused = MakeManifest(config, layout_, 16, 256).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("set kv_dtype: bf16"));
}

TEST_F(ManifestTest, BoundsTokens) {
  for (const int64_t tokens : {int64_t{0}, int64_t{-1}, int64_t{4097}, int64_t{1} << 40}) {
    EXPECT_FALSE(MakeManifest(config_, layout_, tokens, 256).ok());
  }
  for (const int64_t tokens : {int64_t{0}, int64_t{513}, int64_t{1} << 40}) {
    EXPECT_FALSE(MakeManifest(config_, layout_, 16, tokens).ok());
  }
}

TEST_F(ManifestTest, EveryDifferenceIsNamed) {
  struct {
    const char* field;
    std::function<void(v1::ImageManifest&)> change;
  } cases[] = {
      {"slab_bytes", [](auto& m) { m.set_slab_bytes(4096); }},
      {"weight_format", [](auto& m) { m.set_weight_format("row-major"); }},
      {"image_bytes", [](auto& m) { m.set_image_bytes(m.image_bytes() + 8192); }},
      {"stages", [](auto& m) { m.mutable_stages()->RemoveLast(); }},
      {"layer.1", [](auto& m) { m.mutable_stages(2)->set_name("layer.2"); }},
      {"layer.1.first_slab", [](auto& m) { m.mutable_stages(2)->set_first_slab(0); }},
      {"layer.1.slab_count", [](auto& m) { m.mutable_stages(2)->set_slab_count(0); }},
      {"fingerprint", [](auto& m) { m.clear_fingerprint(); }},
      {"slab_checksums", [](auto& m) { m.mutable_slab_checksums()->RemoveLast(); }},
      {"KV block", [](auto& m) { m.set_kv_block_tokens(0); }},
      {"longest sequence", [](auto& m) { m.set_max_sequence_tokens(1000000); }},
      {"kv_block_bytes", [](auto& m) { m.set_kv_block_tokens(32); }},
      {"kv_dtype", [](auto& m) { m.set_kv_dtype("fp8_e4m3"); }},
      {"kv_dtype", [](auto& m) { m.clear_kv_dtype(); }},
  };
  for (const auto& c : cases) {
    v1::ImageManifest manifest = Complete();
    c.change(manifest);
    const absl::Status status = CheckManifest(manifest, config_, layout_);
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << c.field;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.field));
  }
}

TEST(ImageChecksums, CoverEachSlabAlone) {
  std::vector<std::byte> image(4 * 4096);
  const std::vector<uint64_t> before = ImageChecksums(image, Bytes(4096));
  ASSERT_EQ(before.size(), 4);
  EXPECT_EQ(before[0], before[3]);
  image[2 * 4096 + 4095] = std::byte{1};
  Bytes last;
  const std::vector<uint64_t> after =
      ImageChecksums(image, Bytes(4096), [&](Bytes done, Bytes) { last = done; });
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(after[i] != before[i], i == 2);
  EXPECT_EQ(last, Bytes(4 * 4096));
  EXPECT_EQ(after[2], SlabChecksum(absl::MakeSpan(image).subspan(2 * 4096, 4096)));
}

}  // namespace
}  // namespace palimpsest
