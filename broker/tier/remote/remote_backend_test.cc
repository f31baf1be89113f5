// The tier in another node's memory, with a second process that dies, stands still and comes back.
#include "broker/tier/remote/remote_backend.h"

#include <atomic>
#include <csignal>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "broker/tier/remote/peer_memory.h"
#include "broker/tier/remote/remote_fixture.h"
#include "broker/tier/tier_store.h"
#include "common/monotonic_time.h"
#include "common/testing/eventually.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

class RemoteTransportTest : public testing::TestWithParam<const char*> {
 protected:
  PeerProcess peer_ = StartPeer({"--transports", GetParam()});
  Client client_{peer_.address, GetParam()};
};

INSTANTIATE_TEST_SUITE_P(Transports, RemoteTransportTest, testing::Values("tcp", "all"));

TEST_P(RemoteTransportTest, BlocksOfAllSizesComeBack) {
  std::vector<std::pair<BlockRecord, TierPlace>> stored;
  for (const size_t length : {1, 100, 4096, 10000, 65537, 2 << 20, 4'000'003}) {
    const BlockRecord record = Record(length, length);
    const absl::StatusOr<TierPlace> place = client_.Write(record);
    ASSERT_EQ(place.status(), absl::OkStatus()) << length;
    stored.emplace_back(record, *place);
  }
  for (const auto& [record, place] : stored) {
    EXPECT_EQ(client_.Read(record, place), absl::OkStatus()) << record.length;
    EXPECT_EQ(client_.Remove(record, place), absl::OkStatus());
    EXPECT_TRUE(absl::IsNotFound(client_.Read(record, place)));
    EXPECT_TRUE(absl::IsNotFound(client_.Remove(record, place)));
  }
}

TEST_P(RemoteTransportTest, APeerKilledInMidTransferCostsItsBlocksOnly) {
  const BlockRecord kept = Record(1, 1 << 20);
  const absl::StatusOr<TierPlace> place = client_.Write(kept);
  ASSERT_EQ(place.status(), absl::OkStatus());
  constexpr int kOperations = 24;
  std::vector<BlockRecord> records;
  std::vector<std::vector<std::byte>> from, to(kOperations, std::vector<std::byte>(1 << 20));
  for (uint64_t i = 0; i < kOperations; ++i) {
    records.push_back(Record(i + 2, 1 << 18));
    from.push_back(Content(i + 2, 1 << 18));
  }
  std::atomic<int> ended = 0, wrong = 0;
  for (int i = 0; i < kOperations; ++i) {
    client_.backend().Write(records[i], from[i], [&](const absl::StatusOr<TierPlace>& result) {
      wrong += result.ok() || absl::IsUnavailable(result.status()) ? 0 : 1;
      ++ended;
    });
    client_.backend().Read(kept, *place, absl::MakeSpan(to[i]), [&, i](const absl::Status& status) {
      const bool good = status.ok() ? to[i] == Content(1, 1 << 20) : absl::IsUnavailable(status);
      wrong += good ? 0 : 1;
      ++ended;
    });
    if (i == kOperations / 2) {
      ASSERT_TRUE(Eventually([&] { return ended > 0; }));
      ASSERT_EQ(peer_.child.handle().Kill(), absl::OkStatus());
    }
  }
  EXPECT_TRUE(Eventually([&] { return ended == 2 * kOperations; }));
  EXPECT_EQ(wrong, 0);
  ASSERT_EQ(peer_.child.handle().AwaitExit(kRemotePatience), absl::OkStatus());

  EXPECT_TRUE(absl::IsUnavailable(client_.Read(kept, *place)));
  EXPECT_TRUE(absl::IsNotFound(client_.Remove(kept, *place)));  // nothing to quarantine
  const PeerProcess next = StartPeer({"--transports", GetParam(), "--listen", peer_.address});
  // The last attempt at the old one may have to end first.
  EXPECT_TRUE(Eventually([&] { return absl::IsNotFound(client_.Read(kept, *place)); }));
  const absl::StatusOr<TierPlace> again = client_.Write(kept);
  ASSERT_EQ(again.status(), absl::OkStatus());
  EXPECT_EQ(client_.Read(kept, *again), absl::OkStatus());
}

