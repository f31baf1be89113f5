// The NVMe tier as the broker has it: a TierStore over an NvmeBackend, on a real file, and on a
// disk that is slow.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "broker/tier/nvme/file_device.h"
#include "broker/tier/nvme/nvme_backend.h"
#include "broker/tier/nvme/simulated_disk.h"
#include "broker/tier/tier_store.h"
#include "common/block_checksum.h"
#include "common/mutex.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

constexpr Bytes kBlock = KiB(20);

std::vector<std::byte> Content(uint64_t id) {
  std::vector<std::byte> bytes(static_cast<size_t>(kBlock.count()));
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<std::byte>((id * 0x9E3779B97F4A7C15 + i * i) >> 8);
  }
  return bytes;
}

BlockIdentity Identity(uint64_t id, const std::string& tenant) {
  return {{id, 1}, {id, 2}, {1, 2, 3}, tenant};
}

struct Request {
  explicit Request(uint64_t id) : memory(std::make_shared<std::vector<std::byte>>(Content(id))) {}
  Request() : memory(std::make_shared<std::vector<std::byte>>(kBlock.count())) {}

  bool pinned() const { return memory.use_count() > 1; }

  std::shared_ptr<std::vector<std::byte>> memory;
  std::optional<absl::Status> answer;
};

absl::Status Store(TierStore& store, Request& request, const BlockIdentity& id, absl::Time deadline,
                   TierStore::Done done) {
  const BlockRecord record{id, kBlock, BlockChecksum(id.key, *request.memory),
                           absl::InfiniteFuture()};
  return store.Store({record, {*request.memory, request.memory}, deadline}, std::move(done));
}

absl::Status Load(TierStore& store, Request& request, const BlockIdentity& id, absl::Time deadline,
                  TierStore::Done done) {
  return store.Load({id, {absl::MakeSpan(*request.memory), request.memory}, deadline},
                    std::move(done));
}

class RealNvmeStore : public testing::Test {
 protected:
  RealNvmeStore() {
    std::string name = testing::TempDir() + "/nvme.XXXXXX";
    folder_ = mkdtemp(name.data());
  }
  ~RealNvmeStore() override { std::filesystem::remove_all(folder_); }

  std::string File() const { return folder_ + "/blocks"; }

  void Open() {
    TierStore::Options options;
    options.capacity = NvmeBackend::CapacityOf(kDevice);
    auto store = TierStore::Open(options,
                                 std::make_unique<NvmeBackend>(
                                     [this] {
                                       return OpenFileDevice({File(), kDevice});
                                     },
                                     Clock::Real()),
                                 Clock::Real());
    ASSERT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
    ASSERT_TRUE(store_->WaitUntilServing(absl::Seconds(60)));
  }
  void Close() { store_.reset(); }

  template <typename Begin>
  absl::Status Wait(const Begin& begin) {
    Notification ended;
    absl::Status result;
    const absl::Status accepted = begin([&](absl::Status status) {
      result = std::move(status);
      ended.Notify();
    });
    if (!accepted.ok()) return accepted;
    ended.WaitForNotification();
    return result;
  }
  absl::Status StoreBlock(uint64_t id, const std::string& tenant) {
    Request request(id);
    return Wait([&](TierStore::Done done) {
      return Store(*store_, request, Identity(id, tenant), Deadline(), std::move(done));
    });
  }
  absl::Status LoadBlock(uint64_t id, const std::string& tenant) {
    Request request;
    absl::Status status = Wait([&](TierStore::Done done) {
      return Load(*store_, request, Identity(id, tenant), Deadline(), std::move(done));
    });
    EXPECT_TRUE(!status.ok() || *request.memory == Content(id));
    return status;
  }
  static absl::Time Deadline() { return Clock::Real().Now() + absl::Seconds(60); }

  static constexpr Bytes kDevice = MiB(4);

  std::string folder_;
  std::unique_ptr<TierStore> store_;
};

TEST_F(RealNvmeStore, BlocksSurviveARestartAndPurgedOnesDoNot) {
  Open();
  for (uint64_t id = 1; id <= 6; ++id) {
    ASSERT_TRUE(StoreBlock(id, id <= 4 ? "alpha" : "beta").ok());
  }
  ASSERT_TRUE(store_->Remove({2, 1}));
  ASSERT_TRUE(Wait([&](TierStore::Done done) {
                return store_->Purge("beta", Deadline(), std::move(done));
              }).ok());
  Close();
  Open();
  EXPECT_EQ(store_->Records().size(), 3u);
  for (const uint64_t id : {1, 3, 4}) EXPECT_TRUE(LoadBlock(id, "alpha").ok()) << id;
  EXPECT_FALSE(LoadBlock(2, "alpha").ok());
  EXPECT_FALSE(LoadBlock(5, "beta").ok());
  EXPECT_EQ(store_->CheckConsistency(), absl::OkStatus());
}

