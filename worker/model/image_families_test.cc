// Every family's tensors have their place in an image, whether they come from a checkpoint or are
// made up.
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "worker/model/dummy_weights.h"
#include "worker/model/image_builder_fixture.h"
#include "worker/model/tensor_plan.h"

namespace palimpsest {
namespace {

class FamilyImages : public ImageTest, public ::testing::WithParamInterface<std::string> {
 protected:
  void SetUp() override {
    ImageTest::SetUp();
    std::ifstream file("tests/data/models/" + GetParam() + ".json");
    ASSERT_TRUE(file);
    config_ = ParseModelConfig(nlohmann::json::parse(file)["config"].dump(), "").value();
  }

  // All source tensors with their dummy numbers.
  std::vector<RandomTensor> DummyTensors() const {
    std::map<std::string, RandomTensor> tensors;
    for (const TensorPiece& piece : PlanTensors(config_, *LayOutImage(config_, kSlab))) {
      RandomTensor& tensor = tensors[piece.tensor];
      if (!tensor.values.empty()) continue;
      int64_t size = 1;
      for (const int64_t n : piece.shape) size *= n;
      tensor = {piece.tensor, piece.shape, std::vector<float>(static_cast<size_t>(size))};
      DummyTensor(3, piece.tensor, piece.is_vector() ? 0 : piece.cols(), config_.norm_weight_offset)
          .ReadFloats(0, absl::MakeSpan(tensor.values));
    }
    std::vector<RandomTensor> out;
    for (auto& [name, tensor] : tensors) out.push_back(std::move(tensor));
    return out;
  }

  ModelConfig config_;
};

INSTANTIATE_TEST_SUITE_P(Models, FamilyImages,
                         ::testing::Values("llama3", "qwen2", "qwen3", "gemma2", "opt",
                                           "deepseek_v2", "deepseek_v3"),
                         [](const auto& info) { return info.param; });

TEST_P(FamilyImages, DummyImageIsThatOfACheckpointWithTheSameNumbers) {
  ASSERT_TRUE(WriteSafetensors(folder_ + "/model.safetensors", "F32", DummyTensors()).ok());
  auto checkpoint = Checkpoint::Open(folder_);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  for (const WeightFormat format : {WeightFormat::kCpuPanels, WeightFormat::kRowMajor}) {
    auto layout = LayOutImage(config_, kSlab, format);
    Image built(layout->total), dummy(layout->total);
    const absl::Status status = BuildImage(*checkpoint, config_, *layout, built.span());
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_TRUE(BuildDummyImage(3, config_, *layout, dummy.span()).ok());
    EXPECT_TRUE(built.copy() == dummy.copy());
    ASSERT_TRUE(BuildDummyImage(4, config_, *layout, dummy.span()).ok());
    EXPECT_FALSE(built.copy() == dummy.copy());
  }
}

TEST_P(FamilyImages, CheckpointOfTheBareModelIsTaken) {
  std::vector<RandomTensor> tensors = DummyTensors();
  for (RandomTensor& tensor : tensors) {
    if (tensor.name.rfind("model.", 0) == 0) tensor.name = tensor.name.substr(6);
  }
  EXPECT_EQ(Check(config_, tensors), "accepted");
}

TEST_P(FamilyImages, EveryRowHasItsPlace) {
  const std::vector<RandomTensor> tensors = DummyTensors();
  for (size_t i = 0; i < tensors.size(); ++i) {
    // Other layers have the first one's tensors.
    if (absl::StrContains(tensors[i].name, ".layers.") &&
        !absl::StrContains(tensors[i].name, ".layers.0.")) {
      continue;
    }
    std::vector<RandomTensor> fewer = tensors;
    fewer.erase(fewer.begin() + static_cast<int64_t>(i));
    EXPECT_EQ(Check(config_, fewer), "the model folder lacks tensors: " + tensors[i].name);
  }
  std::map<std::string, int64_t> rows;
  for (const TensorPiece& piece : PlanTensors(config_, *LayOutImage(config_, kSlab))) {
    rows[piece.tensor] += piece.rows;
  }
  for (const RandomTensor& tensor : tensors) EXPECT_EQ(rows[tensor.name], tensor.shape[0]);
}

}  // namespace
}  // namespace palimpsest
