#include "broker/tier/directory/directory_backend.h"

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "broker/tier/directory/block_file.h"
#include "broker/tier/directory/directory_fixture.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

namespace fs = std::filesystem;

TEST(BlockFile, HeadersComeBackAndNoDamagedOneDoes) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 40; ++i) {
    BlockFileHeader header;
    header.record = Record(random());
    header.record.id.tokens.resize(i == 0 ? kMaxBlockTokens : random() % 3000);
    header.record.id.tenant = std::string(1 + random() % kMaxTenantName, 'x');
    header.record.expiry = i % 2 == 0 ? absl::InfiniteFuture() : absl::FromUnixNanos(random() >> 2);
    header.node = std::string(1 + random() % kMaxNodeName, 'n');
    header.generation = random();
    const std::string encoded = EncodeBlockFileHeader(header);
    std::vector<std::byte> bytes(encoded.size());
    std::memcpy(bytes.data(), encoded.data(), encoded.size());
    ASSERT_EQ(*BlockFileHeaderSize(absl::MakeSpan(bytes).first(kBlockFilePage)), bytes.size());
    ASSERT_EQ(*DecodeBlockFileHeader(bytes), header);
    for (int flips = 0; flips < 200; ++flips) {
      std::vector<std::byte> damaged = bytes;
      damaged[flips < 120 ? flips : random() % bytes.size()] ^= std::byte(1 << (random() % 8));
      const auto decoded = DecodeBlockFileHeader(damaged);
      ASSERT_TRUE(absl::IsDataLoss(decoded.status())) << decoded.status();
    }
    bytes.resize(bytes.size() - 1);
    ASSERT_FALSE(DecodeBlockFileHeader(bytes).ok());
  }
}

TEST_F(DirectoryBackendTest, BlocksSurviveARestartOfTheirNodeAlone) {
  auto backend = Start("a");
  BlockRecord expiring = Record(2);
  expiring.expiry = clock_.Now() + absl::Hours(1);
  ASSERT_EQ(Write(*backend, Record(1)), absl::OkStatus());
  ASSERT_EQ(Write(*backend, expiring), absl::OkStatus());
  std::vector<StoredBlock> found;
  backend = Start("a", &found);
  ASSERT_EQ(found.size(), 2);
  EXPECT_TRUE(found[0].record == Record(1) || found[0].record == expiring);
  EXPECT_EQ(Read(*backend, Record(1)), absl::OkStatus());
  Start("b", &found);
  EXPECT_TRUE(found.empty()) << "only the writer accounts";

  clock_.Advance(absl::Hours(1));
  Start("a", &found);
  EXPECT_EQ(found.size(), 1);
  EXPECT_EQ(FilesBelow("blocks").size(), 1) << "an expired block is left";
  EXPECT_GE(Bytes(static_cast<int64_t>(fs::file_size(FilesBelow("blocks")[0]))), Bytes(10000));
  EXPECT_LE(Bytes(static_cast<int64_t>(fs::file_size(FilesBelow("blocks")[0]))),
            backend->Footprint(Bytes(10000)));
}

TEST_F(DirectoryBackendTest, OtherNodesFindBlocksButDoNotRemoveThem) {
  auto a = Start("a");
  auto b = Start("b");
  ASSERT_EQ(Write(*a, Record(1)), absl::OkStatus());
  const auto found = b->Find(Record(1).id);
  ASSERT_EQ(found.status(), absl::OkStatus());
  EXPECT_EQ(found->record, Record(1));
  EXPECT_EQ(Read(*b, found->record), absl::OkStatus());
  EXPECT_TRUE(absl::IsNotFound(b->Find(Record(2).id).status()));
  EXPECT_EQ(Remove(*b, Record(1)), absl::OkStatus());
  EXPECT_EQ(Read(*a, Record(1)), absl::OkStatus()) << "a block was removed by another node";
  EXPECT_TRUE(absl::IsAlreadyExists(Write(*b, Record(1))));
  EXPECT_EQ(Remove(*a, Record(1)), absl::OkStatus());
  EXPECT_TRUE(absl::IsNotFound(Remove(*a, Record(1))));
  EXPECT_EQ(Write(*b, Record(1)), absl::OkStatus());
}

TEST_F(DirectoryBackendTest, BlockThatAnotherNodeReplacedIsAMissAndStays) {
  auto a = Start("a");
  auto b = Start("b");
  BlockRecord old = Record(1);
  old.expiry = clock_.Now() + absl::Seconds(1);
  ASSERT_EQ(Write(*a, old), absl::OkStatus());
  clock_.Advance(absl::Seconds(1));
  // The same block with other bytes, as another GPU may compute it.
  const BlockRecord fresh = Record(1, "anna", /*version=*/5);
  ASSERT_EQ(Write(*b, fresh, 5), absl::OkStatus());
  EXPECT_TRUE(absl::IsNotFound(Read(*a, old)));
  EXPECT_EQ(Remove(*a, old), absl::OkStatus());
  EXPECT_EQ(Read(*b, fresh), absl::OkStatus());
}

