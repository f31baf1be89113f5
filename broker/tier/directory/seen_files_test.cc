#include "broker/tier/directory/seen_files.h"

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace palimpsest {
namespace {

constexpr absl::Time kNow = absl::UnixEpoch();

BlockKey Key(uint64_t number, uint64_t folder = 5) { return {folder << 52 | number, number}; }

std::vector<BlockKey> Due(SeenFiles& seen, const std::vector<BlockKey>& files,
                          absl::Time now = kNow, const SeenFiles::Generations& generations = {}) {
  std::vector<BlockKey> due = seen.OnListed(5, files, generations, now).due;
  std::sort(due.begin(), due.end());
  return due;
}

TEST(SeenFiles, EachFileIsDueOnceUntilItsTimeIsOver) {
  SeenFiles seen(10);
  const std::vector<BlockKey> files = {Key(1), Key(2), Key(3)};
  EXPECT_EQ(Due(seen, files), files);
  seen.SetOwn(Key(1));
  seen.SetTold(Key(2), "anna", 7, kNow + absl::Seconds(5));
  seen.SetUseless(Key(3), kNow + absl::Seconds(3));
  EXPECT_TRUE(Due(seen, files).empty());
  EXPECT_EQ(Due(seen, files, kNow + absl::Seconds(3)), std::vector<BlockKey>{Key(3)});
  EXPECT_EQ(Due(seen, files, kNow + absl::Seconds(5)), (std::vector<BlockKey>{Key(2), Key(3)}));
  EXPECT_EQ(seen.others(), 2);
}

TEST(SeenFiles, BlocksOfAnotherGenerationAreDue) {
  SeenFiles seen(10);
  seen.SetTold(Key(1), "anna", 7, absl::InfiniteFuture());
  seen.SetTold(Key(2), "berta", 0, absl::InfiniteFuture());
  EXPECT_EQ(seen.tenants(), (std::vector<std::string>{"anna", "berta"}));
  const std::vector<BlockKey> files = {Key(1), Key(2)};
  EXPECT_TRUE(Due(seen, files, kNow, {{"anna", 7}, {"berta", 0}}).empty());
  EXPECT_EQ(Due(seen, files, kNow, {{"anna", 8}}), std::vector<BlockKey>{Key(1)});
}

TEST(SeenFiles, OnlyWhatWasToldIsGone) {
  SeenFiles seen(10);
  seen.SetOwn(Key(1));
  seen.SetTold(Key(2), "anna", 7, absl::InfiniteFuture());
  seen.SetUseless(Key(3), absl::InfiniteFuture());
  seen.SetTold(Key(4, /*folder=*/6), "anna", 7, absl::InfiniteFuture());
  const SeenFiles::Listed listed = seen.OnListed(5, {}, {}, kNow);
  ASSERT_EQ(listed.gone.size(), 1);
  EXPECT_EQ(listed.gone[0], (Discovery::Gone{"anna", Key(2)}));
  EXPECT_EQ(seen.others(), 1) << "that of the other folder";
  EXPECT_TRUE(seen.Forget(Key(4, 6)) == (Discovery::Gone{"anna", Key(4, 6)}));
  EXPECT_FALSE(seen.Forget(Key(4, 6)).has_value());
}

TEST(SeenFiles, BeyondTheLimitNothingNewIsLookedAt) {
  SeenFiles seen(2);
  for (uint64_t i = 1; i <= 5; ++i) seen.SetOwn(Key(i));
  std::vector<BlockKey> files;
  for (uint64_t i = 1; i <= 9; ++i) files.push_back(Key(i));
  const std::vector<BlockKey> due = Due(seen, files);
  ASSERT_EQ(due.size(), 2);
  for (const BlockKey& key : due) seen.SetUseless(key, kNow + absl::Seconds(1));
  EXPECT_TRUE(Due(seen, files).empty());
  EXPECT_EQ(Due(seen, files, kNow + absl::Seconds(1)), due);
  seen.Forget(due[0]);
  EXPECT_EQ(Due(seen, files).size(), 1);
}

// Against a plain map.
TEST(SeenFiles, RandomLivesAreAsInAModel) {
  std::mt19937_64 random(1);
  SeenFiles seen(1000);
  std::map<BlockKey, int> model;  // 0: own, 1: told, 2: useless
  for (int i = 0; i < 20000; ++i) {
    const BlockKey key = Key(random() % 50, random() % 3);
    switch (random() % 5) {
      case 0:
        seen.SetOwn(key);
        model[key] = 0;
        break;
      case 1:
        seen.SetTold(key, random() % 2 == 0 ? "anna" : "berta", 0, absl::InfiniteFuture());
        model[key] = 1;
        break;
      case 2:
        seen.SetUseless(key, absl::InfiniteFuture());
        model[key] = 2;
        break;
      case 3: {
        const bool told = model.contains(key) && model[key] == 1;
        ASSERT_EQ(seen.Forget(key).has_value(), told);
        model.erase(key);
        break;
      }
      default: {
        if (random() % 20 != 0) break;
        const size_t folder = random() % 3;
        std::set<BlockKey> files, due, gone;
        for (uint64_t n = 0; n < 50; ++n) {
          if (random() % 2 == 0) files.insert(Key(n, folder));
        }
        for (const BlockKey& file : files) {
          if (!model.contains(file)) due.insert(file);
        }
        std::erase_if(model, [&](const auto& known) {
          const bool left =
              SeenFiles::FolderOf(known.first) == folder && !files.contains(known.first);
          if (left && known.second == 1) gone.insert(known.first);
          return left;
        });
        const SeenFiles::Listed listed =
            seen.OnListed(folder, std::vector<BlockKey>(files.begin(), files.end()), {}, kNow);
        ASSERT_EQ(std::set<BlockKey>(listed.due.begin(), listed.due.end()), due);
        std::set<BlockKey> told_gone;
        for (const Discovery::Gone& one : listed.gone) told_gone.insert(one.key);
        ASSERT_EQ(told_gone, gone);
      }
    }
    ASSERT_EQ(seen.others(), std::count_if(model.begin(), model.end(),
                                           [](const auto& known) { return known.second != 0; }));
  }
}

}  // namespace
}  // namespace palimpsest
