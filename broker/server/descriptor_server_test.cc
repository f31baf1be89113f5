#include "broker/server/descriptor_server.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/monotonic_time.h"
#include "common/testing/eventually.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

using ::testing::HasSubstr;

constexpr TenantId kAlpha(0);
constexpr TenantId kBeta(1);
constexpr absl::Duration kPatience = absl::Seconds(20);

int OpenDescriptors() {
  int count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    ++count;
  }
  return count;
}

// Takes nothing back, and counts.
class Refuser : public DescriptorDelegate {
 public:
  absl::Status ReturnSlab(const DescriptorPeer&, const SlabEntry&,
                          SlabDescriptors memory) override {
    pieces = memory.size();
    return absl::PermissionDeniedError("not taken back");
  }
  absl::Status ReturnImage(const DescriptorPeer&, const std::string&, UniqueFd) override {
    return absl::PermissionDeniedError("not taken back");
  }
  void ConnectionClosed(const DescriptorPeer&) override { closed.fetch_add(1); }

  std::atomic<int> closed{0};
  std::atomic<size_t> pieces{0};  // of the last slab
};

class DescriptorServerTest : public ::testing::Test {
 protected:
  DescriptorServerTest() {
    std::string pattern = "/tmp/descriptor_server_test_XXXXXX";
    folder_ = mkdtemp(pattern.data());
    options_.sockets = {{shared(), std::nullopt, 0600}, {of_beta(), kBeta, 0600}};
    options_.tenants = {{kAlpha, "alpha", std::nullopt, "a"}, {kBeta, "beta", std::nullopt, "b"}};
  }
  ~DescriptorServerTest() override {
    server_.reset();
    std::filesystem::remove_all(folder_);
  }

  std::string shared() const { return folder_ + "/shared"; }
  std::string of_beta() const { return folder_ + "/beta"; }

  void Start() {
    auto server = DescriptorServer::Start(options_, clock_, hand_overs_, delegate_);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }

  DescriptorChannel Connect(const std::string& path) {
    auto channel = DescriptorChannel::Connect(path);
    EXPECT_TRUE(channel.ok()) << channel.status();
    return *std::move(channel);
  }

  static absl::StatusOr<Welcome> Greet(DescriptorChannel& channel, const std::string& tenant) {
    const std::string secret = tenant.substr(0, 1);
    const absl::Status sent =
        channel.Send(Hello{kDescriptorProtocolVersion, tenant, secret}, {}, kPatience);
    if (!sent.ok()) return sent;
    return channel.ReceiveA<Welcome>(kPatience);
  }

  // A connection that was welcomed, and its nonce.
  std::pair<DescriptorChannel, Welcome> Welcomed(const std::string& tenant) {
    DescriptorChannel channel = Connect(shared());
    const auto welcome = Greet(channel, tenant);
    EXPECT_TRUE(welcome.ok()) << welcome.status();
    return {std::move(channel), welcome.value_or(Welcome{})};
  }

  // What the server says before it ends the connection.
  static std::string LastWords(DescriptorChannel& channel) {
    std::string words;
    while (true) {
      const auto packet = channel.Receive(kPatience);
      if (!packet.ok()) {
        EXPECT_TRUE(absl::IsUnavailable(packet.status())) << packet.status();
        return words;
      }
      if (const auto* refused = std::get_if<Refused>(&packet->packet)) words = refused->message;
      if (const auto* failed = std::get_if<Failed>(&packet->packet)) words = failed->message;
    }
  }

  int64_t open() const { return server_->stats().open_connections.load(); }

  std::string folder_;
  FakeClock clock_;
  HandOverTable hand_overs_{clock_, 16};
  Refuser delegate_;
  DescriptorServer::Options options_;
  std::unique_ptr<DescriptorServer> server_;
};

