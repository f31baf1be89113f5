// Memory that other nodes keep blocks in: peers that come and go, and such that do not keep to what
// was agreed, on either side.
#include "broker/tier/remote/peer_memory.h"

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "broker/tier/remote/remote_fixture.h"
#include "broker/tier/remote/remote_wire.h"
#include "broker/tier/remote/ucx_node.h"
#include "common/testing/eventually.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

using Kind = RemoteRequest::Kind;

class PeerMemoryTest : public testing::Test {
 protected:
  PeerMemoryTest() {
    auto memory = PeerMemory::Start(
        {.bytes = MiB(1), .max_peers = 2, .max_loads_per_peer = 3, .patience = kRemotePatience});
    EXPECT_EQ(memory.status(), absl::OkStatus());
    memory_ = *std::move(memory);
  }
  bool Empty() const {
    const PeerMemory::Usage usage = memory_->usage();
    return usage.peers == 0 && usage.blocks == 0 && usage.loading == 0 && usage.used == Bytes(0);
  }

  std::unique_ptr<PeerMemory> memory_;
};

TEST_F(PeerMemoryTest, TellsWhatItDoesNotHave) {
  Client client(memory_->address()), other(memory_->address());
  const absl::StatusOr<TierPlace> place = client.Write(Record(1));
  ASSERT_EQ(place.status(), absl::OkStatus());
  EXPECT_TRUE(absl::IsNotFound(client.Read(Record(1), TierPlace(77))));
  EXPECT_TRUE(absl::IsNotFound(client.Read(Record(2), *place)));
  EXPECT_TRUE(absl::IsNotFound(client.Read(Record(1, 9999), *place)));
  EXPECT_TRUE(absl::IsNotFound(other.Read(Record(1), *place)));
  EXPECT_TRUE(absl::IsNotFound(other.Remove(Record(1), *place)));
  BlockRecord changed = Record(1);
  ++changed.checksum;
  EXPECT_TRUE(absl::IsDataLoss(client.Read(changed, *place)));
  EXPECT_TRUE(absl::IsDataLoss(client.Write(changed).status()));
  EXPECT_EQ(client.Read(Record(1), *place), absl::OkStatus());
  EXPECT_TRUE(Eventually([&] { return memory_->usage().loading == 0; }));
}

TEST_F(PeerMemoryTest, IsFullAtItsEndAndHasRoomAgainAfterRemovalsAndPurges) {
  Client client(memory_->address());
  std::vector<std::pair<BlockRecord, TierPlace>> stored;
  for (uint64_t i = 1; i <= 4; ++i) {
    const BlockRecord record = Record(i, 256 << 10, i % 2 == 0 ? "anna" : "bert");
    const absl::StatusOr<TierPlace> place = client.Write(record);
    ASSERT_EQ(place.status(), absl::OkStatus());
    stored.emplace_back(record, *place);
  }
  EXPECT_TRUE(absl::IsResourceExhausted(client.Write(Record(5)).status()));
  EXPECT_TRUE(absl::IsResourceExhausted(client.Write(Record(5, 2 << 20)).status()));
  EXPECT_EQ(client.Purge("anna"), absl::OkStatus());
  for (const auto& [record, place] : stored) {
    const absl::Status status = client.Read(record, place);
    EXPECT_EQ(absl::IsNotFound(status), record.id.tenant == "anna") << status;
  }
  EXPECT_EQ(client.Remove(stored[0].first, stored[0].second), absl::OkStatus());
  EXPECT_EQ(client.Write(Record(5, 256 << 10)).status(), absl::OkStatus());
  EXPECT_TRUE(Eventually([&] { return memory_->usage().used == KiB(512); }));
}

TEST_F(PeerMemoryTest, DropsTheBlocksOfAPeerThatLeaves) {
  {
    Client client(memory_->address());
    ASSERT_EQ(client.Write(Record(1)).status(), absl::OkStatus());
    EXPECT_TRUE(Eventually([&] { return memory_->usage().blocks == 1; }));
  }
  EXPECT_TRUE(Eventually([&] { return Empty(); }));
}