TEST_F(RealNvmeStore, CorruptedByteIsAMissAndTheOtherBlocksStay) {
  Open();
  ASSERT_TRUE(StoreBlock(1, "alpha").ok());
  ASSERT_TRUE(StoreBlock(2, "alpha").ok());
  Close();
  std::ifstream in(File(), std::ios::binary);
  const std::string all((std::istreambuf_iterator<char>(in)), {});
  const std::vector<std::byte> content = Content(1);
  const size_t at =
      all.find(std::string(reinterpret_cast<const char*>(content.data()), content.size()));
  ASSERT_NE(at, std::string::npos);
  const UniqueFd file(open(File().c_str(), O_WRONLY | O_CLOEXEC));
  const char flipped = static_cast<char>(all[at + 7777] ^ 4);
  ASSERT_EQ(pwrite(file.get(), &flipped, 1, static_cast<off_t>(at) + 7777), 1);
  Open();
  EXPECT_FALSE(LoadBlock(1, "alpha").ok());
  EXPECT_TRUE(LoadBlock(2, "alpha").ok());
  EXPECT_EQ(store_->status().counters.misses.corrupt, 1u);
  EXPECT_FALSE(store_->Contains(Identity(1, "alpha")));
  Close();
  Open();
  EXPECT_EQ(store_->Records().size(), 1u);
}

TEST_F(RealNvmeStore, SecondBrokerIsRefused) {
  Open();
  TierStore::Options options;
  options.capacity = MiB(1);
  const auto second = TierStore::Open(options,
                                      std::make_unique<NvmeBackend>(
                                          [this] {
                                            return OpenFileDevice({File(), kDevice});
                                          },
                                          Clock::Real()),
                                      Clock::Real());
  EXPECT_EQ(second.status().code(), absl::StatusCode::kFailedPrecondition) << second.status();
}

// A deadline that passes while the disk works releases the one who waits, not the memory.
TEST(SlowNvmeStore, LateTransfersKeepTheirMemoryAndAreNotPublished) {
  DiskMedium medium(MiB(4));
  SimulatedDisk* disk = nullptr;
  FakeClock clock;
  TierStore::Options options;
  options.capacity = NvmeBackend::CapacityOf(MiB(4));
  options.own_thread = false;
  options.drain = absl::ZeroDuration();
  auto store = TierStore::Open(options,
                               std::make_unique<NvmeBackend>(
                                   [&]() -> absl::StatusOr<std::unique_ptr<BlockDevice>> {
                                     auto device = std::make_unique<SimulatedDisk>(medium, 1);
                                     disk = device.get();
                                     disk->set_immediate(true);
                                     return device;
                                   },
                                   clock),
                               clock);
  ASSERT_TRUE(store.ok()) << store.status();
  TierStore& tier = **store;
  const auto settle = [&] {
    for (int i = 0; i < 30; ++i) tier.RunOnce();
  };
  settle();
  ASSERT_TRUE(tier.WaitUntilServing(absl::ZeroDuration()));
  Request present(1);
  const auto answer = [](Request& request) {
    return [&request](absl::Status status) { request.answer = std::move(status); };
  };
  ASSERT_TRUE(
      Store(tier, present, Identity(1, "alpha"), clock.Now() + absl::Hours(1), answer(present))
          .ok());
  settle();
  ASSERT_EQ(present.answer, absl::OkStatus());

  disk->set_immediate(false);
  Request load, late(2);
  const absl::Time deadline = clock.Now() + absl::Milliseconds(50);
  ASSERT_TRUE(Load(tier, load, Identity(1, "alpha"), deadline, answer(load)).ok());
  ASSERT_TRUE(Store(tier, late, Identity(2, "alpha"), deadline, answer(late)).ok());
  settle();
  EXPECT_EQ(disk->in_flight(), 2u);
  clock.Advance(absl::Milliseconds(60));
  settle();
  for (const Request* request : {&load, &late}) {
    ASSERT_TRUE(request->answer.has_value());
    EXPECT_EQ(request->answer->code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_TRUE(request->pinned());
  }
  for (int i = 0; i < 10; ++i) {
    disk->RunAll();
    settle();
  }
  EXPECT_FALSE(load.pinned());
  EXPECT_FALSE(late.pinned());
  EXPECT_TRUE(tier.Contains(Identity(1, "alpha")));
  EXPECT_FALSE(tier.Contains(Identity(2, "alpha")));
  EXPECT_EQ(tier.CheckConsistency(), absl::OkStatus());
  disk->set_immediate(true);
  store->reset();
}

}  // namespace
}  // namespace palimpsest
