#include "worker/model/fingerprint.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>

#include "absl/strings/escaping.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

class FingerprintTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = ::testing::TempDir() + "/fingerprint_XXXXXX";
    ASSERT_NE(mkdtemp(folder_.data()), nullptr);
    Write("config.json", "{}");
    Write("model.safetensors", "weights");
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  void Write(const std::string& name, const std::string& bytes) {
    std::ofstream(folder_ + "/" + name, std::ios::binary) << bytes;
  }
  void Remove(const std::string& name) { std::filesystem::remove(folder_ + "/" + name); }

  std::string Fingerprint(const PackingSpec& spec = {}) {
    auto fingerprint = FingerprintModel(folder_, spec);
    EXPECT_TRUE(fingerprint.ok()) << fingerprint.status();
    EXPECT_EQ(fingerprint->size(), 32);
    return absl::BytesToHexString(*fingerprint);
  }

  std::string folder_;
};

TEST_F(FingerprintTest, IsTheSameForTheSameFiles) {
  const std::string before = Fingerprint();
  Write("tokenizer.json", "not part of the image");
  Write("config.json", "{}");
  EXPECT_EQ(Fingerprint(), before);
}

// Each step changes one thing that matters; no two states may look alike.
TEST_F(FingerprintTest, TellsEveryInputApart) {
  std::set<std::string> seen = {Fingerprint()};
  const auto expect_new = [&](const PackingSpec& spec = {}) {
    EXPECT_TRUE(seen.insert(Fingerprint(spec)).second) << seen.size();
  };
  expect_new({.packing_version = 2});
  expect_new({.dtype = "f16"});
  expect_new({.format = WeightFormat::kRowMajor});
  expect_new({.ranks = 2});
  expect_new({.ranks = 4});
  Write("config.json", "{ }");
  expect_new();
  Write("generation_config.json", "");
  expect_new();
  Write("generation_config.json", "{}");
  expect_new();
  Write("model.safetensors", "weighty");
  expect_new();
  Write("more.safetensors", "");
  expect_new();
  // The same bytes, cut elsewhere or under other names.
  Write("model.safetensors", "weigh");
  Write("more.safetensors", "ty");
  expect_new();
  Remove("more.safetensors");
  Write("most.safetensors", "ty");
  expect_new();
  Write("model.safetensors.index.json", "{}");
  expect_new();
}

TEST_F(FingerprintTest, WithoutWeightsDependsOnSeedAndConfigOnly) {
  std::set<std::string> seen = {Fingerprint(), Fingerprint({.dummy_seed = 0}),
                                Fingerprint({.dummy_seed = 1})};
  EXPECT_EQ(seen.size(), 3);
  Write("model.safetensors", "other weights");
  EXPECT_TRUE(seen.contains(Fingerprint({.dummy_seed = 1})));
  Remove("model.safetensors");
  EXPECT_TRUE(seen.contains(Fingerprint({.dummy_seed = 1})));
  Write("config.json", "{ }");
  EXPECT_FALSE(seen.contains(Fingerprint({.dummy_seed = 1})));
}

TEST_F(FingerprintTest, ReportsProgressUpToTheEnd) {
  Write("model.safetensors", std::string(10 << 20, 'x'));
  Bytes last;
  Bytes all;
  ASSERT_TRUE(FingerprintModel(folder_, {}, [&](Bytes done, Bytes total) {
                EXPECT_GT(done, last);
                last = done;
                all = total;
              }).ok());
  EXPECT_EQ(last, Bytes((10 << 20) + 2));
  EXPECT_EQ(all, last);
}

TEST_F(FingerprintTest, ReportsAFileThatGrowsMeanwhile) {
  Write("model.safetensors", std::string(10 << 20, 'x'));
  auto fingerprint = FingerprintModel(folder_, {}, [&](Bytes, Bytes) {
    std::ofstream(folder_ + "/model.safetensors", std::ios::app) << "y";
  });
  EXPECT_EQ(fingerprint.status().code(), absl::StatusCode::kAborted);
}

TEST_F(FingerprintTest, RefusesFoldersThatAreNoModel) {
  Remove("config.json");
  EXPECT_EQ(FingerprintModel(folder_, {}).status().code(), absl::StatusCode::kNotFound);
  Write("config.json", "{}");
  Remove("model.safetensors");
  EXPECT_EQ(FingerprintModel(folder_, {}).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(FingerprintModel(folder_ + "/none", {}).status().code(), absl::StatusCode::kNotFound);
  std::filesystem::create_directory(folder_ + "/model.safetensors");
  EXPECT_EQ(FingerprintModel(folder_, {}).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace palimpsest