TEST_F(DescriptorServerTest, ConnectionsOfATenantAreBoundedAndTheOthersAreNot) {
  Start();
  std::vector<DescriptorChannel> alphas;
  for (size_t i = 0; i < options_.max_connections_per_tenant; ++i) {
    alphas.push_back(Welcomed("alpha").first);
  }
  DescriptorChannel surplus = Connect(shared());
  EXPECT_THAT(std::string(Greet(surplus, "alpha").status().message()), HasSubstr("has 8"));
  Welcomed("beta");
  alphas.pop_back();
  ASSERT_TRUE(Eventually([&] {
    DescriptorChannel next = Connect(shared());
    return Greet(next, "alpha").ok();
  })) << "a closed connection makes room";
}

TEST_F(DescriptorServerTest, SilentConnectionsOfAUidAreBounded) {
  options_.hello_timeout = 3 * kPatience;
  Start();
  std::vector<DescriptorChannel> silent;
  for (size_t i = 0; i <= options_.max_strangers_per_uid; ++i) silent.push_back(Connect(shared()));
  // Each has its own thread: any of them may be the one too many.
  const auto refused = [](DescriptorChannel& channel) {
    const auto welcome = channel.ReceiveA<Welcome>(absl::Milliseconds(1));
    return absl::StrContains(welcome.status().message(), "that said no Hello yet");
  };
  auto surplus = silent.end();
  ASSERT_TRUE(Eventually([&] {
    surplus = std::find_if(silent.begin(), silent.end(), refused);
    return surplus != silent.end();
  }));
  silent.erase(surplus);
  EXPECT_TRUE(Greet(silent.front(), "alpha").ok()) << "who was admitted may go on";
  Welcomed("beta");
}

TEST_F(DescriptorServerTest, ConnectionsAreBoundedInAll) {
  options_.max_connections = 3;
  Start();
  std::vector<DescriptorChannel> open;
  for (int i = 0; i < 3; ++i) open.push_back(Welcomed("alpha").first);
  DescriptorChannel surplus = Connect(shared());
  EXPECT_THAT(LastWords(surplus), HasSubstr("serves 3 descriptor connections already"));
}

TEST_F(DescriptorServerTest, WhoSaysNoHelloIsSentAway) {
  options_.hello_timeout = absl::Milliseconds(20);
  Start();
  DescriptorChannel silent = Connect(shared());
  EXPECT_THAT(LastWords(silent), HasSubstr("no Hello came in time"));
}

TEST_F(DescriptorServerTest, WhoOpensNoSessionIsSentAway) {
  options_.nonce_lifetime = absl::Milliseconds(20);
  Start();
  auto [channel, welcome] = Welcomed("alpha");
  clock_.Advance(absl::Milliseconds(20));
  EXPECT_THAT(LastWords(channel), HasSubstr("no session was opened"));
}

TEST_F(DescriptorServerTest, ATenantsSocketAdmitsThatTenantAlone) {
  Start();
  DescriptorChannel channel = Connect(of_beta());
  EXPECT_THAT(std::string(Greet(channel, "alpha").status().message()),
              HasSubstr("not the one of tenant alpha"));
  DescriptorChannel another = Connect(of_beta());
  EXPECT_TRUE(Greet(another, "beta").ok());
}

TEST_F(DescriptorServerTest, FailedRequestsAreBounded) {
  options_.max_failed_requests = 4;
  Start();
  auto [channel, welcome] = Welcomed("alpha");
  for (int i = 0; i < 4; ++i) {
    ASSERT_TRUE(channel.Send(Fetch{Token::Random()}, {}, kPatience).ok());
    EXPECT_TRUE(absl::IsFailedPrecondition(channel.ReceiveA<Accepted>(kPatience).status()));
  }
  EXPECT_TRUE(absl::IsUnavailable(channel.Receive(kPatience).status()));
  EXPECT_EQ(server_->stats().token_refusals.load(), 4);
  EXPECT_TRUE(Eventually([&] { return delegate_.closed.load() == 1; }));
}