// Whatever call fails, and however: no wrong bytes, nothing of a block that was not stored, and no
// temporary file, unless it is the removal of one that fails.
TEST_F(DirectoryBackendTest, EveryCallThatFailsIsAMissOrARefusal) {
  auto backend = Start("a");
  for (const bool torn : {false, true}) {
    files_.set_torn(torn);
    for (const int error : {EIO, ENOSPC, EDQUOT, ESTALE, ENOENT, EROFS}) {
      for (int call = 0;; ++call) {
        ASSERT_LT(call, 100);
        SCOPED_TRACE(absl::StrCat("call ", call, " fails with ", error));
        const BlockRecord record = Record(1 + call % 3);
        files_.FailAt(call, error);
        const absl::Status written = Write(*backend, record);
        const bool failed = files_.failed();
        files_.Heal();
        if (written.ok()) {
          // What failed was not needed: a look at what is there already.
          EXPECT_EQ(Read(*backend, record), absl::OkStatus());
          EXPECT_EQ(Remove(*backend, record), absl::OkStatus());
        } else {
          if (error == ENOSPC || error == EDQUOT) {
            EXPECT_FALSE(absl::IsNotFound(written)) << written;
          } else {
            EXPECT_TRUE(absl::IsUnavailable(written)) << written;
          }
          EXPECT_TRUE(absl::IsNotFound(Read(*backend, record))) << "there is a part of a block";
        }
        EXPECT_TRUE(FilesBelow("temporary").empty());
        if (!failed) break;
      }
    }
  }

  ASSERT_EQ(Write(*backend, Record(1)), absl::OkStatus());
  for (int call = 0;; ++call) {
    ASSERT_LT(call, 100);
    files_.FailAt(call, call % 2 == 0 ? EIO : ESTALE);
    const absl::Status read = Read(*backend, Record(1));
    const bool failed = files_.failed();
    files_.Heal();
    EXPECT_NE(read.ok(), failed) << read;
    EXPECT_FALSE(absl::IsDataLoss(read)) << read;
    EXPECT_EQ(Read(*backend, Record(1)), absl::OkStatus());
    if (!failed) break;
  }
}

// From some call on nothing happens any more, as when the machine dies; then it starts again.
TEST_F(DirectoryBackendTest, DeathAtAnyCallLeavesAWholeBlockOrNone) {
  bool alive = false;
  for (int call = 0; !alive; ++call) {
    ASSERT_LT(call, 100);
    SCOPED_TRACE(call);
    auto backend = Start("a");
    files_.set_torn(call % 2 == 0);
    files_.FailAt(call, EIO, /*and_all_after=*/true);
    const absl::Status written = Write(*backend, Record(1));
    alive = !files_.failed();
    files_.Heal();
    std::vector<StoredBlock> found;
    backend = Start("a", &found);
    EXPECT_TRUE(FilesBelow("temporary").empty());
    EXPECT_EQ(found.size(), FilesBelow("blocks").size());
    if (written.ok()) {
      EXPECT_EQ(found.size(), 1);
    }
    if (!found.empty()) {
      EXPECT_EQ(Read(*backend, Record(1)), absl::OkStatus());
      EXPECT_EQ(Remove(*backend, Record(1)), absl::OkStatus());
    }
  }
}

TEST_F(DirectoryBackendTest, ShortReadsAndWritesGoOn) {
  files_.set_short(true);
  auto backend = Start("a");
  BlockRecord record = Record(1);
  record.id.tokens.resize(3000);
  ASSERT_EQ(Write(*backend, record), absl::OkStatus());
  EXPECT_EQ(Read(*backend, record), absl::OkStatus());
  files_.set_short(false);
  EXPECT_EQ(Read(*backend, record), absl::OkStatus());
}

TEST_F(DirectoryBackendTest, DamageIsNoticed) {
  auto backend = Start("a");
  ASSERT_EQ(Write(*backend, Record(1)), absl::OkStatus());
  const std::string path = FilesBelow("blocks").at(0);
  const auto size = fs::file_size(path);
  for (const size_t at : {size_t{0}, size_t{40}, size_t{100}, size_t{4000}}) {
    const auto flip = [&] {
      std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
      file.seekg(at);
      const char byte = static_cast<char>(file.get() ^ 4);
      file.seekp(at);
      file.put(byte);
    };
    flip();
    EXPECT_TRUE(absl::IsDataLoss(Read(*backend, Record(1)))) << at;
    EXPECT_TRUE(absl::IsNotFound(backend->Find(Record(1).id).status()));
    flip();
    EXPECT_EQ(Read(*backend, Record(1)), absl::OkStatus());
  }
  // Torn: the name reached the disk, the bytes did not.
  for (const size_t left : {size - 1, size_t{4096}, size_t{4095}, size_t{0}}) {
    fs::resize_file(path, left);
    EXPECT_TRUE(absl::IsDataLoss(Read(*backend, Record(1)))) << left;
  }
  std::vector<StoredBlock> found;
  Start("a", &found);
  EXPECT_TRUE(found.empty());
  EXPECT_TRUE(fs::exists(path)) << "it is young: another node's, perhaps";
  EXPECT_EQ(backend->Remove(Record(1), TierPlace(0), TierBackend::RemoveReason::kCorrupt),
            absl::OkStatus());
  EXPECT_FALSE(fs::exists(path));
}

