#include "broker/tier/cxl/cxl_backend.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <utility>

#include "broker/tier/tier_store.h"
#include "common/block_checksum.h"
#include "common/monotonic_time.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

using RemoveReason = TierBackend::RemoveReason;

CxlOptions Emulated(Bytes size = MiB(2)) {
  return {
      .size = size,
      .emulated = CxlOptions::Emulated{.bytes_per_second = 1e6, .latency = absl::Milliseconds(1)}};
}

std::vector<std::byte> Content(uint64_t seed, size_t size) {
  std::vector<std::byte> bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(seed * 131 + i * 7);
  return bytes;
}

BlockRecord Record(uint64_t number, size_t size) {
  return {.id = {.key = {number, 0}, .tokens = {1}, .tenant = "anna"},
          .length = Bytes(static_cast<int64_t>(size)),
          .checksum = BlockChecksum({number, 0}, Content(number, size))};
}

// With blocks of several sizes, until nothing fits any more.
void FillAndCompare(CxlBackend& backend) {
  ASSERT_EQ(backend.Open().status(), absl::OkStatus());
  std::vector<std::pair<BlockRecord, TierPlace>> stored;
  for (uint64_t i = 0; stored.size() < 10000; ++i) {
    const BlockRecord record = Record(i, 1 + (i * 7919) % 100000);
    const auto place = backend.Write(record, Content(i, record.length.count()));
    if (!place.ok()) {
      EXPECT_TRUE(absl::IsResourceExhausted(place.status())) << place.status();
      break;
    }
    stored.emplace_back(record, *place);
  }
  ASSERT_GT(stored.size(), 10);
  const auto compare = [&](const BlockRecord& record, TierPlace place) {
    std::vector<std::byte> back(record.length.count());
    ASSERT_EQ(backend.Read(record, place, absl::MakeSpan(back)), absl::OkStatus());
    EXPECT_EQ(BlockChecksum(record.id.key, back), record.checksum);
  };
  for (const auto& [record, place] : stored) compare(record, place);
  // One whose bytes were wrong keeps its place.
  const auto [corrupt, corrupt_place] = stored.back();
  stored.pop_back();
  EXPECT_EQ(backend.Remove(corrupt, corrupt_place, RemoveReason::kCorrupt), absl::OkStatus());
  EXPECT_FALSE(backend.Write(corrupt, Content(0, corrupt.length.count())).ok());
  for (const auto& [record, place] : stored) {
    EXPECT_EQ(backend.Remove(record, place, RemoveReason::kUnwanted), absl::OkStatus());
  }
  const BlockRecord large = Record(1, (MiB(1) - KiB(128)).count());
  const auto place = backend.Write(large, Content(1, large.length.count()));
  ASSERT_EQ(place.status(), absl::OkStatus()) << "free neighbours did not merge";
  compare(large, *place);
}

TEST(CxlBackend, EmulatedOneKeepsBlocksAndSaysWhatItIs) {
  FakeClock clock;
  CxlBackend backend(Emulated(), clock, [](absl::Duration) {});
  EXPECT_EQ(backend.name(), "cxl (emulated)");
  FillAndCompare(backend);
}

TEST(CxlBackend, EmulatedOneTakesTheTimeItStates) {
  FakeClock clock;
  std::vector<absl::Duration> waits;
  CxlBackend backend(Emulated(), clock,
                     [&](absl::Duration duration) { waits.push_back(duration); });
  ASSERT_TRUE(backend.Open().ok());
  const BlockRecord record = Record(1, 10000);
  const auto place = backend.Write(record, Content(1, 10000));
  ASSERT_TRUE(place.ok());
  std::vector<std::byte> back(10000);
  // At once with the first, as far as the clock says: they share the bandwidth.
  ASSERT_TRUE(backend.Read(record, *place, absl::MakeSpan(back)).ok());
  clock.Advance(absl::Seconds(1));
  ASSERT_TRUE(backend.Read(record, *place, absl::MakeSpan(back)).ok());
  ASSERT_EQ(waits.size(), 3);
  EXPECT_EQ(waits[0], absl::Milliseconds(11));
  EXPECT_EQ(waits[1], absl::Milliseconds(21));
  EXPECT_EQ(waits[2], absl::Milliseconds(11));
}

