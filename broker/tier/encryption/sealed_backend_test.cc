#include "broker/tier/encryption/sealed_backend.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "broker/tier/directory/directory_backend.h"
#include "broker/tier/fake_tier_backend.h"
#include "broker/tier/nvme/nvme_backend.h"
#include "broker/tier/nvme/simulated_disk.h"
#include "broker/tier/tier_store.h"
#include "common/block_checksum.h"
#include "common/mutex.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

namespace fs = std::filesystem;

constexpr size_t kLength = 10000;
// What is looked for on media.
constexpr char kPattern[] = "the bytes of a block";

std::vector<std::byte> Content(uint64_t number) {
  std::string text;
  while (text.size() < kLength) absl::StrAppend(&text, kPattern, " ", number, ". ");
  const auto* from = reinterpret_cast<const std::byte*>(text.data());
  return {from, from + kLength};
}

BlockRecord Record(uint64_t number, const std::string& tenant = "anna") {
  BlockRecord record = {.id = {.key = {number << 52 | 0x00c0ffee, 0x5ec4e7c0de5ec4e7 + number},
                               .parent = {0x7a4e47a4e47a4e47, number},
                               .tokens = {},
                               .tenant = tenant},
                        .length = Bytes(kLength)};
  for (TokenId i = 0; i < 16; ++i) record.id.tokens.push_back(100000 + i * 1000);
  record.checksum = BlockChecksum(record.id.key, Content(number));
  return record;
}