TEST_F(DirectoryBackendTest, PurgeSurvivesARestartAndHoldsForAllNodes) {
  auto a = Start("a");
  auto b = Start("b");
  ASSERT_EQ(Write(*a, Record(1)), absl::OkStatus());
  ASSERT_EQ(Write(*b, Record(2)), absl::OkStatus());
  ASSERT_EQ(Write(*a, Record(3, "berta")), absl::OkStatus());
  ASSERT_EQ(a->Purge("anna"), absl::OkStatus());
  EXPECT_TRUE(absl::IsNotFound(Read(*a, Record(1))));
  EXPECT_TRUE(absl::IsNotFound(Read(*b, Record(2))));
  EXPECT_EQ(Read(*b, Record(3, "berta")), absl::OkStatus());
  std::vector<StoredBlock> found;
  a = Start("a", &found);
  ASSERT_EQ(found.size(), 1);
  EXPECT_EQ(found[0].record, Record(3, "berta"));
  b = Start("b", &found);
  EXPECT_TRUE(found.empty());
  EXPECT_EQ(FilesBelow("blocks").size(), 1);
  ASSERT_EQ(Write(*b, Record(2)), absl::OkStatus());
  EXPECT_EQ(Read(*a, Record(2)), absl::OkStatus());
  // What two purges left does not come back with a third.
  ASSERT_EQ(b->Purge("anna"), absl::OkStatus());
  ASSERT_EQ(a->Purge("anna"), absl::OkStatus());
  EXPECT_TRUE(absl::IsNotFound(Read(*a, Record(2))));
}

TEST_F(DirectoryBackendTest, DeathInAPurgeNeverBringsBackWhatAnEarlierOneForgot) {
  auto backend = Start("a");
  ASSERT_EQ(Write(*backend, Record(1)), absl::OkStatus());
  const std::string block = FilesBelow("blocks").at(0);
  const std::string kept = folder_ + "-kept";
  fs::copy_file(block, kept);
  ASSERT_EQ(backend->Purge("anna"), absl::OkStatus());
  for (const bool dies : {false, true}) {
    for (int call = 0;; ++call) {
      ASSERT_LT(call, 100);
      files_.FailAt(call, EIO, dies);
      const absl::Status purged = backend->Purge("anna");
      const bool failed = files_.failed();
      files_.Heal();
      if (failed && purged.ok()) FAIL() << "call " << call << " failed, but not the purge";
      fs::copy_file(kept, block, fs::copy_options::overwrite_existing);
      EXPECT_TRUE(absl::IsNotFound(Read(*backend, Record(1)))) << call;
      if (!failed) break;
    }
  }
  // A file that holds no generation hides everything, and the next purge repairs it.
  std::ofstream(FilesBelow("purged").at(0), std::ios::trunc) << "zero";
  EXPECT_TRUE(absl::IsNotFound(Read(*backend, Record(1))));
  ASSERT_EQ(backend->Purge("anna"), absl::OkStatus());
  fs::remove(kept);
}

TEST_F(DirectoryBackendTest, TemporariesAreSweptByOwnerAndAge) {
  Start("a");
  const auto leave = [&](const std::string& name, absl::Duration age) {
    const std::string path = folder_ + "/temporary/" + name;
    std::ofstream(path) << "part of a block";
    struct stat now;
    ASSERT_EQ(::stat(path.c_str(), &now), 0);
    const timespec then = absl::ToTimespec(absl::TimeFromTimespec(now.st_mtim) - age);
    const timespec times[] = {then, then};
    ASSERT_EQ(::utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
  };
  leave("a.0123456789abcdef.1", absl::ZeroDuration());
  leave("ab.0123456789abcdef.1", absl::Hours(23));
  leave("ab.0123456789abcdef.2", absl::Hours(25));
  Start("a");
  EXPECT_EQ(FilesBelow("temporary"),
            std::vector<std::string>{folder_ + "/temporary/ab.0123456789abcdef.1"});
}

TEST_F(DirectoryBackendTest, FolderMustExistAndBeATiersOrEmpty) {
  fs::remove(folder_);
  EXPECT_TRUE(absl::IsFailedPrecondition(Make("a")->Open().status()));
  fs::create_directory(folder_);
  std::ofstream(folder_ + "/thesis.tex") << "precious";
  EXPECT_TRUE(absl::IsFailedPrecondition(Make("a")->Open().status()));
  fs::remove(folder_ + "/thesis.tex");
  EXPECT_EQ(Make("a")->Open().status(), absl::OkStatus());
  for (const char* node : {"", "a.b", "a/b"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(Make(node)->Open().status())) << node;
  }
}

}  // namespace
}  // namespace palimpsest
