// What a directory tier tells of the blocks of other nodes.
#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "broker/tier/directory/directory_fixture.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

namespace fs = std::filesystem;

class DirectoryDiscoverTest : public DirectoryBackendTest {
 protected:
  std::unique_ptr<DirectoryBackend> Reader(size_t blocks = 100,
                                           std::vector<std::string> tenants = {}) {
    auto backend = std::make_unique<DirectoryBackend>(
        DirectoryBackend::Options{.folder = folder_,
                                  .node = "reader",
                                  .generation_life = absl::ZeroDuration(),
                                  .scanning_threads = 2,
                                  .foreign_blocks = blocks,
                                  .tenants = std::move(tenants)},
        files_, clock_);
    EXPECT_EQ(backend->Open().status(), absl::OkStatus());
    return backend;
  }

  struct Told {
    std::vector<uint64_t> found;  // numbers of blocks
    std::vector<uint64_t> gone;

    bool operator==(const Told&) const = default;
  };
  // All that looks tell until a round is complete.
  Told Round(DirectoryBackend& backend) {
    Told told;
    for (bool complete = false; !complete;) {
      const absl::StatusOr<Discovery> look = backend.Discover();
      EXPECT_EQ(look.status(), absl::OkStatus());
      if (!look.ok()) break;
      for (const StoredBlock& block : look->found) told.found.push_back(block.record.id.key.low);
      for (const Discovery::Gone& gone : look->gone) told.gone.push_back(gone.key.low);
      complete = look->complete;
    }
    std::sort(told.found.begin(), told.found.end());
    std::sort(told.gone.begin(), told.gone.end());
    return told;
  }
  std::string PathOf(uint64_t number) {
    for (const std::string& path : FilesBelow("blocks")) {
      if (path.ends_with(absl::StrFormat("%016x", number))) return path;
    }
    ADD_FAILURE() << "no file of block " << number;
    return "";
  }
  void Flip(uint64_t number, size_t at) {
    std::fstream file(PathOf(number), std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(static_cast<std::streamoff>(at));
    const char byte = static_cast<char>(file.get() ^ 4);
    file.seekp(static_cast<std::streamoff>(at));
    file.put(byte);
  }
};

TEST_F(DirectoryDiscoverTest, BlocksOfOtherNodesAreToldOnceAndWhenTheyAreGone) {
  auto a = Start("a");
  auto b = Start("b");
  ASSERT_EQ(Write(*a, Record(1)), absl::OkStatus());
  auto reader = Reader();
  // What was there when it opened, and what came later; nothing of its own.
  ASSERT_EQ(Write(*b, Record(2)), absl::OkStatus());
  ASSERT_EQ(Write(*reader, Record(3)), absl::OkStatus());
  EXPECT_EQ(Round(*reader), (Told{{1, 2}, {}}));
  EXPECT_EQ(Round(*reader), Told{});
  EXPECT_EQ(Read(*reader, Record(1)), absl::OkStatus());
  EXPECT_EQ(Remove(*a, Record(1)), absl::OkStatus());
  ASSERT_EQ(Write(*a, Record(4)), absl::OkStatus());
  EXPECT_EQ(Round(*reader), (Told{{4}, {1}}));
  EXPECT_EQ(Round(*reader), Told{});
  // The whole record comes with it.
  ASSERT_EQ(Write(*b, Record(5, "berta")), absl::OkStatus());
  const absl::StatusOr<Discovery> look = reader->Discover();
  ASSERT_EQ(look.status(), absl::OkStatus());
  ASSERT_EQ(look->found.size(), 1);
  EXPECT_EQ(look->found[0].record, Record(5, "berta"));
}

TEST_F(DirectoryDiscoverTest, OwnBlocksAreNeitherToldNorReadAgain) {
  auto first = Reader();
  for (uint64_t i = 1; i <= 5; ++i) ASSERT_EQ(Write(*first, Record(i)), absl::OkStatus());
  const int after_writes = files_.reads();
  EXPECT_EQ(Round(*first), Told{});
  EXPECT_EQ(files_.reads(), after_writes);
  auto again = Reader();
  const int after_open = files_.reads();
  EXPECT_GT(after_open, after_writes);
  EXPECT_EQ(Round(*again), Told{});
  EXPECT_EQ(files_.reads(), after_open);
}

TEST_F(DirectoryDiscoverTest, EachHeaderIsReadOnce) {
  auto a = Start("a");
  auto reader = Reader();
  for (uint64_t i = 1; i <= 100; ++i) ASSERT_EQ(Write(*a, Record(i)), absl::OkStatus());
  EXPECT_EQ(Round(*reader).found.size(), 100);
  const int before = files_.reads();
  EXPECT_EQ(Round(*reader), Told{});
  EXPECT_EQ(files_.reads(), before);
  EXPECT_GT(files_.lists(), 0);
}

TEST_F(DirectoryDiscoverTest, ALookIsABoundedAmountOfWork) {
  auto a = Start("a");
  auto reader = Reader(/*blocks=*/1000);
  for (uint64_t i = 1; i <= 300; ++i) {
    // Two folders.
    BlockRecord record = Record(1 + i % 2);
    record.id.key.low = i;
    record.checksum = BlockChecksum(record.id.key, Content(i));
    ASSERT_EQ(a->Write(record, Content(i)).status(), absl::OkStatus());
  }
  size_t found = 0;
  int looks = 0;
  for (bool complete = false; !complete; ++looks) {
    const int reads = files_.reads();
    const absl::StatusOr<Discovery> look = reader->Discover();
    ASSERT_EQ(look.status(), absl::OkStatus());
    EXPECT_LE(files_.reads() - reads, 64);
    found += look->found.size();
    complete = look->complete;
  }
  EXPECT_EQ(found, 300);
  EXPECT_GE(looks, 4);
}

TEST_F(DirectoryDiscoverTest, OtherTenantsExpiredDamagedAndPurgedOnesAreNotTold) {
  auto a = Start("a");
  auto reader = Reader(100, {"anna"});
  ASSERT_EQ(a->Purge("anna"), absl::OkStatus());
  ASSERT_EQ(Write(*a, Record(1)), absl::OkStatus());
  ASSERT_EQ(Write(*a, Record(2, "berta")), absl::OkStatus());
  ASSERT_EQ(Write(*a, Record(3, kProbeTenant)), absl::OkStatus());
  BlockRecord expired = Record(4);
  expired.expiry = clock_.Now() + absl::Seconds(1);
  ASSERT_EQ(Write(*a, expired), absl::OkStatus());
  clock_.Advance(absl::Seconds(1));
  ASSERT_EQ(Write(*a, Record(5)), absl::OkStatus());
  Flip(5, 40);
  // Under a name that is not its own.
  fs::create_directory(folder_ + "/blocks/006");
  fs::copy_file(PathOf(1), folder_ + "/blocks/006/" + absl::StrFormat("%016x%016x", 6ull << 52, 6));
  // No blocks.
  std::ofstream(folder_ + "/blocks/006/README") << "text";
  std::ofstream(folder_ + "/blocks/zzz") << "text";
  EXPECT_EQ(Round(*reader), (Told{{1}, {}}));
  EXPECT_EQ(Round(*Reader(100, {"anna"})), (Told{{1}, {}})) << "as Open finds them";
}

TEST_F(DirectoryDiscoverTest, APurgeByAnotherNodeTakesBackWhatWasTold) {
  auto a = Start("a");
  auto reader = Reader();
  ASSERT_EQ(Write(*a, Record(1)), absl::OkStatus());
  ASSERT_EQ(Write(*a, Record(2, "berta")), absl::OkStatus());
  EXPECT_EQ(Round(*reader), (Told{{1, 2}, {}}));
  ASSERT_EQ(Start("b")->Purge("anna"), absl::OkStatus());
  EXPECT_TRUE(absl::IsNotFound(Read(*reader, Record(1)))) << "before any look";
  EXPECT_EQ(Read(*reader, Record(2, "berta")), absl::OkStatus());
  ASSERT_EQ(Write(*a, Record(3)), absl::OkStatus());
  EXPECT_EQ(Round(*reader), (Told{{3}, {}})) << "the miss is known to who asked";
  ASSERT_EQ(a->Purge("anna"), absl::OkStatus());
  EXPECT_EQ(Round(*reader), (Told{{}, {3}}));
  EXPECT_EQ(Round(*reader), Told{});
}

TEST_F(DirectoryDiscoverTest, ABlockThatWasReplacedIsToldAnew) {
  auto a = Start("a");
  auto reader = Reader();
  BlockRecord old = Record(1);
  old.expiry = clock_.Now() + absl::Seconds(10);
  ASSERT_EQ(Write(*a, old), absl::OkStatus());
  EXPECT_EQ(Round(*reader), (Told{{1}, {}}));
  // By the same content, with a longer life: when the first one is over.
  ASSERT_EQ(Write(*a, Record(1)), absl::OkStatus());
  EXPECT_EQ(Round(*reader), Told{});
  clock_.Advance(absl::Seconds(10));
  EXPECT_EQ(Round(*reader), (Told{{1}, {}}));
  // By other bytes, as another GPU may compute it: when somebody has noticed.
  ASSERT_EQ(Write(*a, Record(1, "anna", /*version=*/5), 5), absl::OkStatus());
  EXPECT_TRUE(absl::IsNotFound(Read(*reader, Record(1))));
  const absl::StatusOr<Discovery> look = reader->Discover();
  ASSERT_TRUE(look.ok() && look->found.size() == 1);
  EXPECT_EQ(look->found[0].record, Record(1, "anna", 5));
  EXPECT_EQ(Read(*reader, look->found[0].record), absl::OkStatus());
}

TEST_F(DirectoryDiscoverTest, ANodeFindsWhatAnotherStoredInPlaceOfItsOwn) {
  auto a = Start("a");
  auto reader = Reader();
  ASSERT_EQ(Write(*reader, Record(1)), absl::OkStatus());
  EXPECT_EQ(Remove(*reader, Record(1)), absl::OkStatus());
  ASSERT_EQ(Write(*a, Record(1)), absl::OkStatus());
  EXPECT_EQ(Round(*reader), (Told{{1}, {}}));
  EXPECT_TRUE(absl::IsAlreadyExists(Write(*reader, Record(1))));
  EXPECT_EQ(Remove(*a, Record(1)), absl::OkStatus());
  ASSERT_EQ(Write(*reader, Record(1)), absl::OkStatus());
  EXPECT_EQ(Round(*reader), Told{}) << "its store knows that it is its own now";
}

TEST_F(DirectoryDiscoverTest, AFileThatVanishesBetweenListingAndReadingIsNotTold) {
  auto a = Start("a");
  for (const int error : {ENOENT, ESTALE}) {
    auto reader = Reader();
    ASSERT_EQ(Write(*a, Record(1)), absl::OkStatus());
    files_.FailPath("/blocks/001/", error);
    EXPECT_EQ(Round(*reader), Told{});
    EXPECT_TRUE(absl::IsNotFound(Read(*reader, Record(1))));
    files_.Heal();
    EXPECT_EQ(Round(*reader), (Told{{1}, {}})) << "it is there after all";
    // And once it was told.
    files_.FailPath("/blocks/001/", error);
    EXPECT_TRUE(absl::IsNotFound(Read(*reader, Record(1))));
    files_.Heal();
    EXPECT_EQ(Round(*reader), (Told{{1}, {}}));
    EXPECT_EQ(Remove(*a, Record(1)), absl::OkStatus());
  }
}

TEST_F(DirectoryDiscoverTest, AFileThatCannotBeReadIsTriedAgainLater) {
  auto a = Start("a");
  auto reader = Reader();
  ASSERT_EQ(Write(*a, Record(1)), absl::OkStatus());
  ASSERT_EQ(Write(*a, Record(2)), absl::OkStatus());
  files_.FailPath("/blocks/001/", EACCES);
  EXPECT_EQ(Round(*reader), (Told{{2}, {}})) << "others are found all the same";
  files_.Heal();
  EXPECT_EQ(Round(*reader), Told{});
  clock_.Advance(absl::Minutes(10));
  EXPECT_EQ(Round(*reader), (Told{{1}, {}}));
}

TEST_F(DirectoryDiscoverTest, NothingIsGoneBecauseAFolderCannotBeListed) {
  auto a = Start("a");
  auto reader = Reader();
  ASSERT_EQ(Write(*a, Record(1)), absl::OkStatus());
  EXPECT_EQ(Round(*reader), (Told{{1}, {}}));
  files_.FailPath("/blocks/001", EACCES);
  EXPECT_EQ(Round(*reader), Told{});
  files_.Heal();
  files_.FailPath("/blocks", EIO);
  EXPECT_TRUE(absl::IsUnavailable(reader->Discover().status()));
  files_.Heal();
  fs::rename(folder_, folder_ + "-away");
  EXPECT_TRUE(absl::IsUnavailable(reader->Discover().status()));
  fs::rename(folder_ + "-away", folder_);
  EXPECT_EQ(Round(*reader), Told{});
}

TEST_F(DirectoryDiscoverTest, ARoundThatBreaksOffHasToldWhatItFound) {
  auto a = Start("a");
  auto reader = Reader();
  ASSERT_EQ(Write(*a, Record(1)), absl::OkStatus());
  ASSERT_EQ(Write(*a, Record(2)), absl::OkStatus());
  Told told;
  bool broke_off = false;
  for (int call = 0; told.found.size() < 2; ++call) {
    ASSERT_LT(call, 100);
    files_.FailAt(call, EIO, /*and_all_after=*/true);
    const absl::StatusOr<Discovery> look = reader->Discover();
    broke_off = broke_off || !look.ok();
    files_.Heal();
    // Files that could not be read are due again.
    clock_.Advance(absl::Minutes(10));
    if (!look.ok()) continue;
    for (const StoredBlock& block : look->found) told.found.push_back(block.record.id.key.low);
  }
  std::sort(told.found.begin(), told.found.end());
  EXPECT_EQ(told.found, (std::vector<uint64_t>{1, 2}));
  EXPECT_TRUE(broke_off);
}

TEST_F(DirectoryDiscoverTest, LookingRemovesNothingOfOthers) {
  auto a = Start("a");
  auto reader = Reader();
  BlockRecord expiring = Record(1);
  expiring.expiry = clock_.Now() + absl::Seconds(1);
  ASSERT_EQ(Write(*a, expiring), absl::OkStatus());
  ASSERT_EQ(Write(*a, Record(2)), absl::OkStatus());
  Flip(2, 40);
  std::ofstream(folder_ + "/temporary/a.0123456789abcdef.1") << "part of a block";
  clock_.Advance(absl::Seconds(1));
  Round(*reader);
  Reader();
  EXPECT_EQ(FilesBelow("blocks").size(), 2);
  EXPECT_EQ(FilesBelow("temporary").size(), 1) << "it is fresh";
}

TEST_F(DirectoryDiscoverTest, OpenKeepsAsManyAsAreWanted) {
  auto a = Start("a");
  for (uint64_t i = 1; i <= 20; ++i) ASSERT_EQ(Write(*a, Record(i)), absl::OkStatus());
  auto reader = Reader(/*blocks=*/5);
  const absl::StatusOr<Discovery> look = reader->Discover();
  ASSERT_TRUE(look.ok());
  EXPECT_EQ(look->found.size(), 5);
  EXPECT_FALSE(look->complete);
  EXPECT_EQ(Round(*reader).found.size(), 15) << "files up to eight times as many";
}

}  // namespace
}  // namespace palimpsest
