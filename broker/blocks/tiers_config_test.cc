#include "broker/blocks/tiers_config.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

absl::StatusOr<TiersConfig> Read(const std::string& text) {
  auto yaml = YamlConfig::Parse(text, "broker.yaml");
  if (!yaml.ok()) return yaml.status();
  TiersConfig config = ReadTiers(yaml->root(), "node");
  if (absl::Status status = yaml->Finish(); !status.ok()) return status;
  return config;
}

std::string Refusal(const std::string& text) { return std::string(Read(text).status().message()); }

constexpr char kAll[] =
    "dram: {bytes: 1 GiB}\n"
    "cxl: {bytes: 2 GiB, node: 2}\n"
    "lend: {bytes: 64 MiB, listen: \"0.0.0.0:7400\"}\n"
    "nvme: {bytes: 4 GiB, path: /var/blocks, time_to_live: 2h}\n"
    "directory: {bytes: 8 GiB, path: /mnt/blocks}\n";

TEST(ReadTiers, ReadsEveryTierFromTheTop) {
  const auto config = Read(kAll);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->dram.chunk_bytes, MiB(64));
  ASSERT_EQ(config->lower.size(), 3u);
  EXPECT_EQ(std::get<CxlOptions>(config->lower[0].medium).node, 2);
  EXPECT_EQ(std::get<FileDeviceOptions>(config->lower[1].medium).path, "/var/blocks");
  EXPECT_LT(config->lower[1].store.capacity, GiB(4));
  EXPECT_GT(config->lower[1].store.capacity, GiB(3));
  EXPECT_EQ(config->lower[1].store.longest_life, absl::Hours(2));
  EXPECT_EQ(std::get<DirectoryBackend::Options>(config->lower[2].medium).node, "node");
  EXPECT_EQ(config->lower[2].store.foreign_blocks, size_t{1} << 17);
  EXPECT_EQ(std::get<DirectoryBackend::Options>(config->lower[2].medium).foreign_blocks,
            size_t{1} << 17);
  EXPECT_EQ(config->lower[1].store.foreign_blocks, 0u);
  EXPECT_EQ(config->lent->bytes, MiB(64));
  EXPECT_EQ(config->policy, "predictive");
}

TEST(ReadTiers, SaysHowOtherNodesBlocksAreLookedFor) {
  const auto config = Read(
      "dram: {bytes: 1 GiB}\n"
      "directory: {bytes: 8 GiB, path: q, foreign_blocks: 7, foreign_period: 2s}\n");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->lower[0].store.foreign_blocks, 7u);
  EXPECT_EQ(config->lower[0].store.foreign_period, absl::Seconds(2));
  EXPECT_EQ(std::get<DirectoryBackend::Options>(config->lower[0].medium).foreign_blocks, 7u);
  EXPECT_THAT(Refusal("dram: {bytes: 1 GiB}\nnvme: {bytes: 2 GiB, path: p, foreign_blocks: 7}\n"),
              HasSubstr("foreign_blocks"));
}

TEST(ReadTiers, RefusesALowerTierThatHasLess) {
  EXPECT_THAT(Refusal("dram: {bytes: 1 GiB}\nnvme: {bytes: 512 MiB, path: p}\n"),
              HasSubstr("has 512 MiB, less than dram above it (1 GiB)"));
  EXPECT_THAT(Refusal("dram: {bytes: 64 MiB}\nnvme: {bytes: 512 MiB, path: p}\n"
                      "directory: {bytes: 256 MiB, path: q}\n"),
              HasSubstr("less than nvme above it"));
}

TEST(ReadTiers, RefusesWhatItDoesNotKnowAndWhatIsMissing) {
  EXPECT_THAT(Refusal("dram: {bytes: 1 GiB, pages: huge}\n"), HasSubstr("pages"));
  EXPECT_THAT(Refusal("nvme: {bytes: 1 GiB, path: p}\n"), HasSubstr("bytes"));
  EXPECT_THAT(Refusal("dram: {bytes: 1000 MiB, chunk_bytes: 64 MiB}\n"),
              HasSubstr("a multiple of 64 MiB"));
  EXPECT_THAT(Refusal("dram: {bytes: 1 GiB}\ncxl: {bytes: 1 GiB}\n"),
              HasSubstr("one of node (a NUMA node), path"));
  EXPECT_THAT(Refusal("dram: {bytes: 1 GiB}\npolicy: random\n"), HasSubstr("predictive"));
}

TEST(ShareBudgets, GivesWhatIsSaidAndSharesTheRest) {
  const auto config = Read(kAll);
  ASSERT_TRUE(config.ok()) << config.status();
  const SaidBudgets some = {MiB(512), std::nullopt, GiB(1), std::nullopt};
  const SaidBudgets nothing(4);
  const auto budgets = ShareBudgets(*config, {some, nothing, nothing});
  ASSERT_TRUE(budgets.ok()) << budgets.status();
  EXPECT_EQ((*budgets)[0][0], MiB(512));
  EXPECT_EQ((*budgets)[1][0], MiB(256));
  EXPECT_EQ((*budgets)[1][1], GiB(2) / 3);
  EXPECT_EQ((*budgets)[2][2], MiB(1536));
  const SaidBudgets all = {GiB(1), std::nullopt, std::nullopt, std::nullopt};
  EXPECT_THAT(ShareBudgets(*config, {all, nothing}).status().message(),
              HasSubstr("at least a chunk for each"));
  EXPECT_THAT(ShareBudgets(*config, {all, all}).status().message(),
              HasSubstr("blocks.dram are 2 GiB together"));
}

TEST(ReadBudgets, KnowsTheTiersAndTheirOrder) {
  const auto config = Read(kAll);
  ASSERT_TRUE(config.ok()) << config.status();
  const auto read = [&](const std::string& text,
                        const std::optional<TiersConfig>& tiers) -> absl::StatusOr<SaidBudgets> {
    auto yaml = YamlConfig::Parse(text, "broker.yaml");
    if (!yaml.ok()) return yaml.status();
    ConfigReader root = yaml->root();
    SaidBudgets said = ReadBudgets(root, tiers);
    if (absl::Status status = yaml->Finish(); !status.ok()) return status;
    return said;
  };
  EXPECT_THAT(*read("blocks: {dram: 1 MiB, directory: 2 MiB}\n", *config),
              ElementsAre(MiB(1), std::nullopt, std::nullopt, MiB(2)));
  EXPECT_THAT(read("blocks: {dram: 2 MiB, nvme: 1 MiB}\n", *config).status().message(),
              HasSubstr("at least the budget in the tiers above"));
  EXPECT_THAT(read("blocks: {dram: 2 MiB}\n", std::nullopt).status().message(),
              HasSubstr("only with tiers"));
  EXPECT_THAT(read("blocks: {dram: 2 MiB, remote: 4 MiB}\n", *config).status().message(),
              HasSubstr("remote"));
}

}  // namespace
}  // namespace palimpsest