TEST_P(RemoteTransportTest, APeerThatStandsStillIsGivenUpAndTouchesNothingLater) {
  Client hasty(peer_.address, GetParam(), absl::Seconds(1));
  const BlockRecord record = Record(1, 1 << 20);
  absl::StatusOr<TierPlace> place;
  ASSERT_TRUE(Eventually([&] {  // where it takes longer than that to begin
    place = hasty.Write(record);
    return place.ok();
  }));
  ASSERT_EQ(peer_.child.handle().Signal(SIGSTOP), absl::OkStatus());
  std::vector<std::byte> to(1 << 20), from = Content(2, 1 << 20);
  const BlockRecord other = Record(2, 1 << 20);
  std::optional<absl::Status> read, written;
  Notification read_ended, write_ended;
  hasty.backend().Read(record, *place, absl::MakeSpan(to), [&](absl::Status status) {
    read = std::move(status);
    read_ended.Notify();
  });
  hasty.backend().Write(other, from, [&](const absl::StatusOr<TierPlace>& result) {
    written = result.status();
    write_ended.Notify();
  });
  read_ended.WaitForNotification();
  write_ended.WaitForNotification();
  EXPECT_TRUE(absl::IsUnavailable(*read)) << *read;
  EXPECT_TRUE(absl::IsUnavailable(*written)) << *written;
  // This memory is now somebody else's.
  std::fill(to.begin(), to.end(), std::byte{0xaa});
  std::fill(from.begin(), from.end(), std::byte{0xbb});
  EXPECT_TRUE(absl::IsUnavailable(hasty.Read(record, *place)));

  ASSERT_EQ(peer_.child.handle().Signal(SIGCONT), absl::OkStatus());
  absl::StatusOr<TierPlace> again;
  ASSERT_TRUE(Eventually([&] {
    again = hasty.Write(record);
    return again.ok();
  }));
  EXPECT_EQ(hasty.Read(record, *again), absl::OkStatus());
  EXPECT_EQ(to, std::vector<std::byte>(1 << 20, std::byte{0xaa}));
  EXPECT_TRUE(absl::IsNotFound(hasty.Read(record, *place)));
}

TEST(RemoteBackendTest, APeerThatIsNotThereIsAFailureAndNotAWait) {
  std::string address;
  {
    PeerProcess peer = StartPeer();
    address = peer.address;
  }
  Client client(address);
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(absl::IsUnavailable(client.Write(Record(1)).status()));
  }
  Client lost("somewhere");
  EXPECT_TRUE(absl::IsUnavailable(lost.Write(Record(1)).status()));
  RemoteBackend wrong({.peer = address, .transports = "carrier-pigeon"});
  EXPECT_TRUE(absl::IsUnavailable(wrong.Open().status()));
}

TEST(RemoteBackendTest, AStoreGoesOverToMissesWhenItsPeerDiesAndBackWhenItReturns) {
  auto peer = std::make_unique<PeerProcess>(StartPeer());
  const std::string address = peer->address;
  const auto store = TierStore::Open({.capacity = MiB(16)},
                                     std::make_unique<RemoteBackend>(RemoteBackend::Options{
                                         .peer = address, .timeout = absl::Seconds(20)}),
                                     Clock::Real());
  ASSERT_EQ(store.status(), absl::OkStatus());
  ASSERT_TRUE((*store)->WaitUntilServing(kRemotePatience));
  const BlockRecord record = Record(1);
  const auto memory = std::make_shared<std::vector<std::byte>>(Content(1, 10000));
  const auto ask = [&](auto begin) {
    absl::Status result;
    Notification ended;
    const absl::Status accepted = begin([&](absl::Status status) {
      result = std::move(status);
      ended.Notify();
    });
    if (!accepted.ok()) return accepted;
    ended.WaitForNotification();
    return result;
  };
  const auto load = [&] {
    const auto to = std::make_shared<std::vector<std::byte>>(10000);
    return ask([&](TierStore::Done done) {
      return (*store)->Load(
          {record.id, {absl::MakeSpan(*to), to}, Clock::Real().Now() + kRemotePatience},
          std::move(done));
    });
  };
  EXPECT_EQ(ask([&](TierStore::Done done) {
              return (*store)->Store(
                  {record, {*memory, memory}, Clock::Real().Now() + kRemotePatience},
                  std::move(done));
            }),
            absl::OkStatus());
  EXPECT_EQ(load(), absl::OkStatus());
  peer.reset();
  ASSERT_TRUE(Eventually([&] {
    EXPECT_FALSE(load().ok());
    return (*store)->status().breaker == CircuitBreaker::State::kOpen;
  }));
  peer = std::make_unique<PeerProcess>(StartPeer({"--listen", address}));
  ASSERT_TRUE((*store)->WaitUntilServing(kRemotePatience));
  EXPECT_TRUE(absl::IsNotFound(load()));
  ASSERT_TRUE(Eventually([&] { return (*store)->status().used == Bytes(0); }));
  EXPECT_EQ((*store)->CheckConsistency(), absl::OkStatus());
}

}  // namespace
}  // namespace palimpsest
