// What tests of the tier in another node's memory have in common.
#ifndef PALIMPSEST_BROKER_TIER_REMOTE_REMOTE_FIXTURE_H_
#define PALIMPSEST_BROKER_TIER_REMOTE_REMOTE_FIXTURE_H_

#include <cstdlib>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "broker/tier/remote/peer_process.h"
#include "broker/tier/remote/remote_backend.h"
#include "common/block_checksum.h"
#include "common/mutex.h"
#include "gtest/gtest.h"

namespace palimpsest {

inline constexpr absl::Duration kRemotePatience = absl::Seconds(60);

inline std::vector<std::byte> Content(uint64_t number, size_t length) {
  std::vector<std::byte> bytes(length);
  for (size_t i = 0; i < length; ++i) {
    bytes[i] = static_cast<std::byte>((number * 0x9e3779b97f4a7c15 + i * i) >> 9);
  }
  return bytes;
}

inline BlockRecord Record(uint64_t number, size_t length = 10000,
                          const std::string& tenant = "anna") {
  BlockRecord record = {
      .id = {.key = {number, 1}, .parent = {number, 2}, .tokens = {1, 2}, .tenant = tenant},
      .length = Bytes(static_cast<int64_t>(length))};
  record.checksum = BlockChecksum(record.id.key, Content(number, length));
  return record;
}

// Calls a back-end and waits for what it answers.
class Client {
 public:
  explicit Client(const std::string& peer, const std::string& transports = "all",
                  absl::Duration timeout = kRemotePatience)
      : backend_({.peer = peer, .transports = transports, .timeout = timeout}) {
    const auto found = backend_.Open();
    EXPECT_EQ(found.status(), absl::OkStatus());
    EXPECT_TRUE(found.ok() && found->empty());
  }
  ~Client() { backend_.Close(); }

  RemoteBackend& backend() { return backend_; }

  absl::StatusOr<TierPlace> Write(const BlockRecord& record) {
    const auto bytes = Content(record.id.key.high, record.length.count());
    absl::StatusOr<TierPlace> result;
    Notification ended;
    backend_.Write(record, bytes, [&](absl::StatusOr<TierPlace> place) {
      result = std::move(place);
      ended.Notify();
    });
    ended.WaitForNotification();
    return result;
  }
  // OK only with the right bytes.
  absl::Status Read(const BlockRecord& record, TierPlace place) {
    std::vector<std::byte> to(record.length.count());
    absl::Status status = Wait([&](TierBackend::Done done) {
      backend_.Read(record, place, absl::MakeSpan(to), std::move(done));
    });
    if (status.ok() && to != Content(record.id.key.high, to.size())) {
      return absl::InternalError("other bytes");
    }
    return status;
  }
  absl::Status Remove(const BlockRecord& record, TierPlace place) {
    return Wait([&](TierBackend::Done done) {
      backend_.Remove(record, place, TierBackend::RemoveReason::kUnwanted, std::move(done));
    });
  }
  absl::Status Purge(const std::string& tenant) {
    return Wait([&](TierBackend::Done done) { backend_.Purge(tenant, std::move(done)); });
  }

 private:
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

  RemoteBackend backend_;
};

inline PeerProcess StartPeer(const std::vector<std::string>& arguments = {}) {
  absl::StatusOr<PeerProcess> peer = PeerProcess::Start(arguments);
  if (!peer.ok()) {
    ADD_FAILURE() << peer.status();
    std::abort();
  }
  return *std::move(peer);
}

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_TIER_REMOTE_REMOTE_FIXTURE_H_
