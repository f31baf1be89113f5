#include "common/descriptor_channel.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

using ::testing::HasSubstr;

constexpr absl::Duration kLong = absl::Seconds(30);

int OpenDescriptors() {
  int count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    ++count;
  }
  return count;
}

UniqueFd Memory(char content) {
  UniqueFd fd(::memfd_create("test", MFD_CLOEXEC));
  EXPECT_EQ(::write(fd.get(), &content, 1), 1);
  return fd;
}

char FirstByte(int fd) {
  char byte = 0;
  EXPECT_EQ(::pread(fd, &byte, 1, 0), 1);
  return byte;
}

class DescriptorChannelTest : public ::testing::Test {
 protected:
  DescriptorChannelTest() {
    char name[] = "/tmp/descriptor_channel_test.XXXXXX";
    folder_ = ::mkdtemp(name);
  }
  ~DescriptorChannelTest() override { std::filesystem::remove_all(folder_); }

  std::string path() const { return folder_ + "/socket"; }

  DescriptorListener Listen() {
    absl::StatusOr<DescriptorListener> listener = DescriptorListener::Listen(path(), 0600);
    EXPECT_TRUE(listener.ok()) << listener.status();
    return *std::move(listener);
  }

  // Runs `body` in a forked process; its result is the exit status.
  static pid_t Fork(const std::function<int()>& body) {
    const pid_t pid = ::fork();
    if (pid == 0) ::_exit(body());
    return pid;
  }
  static int ExitStatus(pid_t pid) {
    int status = 0;
    EXPECT_EQ(::waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
  }

  std::string folder_;
};

// Both ends in this process.
struct Pair {
  Pair() {
    int ends[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
    raw = ends[0];
    a.emplace(UniqueFd(ends[0]));
    b.emplace(UniqueFd(ends[1]));
  }

  // Sends bytes and descriptors as they are, past all checks of DescriptorChannel.
  void SendRaw(absl::string_view bytes, const std::vector<int>& descriptors) {
    std::vector<char> control(CMSG_SPACE(sizeof(int) * std::max<size_t>(descriptors.size(), 1)));
    iovec data = {const_cast<char*>(bytes.data()), bytes.size()};
    msghdr message = {};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    if (!descriptors.empty()) {
      message.msg_control = control.data();
      message.msg_controllen = control.size();
      cmsghdr* header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(descriptors.size() * sizeof(int));
      std::memcpy(CMSG_DATA(header), descriptors.data(), descriptors.size() * sizeof(int));
    }
    ASSERT_EQ(::sendmsg(raw, &message, MSG_NOSIGNAL), bytes.size());
  }

  int raw;
  std::optional<DescriptorChannel> a, b;
};

TEST_F(DescriptorChannelTest, DescriptorsArriveInOrderAndAreNotInheritable) {
  Pair pair;
  const UniqueFd first = Memory('1'), second = Memory('2');
  const ReturnSlabs sent{{{SlabId(7), Epoch(8)}, {SlabId(9), Epoch(10)}}};
  ASSERT_TRUE(pair.a->Send(sent, {first.get(), second.get()}, kLong).ok());

  absl::StatusOr<ReceivedPacket> received = pair.b->Receive(kLong);
  ASSERT_TRUE(received.ok()) << received.status();
  EXPECT_EQ(received->packet, DescriptorPacket(sent));
  ASSERT_EQ(received->descriptors.size(), 2);
  EXPECT_EQ(FirstByte(received->descriptors[0].get()), '1');
  EXPECT_EQ(FirstByte(received->descriptors[1].get()), '2');
  for (const UniqueFd& fd : received->descriptors) {
    EXPECT_EQ(::fcntl(fd.get(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
  }
}

TEST_F(DescriptorChannelTest, SixtyFourDescriptorsFitAPacket) {
  Pair pair;
  ASSERT_TRUE(pair.b->IdentifyPeer().ok());  // with the sender's credentials on top
  const UniqueFd memory = Memory('x');
  const std::vector<int> descriptors(64, memory.get());
  ASSERT_TRUE(pair.a->Send(ReturnSlabs{std::vector<SlabEntry>(64)}, descriptors, kLong).ok());
  std::vector<UniqueFd> received;
  ASSERT_TRUE(pair.b->ReceiveA<ReturnSlabs>(kLong, &received).ok());
  EXPECT_EQ(received.size(), 64);
}

TEST_F(DescriptorChannelTest, WrongNumberOfDescriptorsIsRefusedAndTheyAreClosed) {
  const UniqueFd memory = Memory('x');
  const std::string two = *EncodePacket(ReturnSlabs{std::vector<SlabEntry>(2)});
  const std::string none = *EncodePacket(Fetch{Token::Random()});
  Pair pair;
  const int before = OpenDescriptors();
  for (const auto& [bytes, count] : std::vector<std::pair<std::string, int>>{
           {two, 0}, {two, 1}, {two, 3}, {none, 1}, {none, 64}, {none, 65}, {two, 253}}) {
    pair.SendRaw(bytes, std::vector<int>(count, memory.get()));
    EXPECT_TRUE(absl::IsInvalidArgument(pair.b->Receive(kLong).status())) << count;
    EXPECT_EQ(OpenDescriptors(), before) << count;
  }
}

TEST_F(DescriptorChannelTest, OversizedAndUndecodablePacketsAreRefusedAndTheirDescriptorsClosed) {
  const UniqueFd memory = Memory('x');
  Pair pair;
  const int before = OpenDescriptors();
  for (const std::string& bytes :
       {std::string(kMaxPacketBytes + 1, 'x'), std::string("\xff junk"), std::string(1, '\0')}) {
    pair.SendRaw(bytes, {memory.get(), memory.get()});
    EXPECT_TRUE(absl::IsInvalidArgument(pair.b->Receive(kLong).status()));
    EXPECT_EQ(OpenDescriptors(), before);
  }
}

TEST_F(DescriptorChannelTest, SendChecksWhatItIsGiven) {
  Pair pair;
  EXPECT_TRUE(
      absl::IsInvalidArgument(pair.a->Send(ReturnSlabs{std::vector<SlabEntry>(1)}, {}, kLong)));
  EXPECT_TRUE(absl::IsInvalidArgument(pair.a->Send(Accepted{}, {0}, kLong)));
  EXPECT_FALSE(pair.a->Send(ReturnSlabs{std::vector<SlabEntry>(1)}, {-1}, kLong).ok());
}

TEST_F(DescriptorChannelTest, DeadlinesHoldAndTheConnectionStaysUsable) {
  Pair pair;
  EXPECT_TRUE(absl::IsDeadlineExceeded(pair.b->Receive(absl::ZeroDuration()).status()));
  int sent = 0;
  absl::Status status;
  while ((status = pair.a->Send(Accepted{}, {}, absl::ZeroDuration())).ok()) ++sent;
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_GT(sent, 0);
  for (int i = 0; i < sent; ++i) ASSERT_TRUE(pair.b->ReceiveA<Accepted>(kLong).ok());
  EXPECT_TRUE(pair.a->Send(Accepted{}, {}, kLong).ok());
  EXPECT_TRUE(pair.b->ReceiveA<Accepted>(kLong).ok());
}

TEST_F(DescriptorChannelTest, ClosedPeerIsUnavailable) {
  Pair pair;
  pair.a.reset();
  EXPECT_TRUE(absl::IsUnavailable(pair.b->Receive(kLong).status()));
  EXPECT_TRUE(absl::IsUnavailable(pair.b->Send(Accepted{}, {}, kLong)));
}

TEST_F(DescriptorChannelTest, ShutdownWakesAReceiver) {
  Pair pair;
  std::thread receiver([&] { EXPECT_TRUE(absl::IsUnavailable(pair.b->Receive(kLong).status())); });
  pair.b->Shutdown();
  receiver.join();
}

TEST_F(DescriptorChannelTest, RefusalsBecomeStatuses) {
  Pair pair;
  ASSERT_TRUE(pair.a->Send(Refused{"wrong secret"}, {}, kLong).ok());
  ASSERT_TRUE(pair.a->Send(Failed{"token expired"}, {}, kLong).ok());
  ASSERT_TRUE(pair.a->Send(Accepted{}, {}, kLong).ok());
  absl::Status status = pair.b->ReceiveA<Welcome>(kLong).status();
  EXPECT_TRUE(absl::IsPermissionDenied(status));
  EXPECT_EQ(status.message(), "wrong secret");
  status = pair.b->ReceiveA<Descriptors>(kLong).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status));
  EXPECT_EQ(status.message(), "token expired");
  status = pair.b->ReceiveA<Descriptors>(kLong).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("expected a Descriptors packet"));
}

TEST_F(DescriptorChannelTest, PeerIsTheProcessThatConnected) {
  DescriptorListener listener = Listen();
  const pid_t child = Fork([&] {
    absl::StatusOr<DescriptorChannel> channel = DescriptorChannel::Connect(path());
    if (!channel.ok() || !channel->Send(Hello{.tenant = "alpha"}, {}, kLong).ok()) return 1;
    return channel->ReceiveA<Welcome>(kLong).ok() ? 0 : 2;
  });
  absl::StatusOr<DescriptorChannel> channel = listener.Accept(kLong);
  ASSERT_TRUE(channel.ok()) << channel.status();
  absl::StatusOr<PeerIdentity> peer = channel->IdentifyPeer();
  ASSERT_TRUE(peer.ok()) << peer.status();
  EXPECT_EQ(peer->process.pid(), child);
  EXPECT_EQ(peer->uid, ::getuid());
  EXPECT_FALSE(peer->process.Exited());
  absl::StatusOr<Hello> hello = channel->ReceiveA<Hello>(kLong);
  ASSERT_TRUE(hello.ok()) << hello.status();
  EXPECT_EQ(hello->tenant, "alpha");
  ASSERT_TRUE(channel->Send(Welcome{Token::Random()}, {}, kLong).ok());
  EXPECT_EQ(ExitStatus(child), 0);
  EXPECT_TRUE(peer->process.Exited());
}

TEST_F(DescriptorChannelTest, PeerThatDiedIsRefused) {
  DescriptorListener listener = Listen();
  const pid_t child = Fork([&] { return DescriptorChannel::Connect(path()).ok() ? 0 : 1; });
  EXPECT_EQ(ExitStatus(child), 0);
  absl::StatusOr<DescriptorChannel> channel = listener.Accept(kLong);
  ASSERT_TRUE(channel.ok()) << channel.status();
  EXPECT_TRUE(absl::IsUnauthenticated(channel->IdentifyPeer().status()));
}

TEST_F(DescriptorChannelTest, PacketOfAnotherProcessOverTheSameConnectionIsRefused) {
  DescriptorListener listener = Listen();
  absl::StatusOr<DescriptorChannel> client = DescriptorChannel::Connect(path());
  ASSERT_TRUE(client.ok()) << client.status();
  absl::StatusOr<DescriptorChannel> channel = listener.Accept(kLong);
  ASSERT_TRUE(channel.ok()) << channel.status();
  ASSERT_TRUE(channel->IdentifyPeer().ok());

  ASSERT_TRUE(client->Send(Fetch{Token::Random()}, {}, kLong).ok());
  EXPECT_TRUE(channel->ReceiveA<Fetch>(kLong).ok());

  const pid_t thief = Fork([&] {  // it inherited the socket
    return client->Send(Fetch{Token::Random()}, {}, kLong).ok() ? 0 : 1;
  });
  EXPECT_EQ(ExitStatus(thief), 0);
  const absl::Status status = channel->ReceiveA<Fetch>(kLong).status();
  EXPECT_TRUE(absl::IsPermissionDenied(status)) << status;
}

TEST_F(DescriptorChannelTest, PacketSentBeforeAcceptIsAttributedToo) {
  DescriptorListener listener = Listen();
  absl::StatusOr<DescriptorChannel> client = DescriptorChannel::Connect(path());
  ASSERT_TRUE(client.ok()) << client.status();
  const pid_t thief =
      Fork([&] { return client->Send(Hello{.tenant = "beta"}, {}, kLong).ok() ? 0 : 1; });
  EXPECT_EQ(ExitStatus(thief), 0);
  ASSERT_TRUE(client->Send(Hello{.tenant = "alpha"}, {}, kLong).ok());
  absl::StatusOr<DescriptorChannel> channel = listener.Accept(kLong);
  ASSERT_TRUE(channel.ok()) << channel.status();
  ASSERT_TRUE(channel->IdentifyPeer().ok());
  EXPECT_TRUE(absl::IsPermissionDenied(channel->ReceiveA<Hello>(kLong).status()));
  EXPECT_TRUE(channel->ReceiveA<Hello>(kLong).ok());
}

TEST_F(DescriptorChannelTest, ForeignPidNamespaceIsRefusedWithTheReason) {
  DescriptorListener listener = Listen();
  // The peer stays outside; the listener's process looks at it from inside a new pid namespace,
  // where the peer has no number.
  absl::StatusOr<DescriptorChannel> client = DescriptorChannel::Connect(path());
  ASSERT_TRUE(client.ok()) << client.status();
  absl::StatusOr<DescriptorChannel> channel = listener.Accept(kLong);
  ASSERT_TRUE(channel.ok()) << channel.status();
  constexpr int kNoNamespaces = 77;
  const pid_t outer = Fork([&] {
    if (::unshare(CLONE_NEWUSER | CLONE_NEWPID) != 0) return kNoNamespaces;
    return ExitStatus(Fork([&] {
      const absl::Status status = channel->IdentifyPeer().status();
      const bool refused = absl::IsUnauthenticated(status) &&
                           status.message().find("hostPID") != absl::string_view::npos;
      return refused ? 0 : 1;
    }));
  });
  const int result = ExitStatus(outer);
  if (result == kNoNamespaces) GTEST_SKIP() << "no permission to create a pid namespace";
  EXPECT_EQ(result, 0);
}

TEST_F(DescriptorChannelTest, NobodyListensIsUnavailable) {
  EXPECT_TRUE(absl::IsUnavailable(DescriptorChannel::Connect(path()).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(DescriptorChannel::Connect(std::string(200, 'x')).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(DescriptorChannel::Connect("").status()));
}

TEST_F(DescriptorChannelTest, ListenerReplacesADeadOneOnly) {
  {
    DescriptorListener listener = Listen();
    EXPECT_TRUE(absl::IsAlreadyExists(DescriptorListener::Listen(path(), 0600).status()));
    const pid_t killed = Fork([&]() -> int {  // leaves its file behind
      absl::StatusOr<DescriptorListener> other =
          DescriptorListener::Listen(folder_ + "/stale", 0600);
      ::_exit(other.ok() ? 0 : 1);
    });
    EXPECT_EQ(ExitStatus(killed), 0);
  }
  EXPECT_FALSE(std::filesystem::exists(path()));
  EXPECT_TRUE(std::filesystem::exists(folder_ + "/stale"));
  EXPECT_TRUE(DescriptorListener::Listen(folder_ + "/stale", 0600).ok());

  const UniqueFd file(::open((folder_ + "/file").c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
  EXPECT_TRUE(absl::IsAlreadyExists(DescriptorListener::Listen(folder_ + "/file", 0600).status()));
  EXPECT_TRUE(std::filesystem::exists(folder_ + "/file"));
}

TEST_F(DescriptorChannelTest, ListenerSetsPermissionsWhateverTheUmask) {
  const mode_t old = ::umask(0077);
  absl::StatusOr<DescriptorListener> listener = DescriptorListener::Listen(path(), 0666);
  ::umask(old);
  ASSERT_TRUE(listener.ok()) << listener.status();
  struct stat entry;
  ASSERT_EQ(::stat(path().c_str(), &entry), 0);
  EXPECT_EQ(entry.st_mode & 0777, 0666);
}

TEST_F(DescriptorChannelTest, ShutdownWakesAccept) {
  DescriptorListener listener = Listen();
  EXPECT_TRUE(absl::IsDeadlineExceeded(listener.Accept(absl::ZeroDuration()).status()));
  std::thread acceptor([&] { EXPECT_TRUE(absl::IsCancelled(listener.Accept(kLong).status())); });
  listener.Shutdown();
  acceptor.join();
}

}  // namespace
}  // namespace palimpsest