TEST_F(PeerMemoryTest, TakesNoMorePeersThanItMay) {
  Client first(memory_->address()), second(memory_->address());
  ASSERT_EQ(first.Write(Record(1)).status(), absl::OkStatus());
  ASSERT_EQ(second.Write(Record(2)).status(), absl::OkStatus());
  Client third(memory_->address());
  EXPECT_TRUE(absl::IsUnavailable(third.Write(Record(3)).status()));
  EXPECT_EQ(first.Write(Record(4)).status(), absl::OkStatus());
}

// A peer that says what it likes, on a thread of its own.
class RawPeer : public UcxNode::Handler {
 public:
  using Link = UcxNode::Link;
  using OnRequest =
      std::function<void(RawPeer&, Link*, const RemoteRequest&, const UcxNode::Payload&)>;

  explicit RawPeer(OnRequest on_request = nullptr) : on_request_(std::move(on_request)) {
    auto node = UcxNode::Make("all", this);
    EXPECT_EQ(node.status(), absl::OkStatus());
    node_ = *std::move(node);
  }
  ~RawPeer() override {
    Thaw();
    stopping_ = true;
    node_->Wake();
    if (thread_.joinable()) thread_.join();
    node_.reset();  // it still calls back
  }

  std::string Listen() {
    const auto address = node_->Listen("127.0.0.1:0");
    EXPECT_EQ(address.status(), absl::OkStatus());
    thread_ = std::thread([this] { Run(); });
    return *address;
  }
  void Connect(const std::string& address) {
    const auto link = node_->Connect(address);
    EXPECT_EQ(link.status(), absl::OkStatus());
    link_ = *link;
    thread_ = std::thread([this] { Run(); });
  }

  // Of one that connected: sends at any time.
  void Send(std::string header, std::vector<std::byte> payload = {}) {
    MutexLock lock(&mutex_);
    to_send_.emplace_back(std::move(header), std::move(payload));
    node_->Wake();
  }
  // Nothing is received in between.
  void SendTogether(const std::vector<RemoteRequest>& requests) {
    MutexLock lock(&mutex_);
    for (const RemoteRequest& request : requests) {
      to_send_.emplace_back(EncodeRequest(request), std::vector<std::byte>());
    }
    node_->Wake();
  }
  // The next reply; nothing if the connection has ended.
  std::optional<RemoteReply> Next() {
    MutexLock lock(&mutex_);
    while (replies_.empty() && !closed_) changed_.Wait(&mutex_);
    if (replies_.empty()) return std::nullopt;
    RemoteReply reply = replies_.front();
    replies_.erase(replies_.begin());
    return reply;
  }
  std::optional<RemoteReply> Ask(const RemoteRequest& request,
                                 std::vector<std::byte> payload = {}) {
    Send(EncodeRequest(request), std::move(payload));
    return Next();
  }

  // From the next block that it is offered on, it stands still.
  void Freeze() { SetFrozen(true); }
  void Thaw() { SetFrozen(false); }
  bool closed() {
    MutexLock lock(&mutex_);
    return closed_;
  }

  UcxNode& node() { return *node_; }

  bool OnAccepted(Link*) override { return true; }
  void OnMessage(Link* link, absl::string_view header, const UcxNode::Payload& payload) override {
    if (on_request_ != nullptr) {
      const absl::StatusOr<RemoteRequest> request = DecodeRequest(header);
      ASSERT_EQ(request.status(), absl::OkStatus());
      on_request_(*this, link, *request, payload);
      return;
    }
    const absl::StatusOr<RemoteReply> reply = DecodeReply(header);
    ASSERT_EQ(reply.status(), absl::OkStatus());
    MutexLock lock(&mutex_);
    while (frozen_ && payload.size > 0) changed_.Wait(&mutex_);
    replies_.push_back(*reply);
    changed_.SignalAll();
  }
  void OnClosed(Link*, const absl::Status&) override {
    MutexLock lock(&mutex_);
    closed_ = true;
    changed_.SignalAll();
  }

