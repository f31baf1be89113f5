#include "worker/compute/cuda/gemm_cache.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace palimpsest::cuda {
namespace {

using ::testing::HasSubstr;

GemmCache Example() {
  GemmCache cache;
  cache.Put("NVIDIA H200|130002|6144|4096|1", {.algorithm = {1, ~uint64_t{0}, 3, 0, 0, 0, 0, 8},
                                               .workspace_bytes = 1 << 20,
                                               .microseconds = 12.25});
  cache.Put("NVIDIA H200|130002|4096|4096|1", {.workspace_bytes = 7});
  return cache;
}

TEST(GemmCache, ParseIsTheInverseOfSerialize) {
  const GemmCache cache = Example();
  auto parsed = GemmCache::Parse(cache.Serialize());
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->size(), 2);
  for (const char* key : {"NVIDIA H200|130002|6144|4096|1", "NVIDIA H200|130002|4096|4096|1"}) {
    ASSERT_NE(parsed->Find(key), nullptr);
    EXPECT_EQ(*parsed->Find(key), *cache.Find(key));
  }
  EXPECT_EQ(parsed->Find("another"), nullptr);
}

TEST(GemmCache, DamageIsReportedByLine) {
  const std::string text = Example().Serialize();
  EXPECT_THAT(std::string(GemmCache::Parse("gemm 7\n").status().message()), HasSubstr("line 1"));
  EXPECT_THAT(std::string(GemmCache::Parse(text + "key\t0\n").status().message()),
              HasSubstr("line 4"));
  const size_t word = text.find("ffffffffffffffff");
  ASSERT_NE(word, std::string::npos);
  EXPECT_FALSE(GemmCache::Parse(std::string(text).replace(word, 2, "xx")).ok());
}

TEST(GemmCache, SurvivesTheFile) {
  std::string folder = ::testing::TempDir() + "/gemm_cache_XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  const std::string path = folder + "/algorithms";
  EXPECT_EQ(GemmCache::Load(path)->size(), 0);
  ASSERT_TRUE(Example().Store(path).ok());
  EXPECT_EQ(GemmCache::Load(path)->size(), 2);
  std::ofstream(path) << "something else";
  EXPECT_THAT(std::string(GemmCache::Load(path).status().message()), HasSubstr("delete"));
  EXPECT_FALSE(Example().Store(folder + "/missing/algorithms").ok());
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace palimpsest::cuda