TEST_F(DescriptorServerTest, ANonceIsRedeemedOnceAndInTime) {
  Start();
  auto [channel, welcome] = Welcomed("beta");
  const auto peer = server_->RedeemNonce(welcome.nonce.ToBytes());
  ASSERT_TRUE(peer.ok()) << peer.status();
  EXPECT_EQ(peer->tenant, kBeta);
  EXPECT_EQ(peer->uid, geteuid());
  EXPECT_EQ(peer->process->pid(), getpid());
  EXPECT_TRUE(absl::IsUnauthenticated(server_->RedeemNonce(welcome.nonce.ToBytes()).status()));

  auto [late, old] = Welcomed("beta");
  clock_.Advance(options_.nonce_lifetime);
  EXPECT_THAT(std::string(server_->RedeemNonce(old.nonce.ToBytes()).status().message()),
              HasSubstr("expired"));
  for (const std::string& bytes : {std::string(), std::string(3, 'x'), Token().ToBytes()}) {
    EXPECT_TRUE(absl::IsUnauthenticated(server_->RedeemNonce(bytes).status()));
  }
}

TEST_F(DescriptorServerTest, AClosedConnectionTakesItsNonceAndItsOffersAlong) {
  Start();
  auto connected = Welcomed("alpha");
  auto [other, nonce_of_other] = Welcomed("alpha");
  const auto peer = server_->RedeemNonce(connected.second.nonce.ToBytes());
  ASSERT_TRUE(peer.ok());
  EXPECT_TRUE(server_->IsOpen(peer->connection));
  auto memory = std::make_shared<const UniqueFd>(memfd_create("slab", MFD_CLOEXEC));
  const auto offer = [&] {
    hand_overs_.Offer(peer->connection,
                      HandOver{DescriptorKind::kSlabs, {{SlabId(1), Epoch(1)}}, {memory}},
                      kPatience);
  };
  offer();
  EXPECT_EQ(memory.use_count(), 2);
  connected.first.Shutdown();
  other.Shutdown();
  ASSERT_TRUE(Eventually([&] { return delegate_.closed.load() == 2; }));
  EXPECT_FALSE(server_->IsOpen(peer->connection));
  offer();  // by somebody who has not noticed yet
  EXPECT_EQ(memory.use_count(), 1);
  EXPECT_TRUE(
      absl::IsUnauthenticated(server_->RedeemNonce(nonce_of_other.nonce.ToBytes()).status()));
}

TEST_F(DescriptorServerTest, PiecesOfASlabTravelTogetherInBothDirections) {
  Start();
  auto [channel, welcome] = Welcomed("alpha");
  const auto peer = server_->RedeemNonce(welcome.nonce.ToBytes());
  ASSERT_TRUE(peer.ok());
  constexpr uint8_t kPieces = 3;
  constexpr uint32_t kSlabs = 100;
  HandOver offer{DescriptorKind::kSlabs, {}, {}, kPieces};
  for (uint32_t i = 0; i < kSlabs; ++i) {
    offer.entries.push_back(SlabEntry{SlabId(i), Epoch(1)});
    for (uint8_t piece = 0; piece < kPieces; ++piece) {
      const int memory = memfd_create("slab", MFD_CLOEXEC);
      ASSERT_EQ(ftruncate(memory, i * kPieces + piece), 0);  // its size says which it is
      offer.descriptors.push_back(std::make_shared<const UniqueFd>(memory));
    }
  }
  const Token token = hand_overs_.Offer(peer->connection, std::move(offer), kPatience);
  ASSERT_TRUE(channel.Send(Fetch{token}, {}, kPatience).ok());
  uint32_t next = 0;
  while (next < kSlabs * kPieces) {
    std::vector<UniqueFd> some;
    const auto packet = channel.ReceiveA<Descriptors>(kPatience, &some);
    ASSERT_TRUE(packet.ok()) << packet.status();
    EXPECT_EQ(packet->pieces, kPieces);
    EXPECT_EQ(packet->first * kPieces, next);
    ASSERT_EQ(some.size(), packet->entries.size() * kPieces);
    for (const UniqueFd& fd : some) {
      struct stat file;
      ASSERT_EQ(fstat(fd.get(), &file), 0);
      EXPECT_EQ(file.st_size, next++);
    }
  }
  const UniqueFd piece(memfd_create("slab", MFD_CLOEXEC));
  const std::vector<int> six(6, piece.get());
  const std::vector<SlabEntry> two(2);
  ASSERT_TRUE(channel.Send(ReturnSlabs{two, kPieces}, six, kPatience).ok());
  EXPECT_FALSE(channel.ReceiveA<Accepted>(kPatience).ok());  // as the delegate says
  EXPECT_EQ(delegate_.pieces, kPieces);
}