 private:
  void SetFrozen(bool frozen) {
    MutexLock lock(&mutex_);
    frozen_ = frozen;
    changed_.SignalAll();
  }
  void Run() {
    while (!stopping_) {
      decltype(to_send_) sending;
      bool closed = false;
      {
        MutexLock lock(&mutex_);
        sending.swap(to_send_);
        closed = closed_;
      }
      for (auto& [header, payload] : sending) {
        if (closed) break;
        const auto bytes = std::make_shared<std::vector<std::byte>>(std::move(payload));
        node_->Send(link_, std::move(header), *bytes, [bytes](const absl::Status&) {});
      }
      node_->RunOnce(MonotonicNow() + absl::Seconds(1));
    }
  }

  const OnRequest on_request_;
  std::unique_ptr<UcxNode> node_;
  Link* link_ = nullptr;
  std::thread thread_;
  std::atomic<bool> stopping_ = false;
  Mutex mutex_;
  CondVar changed_;
  std::vector<std::pair<std::string, std::vector<std::byte>>> to_send_ ABSL_GUARDED_BY(mutex_);
  std::vector<RemoteReply> replies_ ABSL_GUARDED_BY(mutex_);
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool frozen_ ABSL_GUARDED_BY(mutex_) = false;
};

RemoteRequest StoreOf(const BlockRecord& record) {
  return {.kind = Kind::kStore,
          .id = 1,
          .key = record.id.key,
          .length = record.length,
          .checksum = record.checksum,
          .tenant = record.id.tenant};
}

TEST_F(PeerMemoryTest, RefusesWrongRequests) {
  const BlockRecord record = Record(1);
  RawPeer peer;
  peer.Connect(memory_->address());
  const auto code = [&](const RemoteRequest& request, size_t bytes) {
    const auto reply = peer.Ask(request, Content(1, bytes));
    return reply.has_value() ? reply->code : absl::StatusCode::kUnknown;
  };
  using enum absl::StatusCode;
  EXPECT_EQ(code(StoreOf(record), 9999), kInvalidArgument);
  EXPECT_EQ(code(StoreOf(record), 10001), kInvalidArgument);
  EXPECT_EQ(code(StoreOf(record), 0), kInvalidArgument);
  EXPECT_EQ(code(StoreOf(record), 3 << 20), kInvalidArgument);
  RemoteRequest request = StoreOf(record);
  request.length = Bytes(0);
  EXPECT_EQ(code(request, 0), kInvalidArgument);
  request.length = Bytes(INT64_MAX);
  EXPECT_EQ(code(request, 10000), kInvalidArgument);
  request = StoreOf(record);
  request.tenant.clear();
  EXPECT_EQ(code(request, 10000), kInvalidArgument);
  EXPECT_EQ(code(StoreOf(Record(1, 3 << 20)), 3 << 20), kResourceExhausted);
  request = StoreOf(record);
  ++request.checksum;
  EXPECT_EQ(code(request, 10000), kDataLoss);
  EXPECT_TRUE(Eventually([&] { return memory_->usage().refused == 9; }));
  EXPECT_EQ(memory_->usage().used, Bytes(0));
  EXPECT_EQ(code(StoreOf(record), 10000), kOk);
}

RemoteRequest LoadOf(const BlockRecord& record, uint64_t place) {
  return {
      .kind = Kind::kLoad, .id = 2, .place = place, .key = record.id.key, .length = record.length};
}

