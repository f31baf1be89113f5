// The tier of a shared file system as a whole: its store with its threads, over real folders.
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "broker/tier/directory/directory_fixture.h"
#include "broker/tier/tier_store.h"
#include "common/monotonic_time.h"
#include "common/mutex.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

namespace fs = std::filesystem;

class DirectoryTierTest : public DirectoryBackendTest {
 protected:
  std::unique_ptr<TierStore> OpenStore(const std::string& node) {
    TierStore::Options options;
    options.capacity = MiB(8);
    options.breaker.first_back_off = absl::Milliseconds(1);
    options.breaker.longest_back_off = absl::Milliseconds(2);
    options.breaker.slow = absl::Seconds(60);
    auto store =
        TierStore::Open(options, std::make_unique<ThreadedBackend>(Make(node), 4), Clock::Real());
    EXPECT_EQ(store.status(), absl::OkStatus());
    EXPECT_TRUE((*store)->WaitUntilServing(absl::Seconds(60)));
    return *std::move(store);
  }
  absl::Status Await(const std::function<absl::Status(TierStore::Done)>& ask) {
    auto ended = std::make_shared<Notification>();
    auto result = std::make_shared<absl::Status>();
    const absl::Status accepted = ask([=](absl::Status status) {
      *result = std::move(status);
      ended->Notify();
    });
    if (!accepted.ok()) return accepted;
    EXPECT_TRUE(ended->WaitForNotificationWithTimeout(absl::Seconds(60)));
    return *result;
  }
  absl::Status Store(TierStore& store, const BlockRecord& record) {
    auto bytes = std::make_shared<std::vector<std::byte>>(Content(record.id.key.low));
    return Await([&](TierStore::Done done) {
      return store.Store({.record = record,
                          .from = {*bytes, bytes},
                          .deadline = MonotonicNow() + absl::Seconds(60)},
                         std::move(done));
    });
  }
  absl::Status Load(TierStore& store, const BlockRecord& record) {
    auto bytes = std::make_shared<std::vector<std::byte>>(record.length.count());
    const absl::Status status = Await([&](TierStore::Done done) {
      return store.Load({.id = record.id,
                         .to = {absl::MakeSpan(*bytes), bytes},
                         .deadline = MonotonicNow() + absl::Seconds(60)},
                        std::move(done));
    });
    if (status.ok()) {
      EXPECT_EQ(*bytes, Content(record.id.key.low));
    }
    return status;
  }
};

TEST_F(DirectoryTierTest, TwoNodesShareRestartAndPurge) {
  auto a = OpenStore("a");
  auto b = OpenStore("b");
  ASSERT_EQ(Store(*a, Record(1)), absl::OkStatus());
  EXPECT_EQ(Load(*b, Record(1)), absl::OkStatus());
  EXPECT_TRUE(absl::IsAlreadyExists(Store(*b, Record(1))));
  EXPECT_EQ(b->status().used, Bytes(0));
  a.reset();
  EXPECT_EQ(Load(*b, Record(1)), absl::OkStatus());
  a = OpenStore("a");
  EXPECT_EQ(a->status().blocks, 1);
  EXPECT_EQ(Await([&](TierStore::Done done) {
              return b->Purge("anna", MonotonicNow() + absl::Seconds(60), std::move(done));
            }),
            absl::OkStatus());
  EXPECT_TRUE(absl::IsNotFound(Load(*a, Record(1))));
  EXPECT_EQ(a->status().blocks, 0);
  EXPECT_EQ(a->CheckConsistency(), absl::OkStatus());
}

TEST_F(DirectoryTierTest, CorruptedByteIsAMiss) {
  auto store = OpenStore("a");
  ASSERT_EQ(Store(*store, Record(1)), absl::OkStatus());
  std::fstream file(FilesBelow("blocks").at(0), std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(9000);
  file.put('!');
  file.close();
  EXPECT_TRUE(absl::IsDataLoss(Load(*store, Record(1))));
  EXPECT_TRUE(absl::IsNotFound(Load(*store, Record(1))));
  EXPECT_EQ(store->status().counters.misses.corrupt, 1);
  EXPECT_EQ(store->status().blocks, 0);
}

TEST_F(DirectoryTierTest, FolderThatIsRemovedOpensTheBreakerUntilItIsBack) {
  auto store = OpenStore("a");
  ASSERT_EQ(Store(*store, Record(1)), absl::OkStatus());
  fs::rename(folder_, folder_ + "-away");
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(absl::IsUnavailable(Load(*store, Record(1))));
  EXPECT_GE(store->status().times_opened, 1);
  EXPECT_FALSE(store->WaitUntilServing(absl::Milliseconds(20)));
  // An empty folder, as a mount point without its file system, is not taken for the tier.
  fs::create_directory(folder_);
  EXPECT_FALSE(store->WaitUntilServing(absl::Milliseconds(20)));
  EXPECT_TRUE(fs::is_empty(folder_));
  fs::remove(folder_);
  fs::rename(folder_ + "-away", folder_);
  ASSERT_TRUE(store->WaitUntilServing(absl::Seconds(60)));
  EXPECT_EQ(Load(*store, Record(1)), absl::OkStatus());
}

TEST_F(DirectoryTierTest, FullDiskRefusesStoresAndServesLoads) {
  auto store = OpenStore("a");
  ASSERT_EQ(Store(*store, Record(1)), absl::OkStatus());
  files_.FailPath("/temporary/", ENOSPC);
  for (int i = 0; i < 5; ++i) {
    EXPECT_TRUE(absl::IsResourceExhausted(Store(*store, Record(2 + i))));
    EXPECT_EQ(Load(*store, Record(1)), absl::OkStatus());
  }
  files_.Heal();
  EXPECT_EQ(Store(*store, Record(2)), absl::OkStatus());
  EXPECT_EQ(store->status().times_opened, 0);
}

}  // namespace
}  // namespace palimpsest