template <typename T>
std::string Raw(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

// Everything of a block that no medium may show.
std::vector<std::string> Secrets(uint64_t number) {
  const BlockRecord record = Record(number);
  return {kPattern,
          std::string(reinterpret_cast<const char*>(record.id.tokens.data()), 4 * sizeof(TokenId)),
          Raw(record.id.key.low),
          Raw(record.id.parent.high),
          Raw(record.checksum),
          absl::StrCat(absl::Hex(record.id.key.low, absl::kZeroPad16))};
}

std::string WholeFile(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

class SealedBackendTest : public testing::Test {
 protected:
  SealedBackendTest() {
    std::string folder = testing::TempDir() + "/sealedXXXXXX";
    folder_ = ::mkdtemp(folder.data());
    fs::create_directories(keys() + "/");
    fs::create_directories(shared());
    WriteKey("anna", 'a');
    WriteKey("bert", 'b');
  }
  ~SealedBackendTest() override { fs::remove_all(folder_); }

  std::string keys() const { return folder_ + "/keys"; }
  std::string shared() const { return folder_ + "/shared"; }

  std::string WriteKey(const std::string& tenant, char byte, size_t size = kSecretKeyBytes,
                       mode_t mode = 0600) {
    std::string path = absl::StrCat(keys(), "/", tenant, ".key");
    fs::remove(path);
    std::ofstream(path, std::ios::binary) << std::string(size, byte);
    EXPECT_EQ(::chmod(path.c_str(), mode), 0);
    return path;
  }

  TenantKeys Keys(const std::vector<std::string>& tenants = {"anna", "bert"}) {
    absl::StatusOr<TenantKeys> loaded = TenantKeys::Load(keys(), tenants);
    EXPECT_EQ(loaded.status(), absl::OkStatus());
    return loaded.ok() ? *std::move(loaded) : TenantKeys();
  }

  // Each opens a back-end, as a process that starts, and says what it finds.
  std::vector<StoredBlock> Start(std::unique_ptr<TierBackend> medium, TenantKeys keys) {
    if (backend_ != nullptr) backend_->Close();
    backend_ = std::make_unique<SealedBackend>(std::move(medium), std::move(keys));
    absl::StatusOr<std::vector<StoredBlock>> found = backend_->Open();
    EXPECT_EQ(found.status(), absl::OkStatus());
    return found.ok() ? *std::move(found) : std::vector<StoredBlock>();
  }
  std::vector<StoredBlock> StartFake() {
    return Start(std::make_unique<FakeTierBackend>(&fake_), Keys());
  }
  std::vector<StoredBlock> StartNvme(std::optional<TenantKeys> keys = std::nullopt) {
    return Start(std::make_unique<NvmeBackend>(
                     [this]() -> absl::StatusOr<std::unique_ptr<BlockDevice>> {
                       auto disk = std::make_unique<SimulatedDisk>(disk_, ++seed_);
                       disk->set_immediate(true);
                       return disk;
                     },
                     clock_, NvmeBackend::Options{kMinArea}),
                 keys.has_value() ? *std::move(keys) : Keys());
  }
  std::unique_ptr<TierBackend> Directory(const std::string& node) {
    return std::make_unique<ThreadedBackend>(
        std::make_unique<DirectoryBackend>(
            DirectoryBackend::Options{.folder = shared(),
                                      .node = node,
                                      .generation_life = absl::ZeroDuration(),
                                      .foreign_blocks = 8},
            files_, clock_),
        2);
  }

  static absl::StatusOr<TierPlace> Write(TierBackend& backend, const BlockRecord& record,
                                         uint64_t content) {
    const std::vector<std::byte> bytes = Content(content);
    absl::StatusOr<TierPlace> result;
    Notification ended;
    backend.Write(record, bytes, [&](absl::StatusOr<TierPlace> place) {
      result = std::move(place);
      ended.Notify();
    });
    ended.WaitForNotification();
    return result;
  }
  static absl::Status Wait(const std::function<void(TierBackend::Done)>& begin) {
    absl::Status result;
    Notification ended;
    begin([&](absl::Status status) {
      result = std::move(status);
      ended.Notify();
    });
    ended.WaitForNotification();
    return result;
  }
  static absl::Status Read(TierBackend& backend, const BlockRecord& record, TierPlace place,
                           uint64_t content) {
    std::vector<std::byte> to(record.length.count());
    const absl::Status status = Wait([&](TierBackend::Done done) {
      backend.Read(record, place, absl::MakeSpan(to), std::move(done));
    });
    if (status.ok()) {
      EXPECT_EQ(to, Content(content));
    }
    return status;
  }
  static absl::StatusOr<StoredBlock> Find(TierBackend& backend, const BlockIdentity& id) {
    absl::StatusOr<StoredBlock> result;
    Notification ended;
    backend.Find(id, [&](absl::StatusOr<StoredBlock> found) {
      result = std::move(found);
      ended.Notify();
    });
    ended.WaitForNotification();
    return result;
  }

  // Of a whole round.
  static Discovery Look(TierBackend& backend) {
    Discovery all;
    while (!all.complete) {
      Notification ended;
      backend.Discover([&](absl::StatusOr<Discovery> told) {
        EXPECT_EQ(told.status(), absl::OkStatus());
        if (!told.ok()) told = Discovery{.complete = true};
        std::move(told->found.begin(), told->found.end(), std::back_inserter(all.found));
        std::move(told->gone.begin(), told->gone.end(), std::back_inserter(all.gone));
        all.complete = told->complete;
        ended.Notify();
      });
      ended.WaitForNotification();
    }
    return all;
  }

  std::string folder_;
  FakeTierBackend::Medium fake_;
  DiskMedium disk_{kIoUnit * 2 + kMinArea * 2 + kIoUnit * 64};
  uint64_t seed_ = 0;
  FileOperations files_;
  FakeClock clock_{absl::FromUnixSeconds(1'000'000)};
  std::unique_ptr<SealedBackend> backend_;
};

TEST_F(SealedBackendTest, KeyFilesThatOthersCouldReadOrThatAreNoneAreRefused) {
  const auto refusal = [&] { return TenantKeys::Load(keys(), {"bert", "carl"}).status(); };
  EXPECT_TRUE(absl::StrContains(refusal().message(), "openssl rand 32")) << refusal();
  for (const mode_t mode : {0640, 0604, 0660, 0620, 0700}) {
    WriteKey("carl", 'c', kSecretKeyBytes, mode);
    EXPECT_TRUE(absl::IsFailedPrecondition(refusal())) << mode;
    EXPECT_TRUE(absl::StrContains(refusal().message(), "chmod 600")) << refusal();
  }
  for (const size_t size : {0, 31, 33, 64}) {
    WriteKey("carl", 'c', size);
    EXPECT_TRUE(absl::StrContains(refusal().message(), "expected 32")) << refusal();
  }
  fs::remove(keys() + "/carl.key");
  fs::create_directory(keys() + "/carl.key");
  EXPECT_TRUE(absl::IsFailedPrecondition(refusal()));
  fs::remove(keys() + "/carl.key");
  WriteKey("carl", '\n', kSecretKeyBytes, 0400);
  EXPECT_EQ(refusal(), absl::OkStatus());
  EXPECT_TRUE(absl::IsInvalidArgument(TenantKeys::Load(keys(), {"../anna"}).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(TenantKeys::Load(keys(), {""}).status()));
}

TEST_F(SealedBackendTest, ATenantWithoutAKeyIsRefusedAndTheTierGoesOn) {
  auto backend = std::make_unique<SealedBackend>(std::make_unique<FakeTierBackend>(&fake_), Keys());
  const auto store = TierStore::Open({.capacity = MiB(1)}, std::move(backend), Clock::Real());
  ASSERT_EQ(store.status(), absl::OkStatus());
  ASSERT_TRUE((*store)->WaitUntilServing(absl::Seconds(30)));
  const auto stored = [&](const BlockRecord& record, uint64_t content) {
    const auto bytes = std::make_shared<std::vector<std::byte>>(Content(content));
    return Wait([&](TierStore::Done done) {
      ASSERT_EQ((*store)->Store({record, {*bytes, bytes}, absl::InfiniteFuture()}, std::move(done)),
                absl::OkStatus());
    });
  };
  for (uint64_t i = 0; i < 20; ++i) {
    const absl::Status status = stored(Record(i, "carl"), i);
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "tenant carl has no key in ")) << status;
  }
  BlockRecord large = Record(30);
  large.id.tokens.resize(TenantCipher::kMaxTokens + 1);
  EXPECT_TRUE(absl::IsFailedPrecondition(stored(large, 30)));
  EXPECT_EQ(stored(Record(1), 1), absl::OkStatus());
  EXPECT_EQ((*store)->status().counters.unstored.refused, 21);
  EXPECT_EQ((*store)->status().times_opened, 0);
  EXPECT_EQ((*store)->CheckConsistency(), absl::OkStatus());
}

TEST_F(SealedBackendTest, EveryChangedByteOfTheMediumIsAMiss) {
  StartFake();
  const absl::StatusOr<TierPlace> place = Write(*backend_, Record(1), 1);
  ASSERT_EQ(place.status(), absl::OkStatus());
  EXPECT_EQ(backend_->Footprint(Bytes(kLength)), KiB(12) + FakeTierBackend::kHeader);
  std::vector<std::byte>& bytes = fake_.blocks.at(place->value()).second;
  ASSERT_EQ(bytes.size(), 12288);
  for (size_t i = 0; i < bytes.size(); i += i % 4096 < 64 || i > 12200 ? 1 : 61) {
    bytes[i] ^= std::byte{1};
    EXPECT_TRUE(absl::IsDataLoss(Read(*backend_, Record(1), *place, 1))) << i;
    bytes[i] ^= std::byte{1};
  }
  EXPECT_EQ(Read(*backend_, Record(1), *place, 1), absl::OkStatus());
}

TEST_F(SealedBackendTest, SwappedBytesAndSwappedRecordsAreMisses) {
  StartFake();
  const absl::StatusOr<TierPlace> first = Write(*backend_, Record(1), 1);
  const absl::StatusOr<TierPlace> second = Write(*backend_, Record(2), 2);
  ASSERT_TRUE(first.ok() && second.ok());
  auto& [first_record, first_bytes] = fake_.blocks.at(first->value());
  auto& [second_record, second_bytes] = fake_.blocks.at(second->value());
  std::swap(first_bytes, second_bytes);
  EXPECT_TRUE(absl::IsDataLoss(Read(*backend_, Record(1), *first, 1)));
  EXPECT_TRUE(absl::IsDataLoss(Read(*backend_, Record(2), *second, 2)));
  // What a start finds is then the other one's name with these bytes.
  for (const StoredBlock& block : StartFake()) {
    EXPECT_TRUE(absl::IsDataLoss(Read(*backend_, block.record, block.place, 0)));
  }
  // Parts of records that were sealed do not make another one.
  std::swap(first_record.id.tokens, second_record.id.tokens);
  EXPECT_TRUE(StartFake().empty());
  EXPECT_TRUE(fake_.blocks.empty());
}

TEST_F(SealedBackendTest, ADiskShowsNothingOfABlockAndGivesItBackAfterARestart) {
  EXPECT_TRUE(StartNvme().empty());
  EXPECT_EQ(backend_->name(), "nvme (enciphered)");
  const absl::StatusOr<TierPlace> kept = Write(*backend_, Record(1), 1);
  const absl::StatusOr<TierPlace> removed = Write(*backend_, Record(2), 2);
  ASSERT_TRUE(kept.ok() && removed.ok());
  ASSERT_TRUE(Write(*backend_, Record(3, "bert"), 3).ok());
  EXPECT_EQ(Read(*backend_, Record(1), *kept, 1), absl::OkStatus());
  EXPECT_EQ(Wait([&](TierBackend::Done done) {
              backend_->Remove(Record(2), *removed, TierBackend::RemoveReason::kUnwanted,
                               std::move(done));
            }),
            absl::OkStatus());
  EXPECT_EQ(Wait([&](TierBackend::Done done) { backend_->Purge("bert", std::move(done)); }),
            absl::OkStatus());

  const std::vector<StoredBlock> found = StartNvme();
  ASSERT_EQ(found.size(), 1);
  EXPECT_EQ(found[0].record, Record(1));
  EXPECT_EQ(Read(*backend_, found[0].record, found[0].place, 1), absl::OkStatus());
  const absl::string_view medium(reinterpret_cast<const char*>(disk_.bytes.data()),
                                 disk_.bytes.size());
  for (const uint64_t number : {1, 2, 3}) {
    for (const std::string& secret : Secrets(number)) {
      EXPECT_FALSE(absl::StrContains(medium, secret)) << number;
    }
  }
}

TEST_F(SealedBackendTest, WhatNoKeyOpensIsRemovedAtTheNextStart) {
  StartNvme();
  for (uint64_t i = 1; i <= 4; ++i) {
    ASSERT_TRUE(Write(*backend_, Record(i, i % 2 == 0 ? "anna" : "bert"), i).ok());
  }
  WriteKey("anna", 'x');
  const std::vector<StoredBlock> found = StartNvme();
  ASSERT_EQ(found.size(), 2);
  for (const StoredBlock& block : found) EXPECT_EQ(block.record.id.tenant, "bert");
  WriteKey("anna", 'a');
  EXPECT_EQ(StartNvme().size(), 2);  // the others were removed, not hidden
  EXPECT_TRUE(StartNvme(Keys({"anna"})).empty());
}

TEST_F(SealedBackendTest, WhatWasStoredBeforeEncryptionIsForgotten) {
  FakeTierBackend plain(&fake_);
  ASSERT_TRUE(Write(plain, Record(1), 1).ok());
  EXPECT_TRUE(StartFake().empty());
  EXPECT_TRUE(fake_.blocks.empty());
}

TEST_F(SealedBackendTest, NodesWithTheSameKeyShareAFolderThatShowsNothing) {
  Start(Directory("n1"), Keys());
  SealedBackend other(Directory("n2"), Keys());
  WriteKey("anna", 'x');
  SealedBackend stranger(Directory("n3"), Keys());
  ASSERT_EQ(other.Open().status(), absl::OkStatus());
  ASSERT_EQ(stranger.Open().status(), absl::OkStatus());
  ASSERT_EQ(Write(*backend_, Record(1), 1).status(), absl::OkStatus());
  // Another tenant's block of the same key has another name.
  ASSERT_EQ(Write(*backend_, Record(1, "bert"), 1).status(), absl::OkStatus());

  const absl::StatusOr<StoredBlock> found = Find(other, Record(1).id);
  ASSERT_EQ(found.status(), absl::OkStatus());
  EXPECT_EQ(found->record, Record(1));
  EXPECT_EQ(Read(other, found->record, found->place, 1), absl::OkStatus());
  EXPECT_TRUE(absl::IsAlreadyExists(Write(other, Record(1), 1).status()));
  EXPECT_TRUE(absl::IsNotFound(Find(other, Record(2).id).status()));
  EXPECT_TRUE(absl::IsNotFound(Find(other, Record(1, "carl").id).status()));
  EXPECT_TRUE(absl::IsNotFound(Find(stranger, Record(1).id).status()));

  int files = 0;
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(shared())) {
    if (!entry.is_regular_file()) continue;
    ++files;
    const std::string content = entry.path().string() + WholeFile(entry.path());
    for (const std::string& secret : Secrets(1)) EXPECT_FALSE(absl::StrContains(content, secret));
  }
  EXPECT_EQ(files, 3);
  other.Close();
  stranger.Close();
  WriteKey("anna", 'a');
  EXPECT_EQ(Start(Directory("n1"), Keys()).size(), 2);
  backend_->Close();
}