TEST(CxlBackend, FolderOfATmpfsKeepsBlocks) {
  FakeClock clock;
  CxlBackend backend({.size = MiB(2), .path = "/dev/shm"}, clock);
  if (const auto memory = CxlMemory::Map({.size = MiB(2), .path = "/dev/shm"}); !memory.ok()) {
    GTEST_SKIP() << memory.status();
  }
  EXPECT_EQ(backend.name(), "cxl");
  FillAndCompare(backend);
}

TEST(CxlBackend, NodeKeepsBlocks) {
  FakeClock clock;
  if (const auto memory = CxlMemory::Map({.size = MiB(2), .node = 0}); !memory.ok()) {
    GTEST_SKIP() << memory.status();
  }
  CxlBackend backend({.size = MiB(2), .node = 0}, clock);
  FillAndCompare(backend);
}

TEST(CxlMemory, WhatIsNotThereIsRefused) {
  const auto refused = [](const CxlOptions& options) { return CxlMemory::Map(options).status(); };
  EXPECT_TRUE(absl::IsInvalidArgument(refused({.size = MiB(2)})));
  EXPECT_TRUE(absl::IsInvalidArgument(refused({.size = MiB(2), .node = 0, .path = "/dev/shm"})));
  EXPECT_TRUE(absl::IsInvalidArgument(refused({.size = MiB(1), .path = "/dev/shm"})));
  EXPECT_TRUE(absl::IsInvalidArgument(refused({.size = MiB(2), .node = 5000})));
  EXPECT_FALSE(refused({.size = MiB(2), .node = 1000}).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(refused({.size = MiB(2), .path = "/no/such/path"})));
  EXPECT_TRUE(absl::IsFailedPrecondition(refused({.size = MiB(2), .path = "/proc/self/status"})));
  CxlOptions slow = Emulated();
  slow.emulated->bytes_per_second = 0;
  EXPECT_TRUE(absl::IsInvalidArgument(refused(slow)));
}

TEST(CxlMemory, ControlGroupWithoutMemoryIsAClearRefusal) {
  std::string root = testing::TempDir() + "/cxlXXXXXX";
  ASSERT_NE(::mkdtemp(root.data()), nullptr);
  std::filesystem::create_directories(root + "/proc");
  std::ofstream(root + "/proc/meminfo") << "MemTotal: 4096 kB\nMemAvailable: 1024 kB\n";
  CxlOptions options = Emulated();
  options.system_root = root;
  EXPECT_TRUE(absl::IsResourceExhausted(CxlMemory::Map(options).status()));
  std::filesystem::remove_all(root);
}

TEST(CxlTier, RoundTripThroughTheStoreIsMeasuredAndItsStatusSaysEmulated) {
  auto bytes = std::make_shared<std::vector<std::byte>>(Content(1, 5000));
  TierStore::Options options;
  options.capacity = MiB(1);
  options.probe_bytes = KiB(4);
  CxlOptions fast = Emulated();
  fast.emulated = {.bytes_per_second = 1e12, .latency = absl::ZeroDuration()};
  auto opened = TierStore::Open(
      options,
      std::make_unique<ThreadedBackend>(std::make_unique<CxlBackend>(fast, Clock::Real()), 2),
      Clock::Real());
  ASSERT_EQ(opened.status(), absl::OkStatus());
  TierStore& store = **opened;
  ASSERT_TRUE(store.WaitUntilServing(absl::Seconds(60)));
  EXPECT_EQ(store.status().name, "cxl (emulated)");
  const auto await = [](auto ask) {
    Notification ended;
    absl::Status result;
    const absl::Status accepted = ask([&](absl::Status status) {
      result = std::move(status);
      ended.Notify();
    });
    if (!accepted.ok()) return accepted;
    EXPECT_TRUE(ended.WaitForNotificationWithTimeout(absl::Seconds(60)));
    return result;
  };
  const absl::Time deadline = MonotonicNow() + absl::Seconds(60);
  const BlockRecord record = Record(1, 5000);
  ASSERT_EQ(await([&](TierStore::Done done) {
              return store.Store({.record = record, .from = {*bytes, bytes}, .deadline = deadline},
                                 std::move(done));
            }),
            absl::OkStatus());
  auto back = std::make_shared<std::vector<std::byte>>(5000);
  ASSERT_EQ(await([&](TierStore::Done done) {
              return store.Load(
                  {.id = record.id, .to = {absl::MakeSpan(*back), back}, .deadline = deadline},
                  std::move(done));
            }),
            absl::OkStatus());
  EXPECT_EQ(*back, *bytes);
  EXPECT_GT(store.status().load_bandwidth, 0);
}

}  // namespace
}  // namespace palimpsest