TEST_F(DescriptorServerTest, WhoReadsNoDescriptorsHurtsOnlyItself) {
  options_.send_timeout = absl::Milliseconds(50);
  Start();
  auto [channel, welcome] = Welcomed("alpha");
  const auto peer = server_->RedeemNonce(welcome.nonce.ToBytes());
  ASSERT_TRUE(peer.ok());
  const auto memory = std::make_shared<const UniqueFd>(memfd_create("slab", MFD_CLOEXEC));
  HandOver many{DescriptorKind::kSlabs, {}, {}};
  // More packets than any socket holds.
  for (uint32_t i = 0; i < 64 * 1024; ++i) {
    many.entries.push_back(SlabEntry{SlabId(i), Epoch(1)});
    many.descriptors.push_back(memory);
  }
  const Token token = hand_overs_.Offer(peer->connection, std::move(many), kPatience);
  ASSERT_TRUE(channel.Send(Fetch{token}, {}, kPatience).ok());
  Welcomed("beta");
  EXPECT_TRUE(Eventually([&] { return delegate_.closed.load() == 2; }))
      << "beta hung up, alpha was sent away";
  EXPECT_EQ(hand_overs_.size(), 0);
}

TEST_F(DescriptorServerTest, NothingThatAWorkerDoesLeaksADescriptor) {
  Start();
  const auto misbehave = [&](int round) {
    auto [channel, welcome] = Welcomed(round % 2 == 0 ? "alpha" : "beta");
    const auto peer = server_->RedeemNonce(welcome.nonce.ToBytes());
    ASSERT_TRUE(peer.ok());
    const UniqueFd memory(memfd_create("forged", MFD_CLOEXEC));
    std::vector<SlabEntry> entries;
    std::vector<int> descriptors;
    for (uint32_t i = 0; i < kMaxPacketDescriptors; ++i) {
      entries.push_back(SlabEntry{SlabId(i), Epoch(1)});
      descriptors.push_back(memory.get());
    }
    ASSERT_TRUE(channel.Send(ReturnSlabs{entries}, descriptors, kPatience).ok());
    EXPECT_FALSE(channel.ReceiveA<Accepted>(kPatience).ok());
    ASSERT_TRUE(channel.Send(ReturnImage{std::string(32, 'f')}, {memory.get()}, kPatience).ok());
    EXPECT_FALSE(channel.ReceiveA<Accepted>(kPatience).ok());
    const auto slab = std::make_shared<const UniqueFd>(memfd_create("slab", MFD_CLOEXEC));
    const HandOver offer{DescriptorKind::kSlabs, {{SlabId(1), Epoch(1)}}, {slab}};
    hand_overs_.Offer(peer->connection, offer, kPatience);
    const Token fetched = hand_overs_.Offer(peer->connection, offer, kPatience);
    // Closed with an answer on its way, a packet of an unexpected kind unread, and an offer open.
    ASSERT_TRUE(channel.Send(Fetch{fetched}, {}, kPatience).ok());
    ASSERT_TRUE(channel.Send(Accepted{}, {}, kPatience).ok());
  };
  misbehave(0);  // what the process opens once
  ASSERT_TRUE(Eventually([&] { return open() == 0; }));
  const int before = OpenDescriptors();
  for (int round = 1; round <= 40; ++round) misbehave(round);
  ASSERT_TRUE(Eventually([&] { return delegate_.closed.load() == 41; }));
  EXPECT_EQ(hand_overs_.size(), 0);
  // Ended connections are put away when the next one comes.
  ASSERT_TRUE(Eventually([&] {
    Welcomed("alpha");
    return OpenDescriptors() <= before + 2;
  })) << OpenDescriptors()
      << " descriptors, " << before << " before";
}

}  // namespace
}  // namespace palimpsest