TEST_F(SealedBackendTest, LooksTellWhatTheKeysOpenAndNothingElse) {
  Start(Directory("n1"), Keys());
  SealedBackend other(Directory("n2"), Keys());
  WriteKey("anna", 'x');
  SealedBackend stranger(Directory("n3"), Keys());
  ASSERT_EQ(other.Open().status(), absl::OkStatus());
  ASSERT_EQ(stranger.Open().status(), absl::OkStatus());
  ASSERT_EQ(Write(*backend_, Record(1), 1).status(), absl::OkStatus());
  ASSERT_EQ(Write(*backend_, Record(2, "bert"), 2).status(), absl::OkStatus());
  EXPECT_TRUE(Look(*backend_).found.empty());
  const Discovery told = Look(other);
  ASSERT_EQ(told.found.size(), 2);
  for (const StoredBlock& block : told.found) {
    const uint64_t number = block.record.id.tenant == "anna" ? 1 : 2;
    EXPECT_EQ(block.record, Record(number, block.record.id.tenant));
    EXPECT_EQ(Read(other, block.record, block.place, number), absl::OkStatus());
  }
  const Discovery strange = Look(stranger);
  ASSERT_EQ(strange.found.size(), 1) << "of bert it has the key";
  EXPECT_EQ(strange.found[0].record, Record(2, "bert"));
  const BlockRecord removed = Record(1);
  EXPECT_EQ(Wait([&](TierBackend::Done done) {
              backend_->Remove(removed, TierPlace(0), TierBackend::RemoveReason::kUnwanted,
                               std::move(done));
            }),
            absl::OkStatus());
  const std::vector<Discovery::Gone> gone = Look(other).gone;
  ASSERT_EQ(gone.size(), 1);
  EXPECT_EQ(gone[0], (Discovery::Gone{"anna", Record(1).id.key}));
  other.Close();
  stranger.Close();
  backend_->Close();
}

TEST_F(SealedBackendTest, SecretsAreFoundOnAMediumThatIsNotEnciphered) {
  NvmeBackend plain(
      [this]() -> absl::StatusOr<std::unique_ptr<BlockDevice>> {
        auto disk = std::make_unique<SimulatedDisk>(disk_, 1);
        disk->set_immediate(true);
        return disk;
      },
      clock_, NvmeBackend::Options{kMinArea});
  ASSERT_EQ(plain.Open().status(), absl::OkStatus());
  ASSERT_TRUE(Write(plain, Record(1), 1).ok());
  plain.Close();
  const absl::string_view medium(reinterpret_cast<const char*>(disk_.bytes.data()),
                                 disk_.bytes.size());
  const std::vector<std::string> secrets = Secrets(1);
  for (size_t i = 0; i + 1 < secrets.size(); ++i) {  // but for the name of a file
    EXPECT_TRUE(absl::StrContains(medium, secrets[i])) << i;
  }
}

}  // namespace
}  // namespace palimpsest