TEST_F(PeerMemoryTest, BoundsLoadsAndKeepsWhatIsBeingLoaded) {
  const BlockRecord record = Record(1, 1 << 20);
  RawPeer peer;
  peer.Connect(memory_->address());
  const auto stored = peer.Ask(StoreOf(record), Content(1, 1 << 20));
  ASSERT_TRUE(stored.has_value());
  // It asks, and then does not take what it gets.
  peer.Freeze();
  std::vector<RemoteRequest> requests(4, LoadOf(record, stored->place));
  requests.push_back({.kind = Kind::kRemove, .place = stored->place, .key = record.id.key});
  peer.SendTogether(requests);
  ASSERT_TRUE(Eventually([&] {
    const PeerMemory::Usage usage = memory_->usage();
    return usage.blocks == 0 && usage.loading == 3 && usage.refused == 1;
  }));
  Client client(memory_->address());
  EXPECT_TRUE(absl::IsResourceExhausted(client.Write(Record(2)).status()));
  peer.Thaw();
  EXPECT_TRUE(Eventually([&] { return memory_->usage().used == Bytes(0); }));
  EXPECT_EQ(client.Write(Record(2)).status(), absl::OkStatus());
}

TEST_F(PeerMemoryTest, OutlivesReadersThatAreKilledWhileTheyLoad) {
  for (int i = 0; i < 10; ++i) {
    const PeerProcess reader = StartPeer({"--load-from", memory_->address()});
    const uint64_t before = memory_->usage().loaded;
    ASSERT_TRUE(Eventually([&] { return memory_->usage().loaded > before + 3 * i; }));
    ASSERT_EQ(reader.child.handle().Kill(), absl::OkStatus());
    EXPECT_TRUE(Eventually([&] { return Empty(); }));
  }
}

TEST_F(PeerMemoryTest, CutsOffWhoSendsWhatIsNoRequest) {
  for (const std::string& message :
       {std::string("hello"), std::string(), std::string(2000, 'x'), EncodeReply({})}) {
    RawPeer peer;
    peer.Connect(memory_->address());
    peer.Send(message);
    EXPECT_FALSE(peer.Next().has_value());
  }
  EXPECT_TRUE(Eventually([&] { return Empty() && memory_->usage().cut_off == 4; }));
  Client client(memory_->address());
  EXPECT_EQ(client.Write(Record(1)).status(), absl::OkStatus());
}

TEST(PeerMemoryPatienceTest, CutsOffWhoTakesTooLong) {
  const auto memory = PeerMemory::Start({.bytes = MiB(1), .patience = absl::Seconds(2)});
  ASSERT_EQ(memory.status(), absl::OkStatus());
  const BlockRecord record = Record(1);
  RawPeer peer;
  peer.Connect((*memory)->address());
  const auto stored = peer.Ask(StoreOf(record), Content(1, 10000));
  ASSERT_TRUE(stored.has_value());
  peer.Freeze();
  peer.Send(EncodeRequest(LoadOf(record, stored->place)));
  EXPECT_TRUE(Eventually([&] {
    const PeerMemory::Usage usage = (*memory)->usage();
    return usage.cut_off == 1 && usage.loading == 0 && usage.used == Bytes(0) && usage.peers == 0;
  }));
  peer.Thaw();
  EXPECT_TRUE(Eventually([&] { return peer.closed(); }));
  EXPECT_FALSE(PeerMemory::Start({.bytes = Bytes(4097)}).ok());
  EXPECT_FALSE(PeerMemory::Start({.listen = "nowhere", .bytes = MiB(1)}).ok());
}

// What a peer answers to the load of a block that it holds, made worse in one way or another.
class LyingPeerTest : public testing::Test {
 protected:
  struct Answer {
    std::string header;
    size_t bytes;
  };
  using Worsen = std::function<std::vector<Answer>(RemoteReply)>;

