// The pure parts of a tier's store.
#include <random>

#include "broker/tier/circuit_breaker.h"
#include "broker/tier/tier_catalog.h"
#include "broker/tier/transfer_meter.h"
#include "common/block_checksum.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

TEST(BlockChecksum, BindsKeyLengthAndBytes) {
  const std::vector<std::byte> bytes(100, std::byte{7});
  const uint64_t checksum = BlockChecksum({1, 2}, bytes);
  EXPECT_NE(checksum, BlockChecksum({2, 1}, bytes));
  EXPECT_NE(checksum, BlockChecksum({1, 2}, absl::MakeSpan(bytes).first(99)));
  std::vector<std::byte> other = bytes;
  other[50] = std::byte{6};
  EXPECT_NE(checksum, BlockChecksum({1, 2}, other));
  EXPECT_EQ(checksum, BlockChecksum({1, 2}, bytes));
}

TEST(CircuitBreaker, BacksOffTwiceAsLongUpToALimit) {
  absl::Time now = absl::UnixEpoch();
  CircuitBreaker breaker({.failures_to_open = 1, .longest_back_off = absl::Seconds(4)}, now);
  EXPECT_FALSE(breaker.allows());
  for (int64_t seconds : {0, 1, 2, 4, 4}) {
    ASSERT_EQ(breaker.next_probe(), now + absl::Seconds(seconds));
    now = breaker.next_probe();
    breaker.BeginProbe();
    EXPECT_EQ(breaker.next_probe(), absl::InfiniteFuture());
    breaker.EndProbe(false, now);
  }
  breaker.BeginProbe();
  breaker.EndProbe(true, now);
  EXPECT_TRUE(breaker.allows());
  EXPECT_EQ(breaker.times_opened(), 0);
  breaker.Record(false, absl::ZeroDuration(), now);
  EXPECT_EQ(breaker.next_probe(), now + absl::Seconds(1)) << "a success did not reset it";
}

TEST(CircuitBreaker, OnlyFailuresInARowCount) {
  const absl::Time now = absl::UnixEpoch();
  CircuitBreaker breaker({}, now);
  breaker.BeginProbe();
  breaker.EndProbe(true, now);
  for (int i = 0; i < 10; ++i) {
    breaker.Record(false, absl::ZeroDuration(), now);
    breaker.Record(true, absl::Seconds(3), now);  // slow
    EXPECT_TRUE(breaker.allows());
    breaker.Record(true, absl::ZeroDuration(), now);
  }
  breaker.Stalled(now);
  EXPECT_FALSE(breaker.allows());
}

TEST(TransferMeter, FindsLatencyAndBandwidth) {
  TransferMeter meter;
  EXPECT_FALSE(meter.measured());
  const auto seconds = [](Bytes bytes) {
    return absl::Microseconds(100) + absl::Seconds(static_cast<double>(bytes.count()) / 2e9);
  };
  std::mt19937_64 random(1);
  for (int i = 0; i < 200; ++i) {
    const Bytes bytes = KiB(4 + static_cast<int64_t>(random() % 4096));
    meter.Record(bytes, seconds(bytes));
  }
  EXPECT_NEAR(absl::ToDoubleMicroseconds(meter.latency()), 100, 1);
  EXPECT_NEAR(meter.bandwidth(), 2e9, 2e7);
  EXPECT_NEAR(absl::ToDoubleMicroseconds(meter.Expect(MiB(2))),
              absl::ToDoubleMicroseconds(seconds(MiB(2))), 5);
}

TEST(TransferMeter, FollowsATierWhoseTransfersAreAllOfOneSize) {
  TransferMeter meter;
  meter.Record(KiB(4), absl::Milliseconds(1));
  meter.Record(MiB(1), absl::Milliseconds(9));
  const absl::Duration latency = meter.latency();
  EXPECT_NEAR(absl::ToDoubleMilliseconds(latency), 1, 0.05);
  for (int i = 0; i < 500; ++i) meter.Record(MiB(1), absl::Milliseconds(18));
  EXPECT_NEAR(absl::ToDoubleMilliseconds(meter.Expect(MiB(1))), 18, 0.1);
  EXPECT_GT(meter.latency(), latency / 2) << "forgot what it knew of small transfers";
  EXPECT_LT(meter.latency(), latency * 4);
}

TEST(TransferMeter, NoPartIsEverNegative) {
  std::mt19937_64 random(2);
  TransferMeter meter;
  for (int i = 0; i < 2000; ++i) {
    meter.Record(Bytes(1 + static_cast<int64_t>(random() % 1000000)),
                 absl::Microseconds(random() % 5000));
    ASSERT_GE(meter.latency(), absl::ZeroDuration());
    ASSERT_GE(meter.bandwidth(), 0);
    ASSERT_GE(meter.Expect(Bytes(1)), absl::ZeroDuration());
  }
}

// A catalog with random blocks, against a count of what should be there.
TEST(TierCatalog, RandomLivesKeepItsSums) {
  std::mt19937_64 random(3);
  TierCatalog catalog(Bytes(1000));
  std::vector<TierCatalog::Entry*> writing;
  std::vector<TierCatalog::Entry*> loading;
  uint64_t quarantined = 0;
  for (int i = 0; i < 20000; ++i) {
    const BlockKey key = {random() % 40, 0};
    TierCatalog::Entry* const entry = catalog.Find(key);
    switch (random() % 6) {
      case 0: {
        const BlockRecord record = {
            .id = {.key = key, .tokens = {}, .tenant = random() % 2 == 0 ? "a" : "b"},
            .length = Bytes(1),
            .expiry = absl::UnixEpoch() + absl::Seconds(random() % 100)};
        const auto added = catalog.Add(record, Bytes(20 + static_cast<int64_t>(random() % 50)));
        if (added.ok()) {
          EXPECT_EQ(entry, nullptr);
          writing.push_back(*added);
        }
        break;
      }
      case 1:
        if (writing.empty()) break;
        if (random() % 4 == 0) {
          catalog.Erase(writing.back());
        } else {
          EXPECT_NE(catalog.Publish(writing.back(), TierPlace(i)), writing.back()->condemned);
        }
        writing.pop_back();
        break;
      case 2:
        if (entry == nullptr || entry->state != TierCatalog::State::kReady) break;
        catalog.BeginLoad(entry);
        loading.push_back(entry);
        break;
      case 3:
        if (loading.empty()) break;
        catalog.EndLoad(loading.back());
        loading.pop_back();
        break;
      case 4:
        if (entry != nullptr && !entry->condemned) {
          catalog.Condemn(entry, TierBackend::RemoveReason::kUnwanted);
        }
        break;
      case 5:
        if (TierCatalog::Entry* removable = catalog.TakeRemovable(); removable != nullptr) {
          ASSERT_EQ(removable->loads, 0);
          if (random() % 100 == 0 && quarantined < 5) {
            ++quarantined;
            catalog.Quarantine(removable);
          } else if (random() % 5 == 0) {
            catalog.PutBack(removable);
          } else {
            catalog.Erase(removable);
          }
        }
    }
    ASSERT_LE(catalog.used(), catalog.capacity());
    if (i % 100 == 0) {
      ASSERT_EQ(catalog.CheckConsistency(), absl::OkStatus());
    }
  }
  absl::Time last = absl::InfinitePast();
  for (const TierCatalog::Entry* entry : catalog.Expired(absl::InfiniteFuture(), 1000)) {
    EXPECT_GE(entry->record.expiry, last);
    last = entry->record.expiry;
  }
}

}  // namespace
}  // namespace palimpsest