  // `worsen` gets what an honest peer would have said; what it returns is sent.
  absl::Status ReadFrom(const Worsen& worsen, uint64_t content = 1) {
    const BlockRecord record = Record(1, 100'000);
    const std::vector<std::byte> memory = Content(content, 200'000);
    RawPeer peer([&](RawPeer& self, RawPeer::Link* link, const RemoteRequest& request,
                     const UcxNode::Payload&) {
      for (Answer& answer :
           worsen({.id = request.id, .length = record.length, .checksum = record.checksum})) {
        self.node().Send(link, std::move(answer.header),
                         absl::MakeConstSpan(memory).first(answer.bytes),
                         [](const absl::Status&) {});
      }
    });
    Client client(peer.Listen(), "all", timeout_);
    std::vector<std::byte> to(100'000);
    absl::Status result;
    Notification ended;
    client.backend().Read(record, TierPlace(1), absl::MakeSpan(to), [&](absl::Status status) {
      // As the store does.
      if (status.ok() && BlockChecksum(record.id.key, to) != record.checksum) {
        status = absl::DataLossError("other bytes");
      }
      result = std::move(status);
      ended.Notify();
    });
    ended.WaitForNotification();
    return result;
  }

  absl::Duration timeout_ = kRemotePatience;
};

TEST_F(LyingPeerTest, AnHonestOneIsBelieved) {
  EXPECT_EQ(ReadFrom([](const RemoteReply& reply) {
              return std::vector<Answer>{{EncodeReply(reply), 100'000}};
            }),
            absl::OkStatus());
}

TEST_F(LyingPeerTest, OtherLengthsChecksumsAndBytesAreDataLoss) {
  const auto is_lost = [&](int64_t length, uint64_t checksum, size_t bytes, uint64_t content) {
    return absl::IsDataLoss(ReadFrom(
        [&](RemoteReply reply) {
          reply.length += Bytes(length);
          reply.checksum += checksum;
          return std::vector<Answer>{{EncodeReply(reply), bytes}};
        },
        content));
  };
  EXPECT_TRUE(is_lost(1, 0, 100'000, 1));
  EXPECT_TRUE(is_lost(1, 0, 100'001, 1));
  EXPECT_TRUE(is_lost(INT64_MAX - 100'000, 0, 100'000, 1));
  EXPECT_TRUE(is_lost(0, 1, 100'000, 1));
  for (const size_t bytes : {0, 1, 4000, 99'999, 100'001, 200'000}) {
    EXPECT_TRUE(is_lost(0, 0, bytes, 1)) << bytes;
  }
  EXPECT_TRUE(is_lost(0, 0, 100'000, 2));
}

TEST_F(LyingPeerTest, AnswersThatAreNoneBreakTheConnection) {
  const auto is_broken = [&](const Worsen& worsen) {
    return absl::IsUnavailable(ReadFrom(worsen));
  };
  EXPECT_TRUE(is_broken([](const RemoteReply&) { return std::vector<Answer>{{"what?", 0}}; }));
  EXPECT_TRUE(is_broken([](const RemoteReply&) {
    return std::vector<Answer>{{std::string(UcxNode::kMaxHeader, 'x'), 100'000}};
  }));
  EXPECT_TRUE(is_broken([](RemoteReply reply) {
    ++reply.id;
    return std::vector<Answer>{{EncodeReply(reply), 100'000}};
  }));
  EXPECT_TRUE(is_broken([](RemoteReply reply) {
    reply.code = static_cast<absl::StatusCode>(12345);
    return std::vector<Answer>{{EncodeReply(reply), 100'000}};
  }));
  timeout_ = absl::Milliseconds(200);
  EXPECT_TRUE(is_broken([](const RemoteReply&) { return std::vector<Answer>(); }));
}

TEST_F(LyingPeerTest, ASecondAnswerDoesNoHarm) {
  const absl::Status status = ReadFrom([](const RemoteReply& reply) {
    return std::vector<Answer>(3, {EncodeReply(reply), 100'000});
  });
  EXPECT_TRUE(status.ok() || absl::IsUnavailable(status)) << status;
}

}  // namespace
}  // namespace palimpsest
