#include "common/descriptor_channel.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <optional>

#include "absl/strings/str_cat.h"
#include "common/monotonic_time.h"

// Linux 6.5; missing in older headers. The number differs on alpha, mips, parisc and sparc.
#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

namespace palimpsest {
namespace {

constexpr int kListenBacklog = 64;

absl::Status PeerGoneError() {
  return absl::UnavailableError("the other end of the descriptor socket is gone");
}

absl::Status SocketError(absl::string_view what, int error) {
  if (error == EPIPE || error == ECONNRESET || error == ENOTCONN) return PeerGoneError();
  return ErrnoStatus(what, error);
}

absl::StatusOr<sockaddr_un> Address(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat("the socket path '", path, "' has ", path.size(),
                                                   " bytes, expected 1 to ",
                                                   sizeof(address.sun_path) - 1));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

const sockaddr* Generic(const sockaddr_un& address) {
  return reinterpret_cast<const sockaddr*>(&address);
}

absl::StatusOr<UniqueFd> NewSocket() {
  UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!socket.valid()) return ErrnoStatus("socket");
  return socket;
}

// OK once `events` or a hang-up happened; the call that follows tells which.
absl::Status Await(int fd, int16_t events, absl::Time deadline, absl::string_view what) {
  for (;;) {
    pollfd entry = {fd, events, 0};
    const absl::Duration left = std::max(deadline - MonotonicNow(), absl::ZeroDuration());
    const timespec wait = absl::ToTimespec(left);
    const int ready =
        ::ppoll(&entry, 1, left == absl::InfiniteDuration() ? nullptr : &wait, nullptr);
    if (ready > 0) return absl::OkStatus();
    if (ready == 0) return absl::DeadlineExceededError(absl::StrCat("timeout: ", what));
    if (errno != EINTR) return ErrnoStatus("poll");
  }
}

// Whether the other end has closed or lost its socket.
bool HungUp(int fd) {
  pollfd entry = {fd, 0, 0};
  return ::poll(&entry, 1, 0) > 0 && (entry.revents & (POLLHUP | POLLERR)) != 0;
}

// Room for all that may legally come with a packet: descriptors and the sender's credentials.
struct ControlBuffer {
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int) * kMaxPacketDescriptors) +
                                        CMSG_SPACE(sizeof(ucred))> bytes;
};

struct Ancillary {
  std::vector<UniqueFd> descriptors;
  std::optional<ucred> sender;
};

// Takes ownership of every received descriptor before anything else can fail.
Ancillary TakeAncillary(msghdr& message) {
  Ancillary result;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET) continue;
    if (header->cmsg_type == SCM_RIGHTS) {
      const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      for (size_t i = 0; i < count; ++i) {
        int fd;
        std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(fd));
        result.descriptors.emplace_back(fd);
      }
    } else if (header->cmsg_type == SCM_CREDENTIALS) {
      ucred sender;
      std::memcpy(&sender, CMSG_DATA(header), sizeof(sender));
      result.sender = sender;
    }
  }
  return result;
}

absl::Status CheckSender(const std::optional<ucred>& sender, pid_t required) {
  if (required == 0) return absl::OkStatus();
  if (sender.has_value() && sender->pid == required) return absl::OkStatus();
  return absl::PermissionDeniedError(absl::StrCat(
      "a packet came from process ", sender.has_value() ? sender->pid : 0, ", but process ",
      required, " opened the connection; a connection must not be shared"));
}

}  // namespace

absl::StatusOr<DescriptorChannel> DescriptorChannel::Connect(const std::string& path) {
  absl::StatusOr<sockaddr_un> address = Address(path);
  if (!address.ok()) return address.status();
  absl::StatusOr<UniqueFd> socket = NewSocket();
  if (!socket.ok()) return socket.status();
  // With SO_SNDTIMEO a full backlog of a broker that accepts nobody cannot block us forever.
  const timeval limit = {5, 0};
  ::setsockopt(socket->get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
  if (::connect(socket->get(), Generic(*address), sizeof(*address)) != 0) {
    const absl::Status error = ErrnoStatus(absl::StrCat("cannot connect to ", path));
    if (errno == ENOENT || errno == ECONNREFUSED || errno == EAGAIN) {
      return absl::UnavailableError(error.message());
    }
    return error;
  }
  return DescriptorChannel(*std::move(socket));
}

absl::Status DescriptorChannel::Send(const DescriptorPacket& packet,
                                     absl::Span<const int> descriptors, absl::Duration timeout) {
  if (descriptors.size() != DescriptorCount(packet)) {
    return absl::InvalidArgumentError(absl::StrCat("a ", PacketName(packet), " packet needs ",
                                                   DescriptorCount(packet), " descriptors, got ",
                                                   descriptors.size()));
  }
  absl::StatusOr<std::string> bytes = EncodePacket(packet);
  if (!bytes.ok()) return bytes.status();

  iovec data = {bytes->data(), bytes->size()};
  ControlBuffer control = {};
  msghdr message = {};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  if (!descriptors.empty()) {
    const size_t length = descriptors.size() * sizeof(int);
    message.msg_control = control.bytes.data();
    message.msg_controllen = CMSG_SPACE(length);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(length);
    std::memcpy(CMSG_DATA(header), descriptors.data(), length);
  }
  const absl::Time deadline = MonotonicNow() + timeout;
  for (;;) {
    if (::sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0) {
      return absl::OkStatus();
    }
    if (errno == EINTR) continue;
    if (errno == ETOOMANYREFS) {
      return absl::ResourceExhaustedError(
          "more descriptors are on their way than RLIMIT_NOFILE allows; raise it (ulimit -n)");
    }
    if (errno != EAGAIN) {
      return SocketError(absl::StrCat("cannot send a ", PacketName(packet), " packet"), errno);
    }
    if (absl::Status status =
            Await(socket_.get(), POLLOUT, deadline, "the other end reads no packets");
        !status.ok()) {
      return status;
    }
  }
}

absl::StatusOr<ReceivedPacket> DescriptorChannel::Receive(absl::Duration timeout) {
  std::array<char, kMaxPacketBytes> buffer;
  ControlBuffer control;
  iovec data = {buffer.data(), buffer.size()};
  msghdr message = {};
  const absl::Time deadline = MonotonicNow() + timeout;
  ssize_t size;
  for (;;) {
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control.bytes.data();
    message.msg_controllen = control.bytes.size();
    size = ::recvmsg(socket_.get(), &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (size >= 0) break;
    if (errno == EINTR) continue;
    if (errno != EAGAIN) return SocketError("cannot receive a packet", errno);
    if (absl::Status status = Await(socket_.get(), POLLIN, deadline, "no packet came");
        !status.ok()) {
      return status;
    }
  }
  Ancillary ancillary = TakeAncillary(message);
  // A hang-up and an empty packet look alike; the latter is no packet of ours.
  if (size == 0) return PeerGoneError();
  if (message.msg_flags & MSG_TRUNC) {
    return absl::InvalidArgumentError(
        absl::StrCat("a packet has more than ", kMaxPacketBytes, " bytes"));
  }
  if (message.msg_flags & MSG_CTRUNC) {
    return absl::InvalidArgumentError(
        absl::StrCat("descriptors of a packet were lost: more than ", kMaxPacketDescriptors,
                     " came, or this process has none left (RLIMIT_NOFILE)"));
  }
  if (absl::Status status = CheckSender(ancillary.sender, required_sender_); !status.ok()) {
    return status;
  }
  absl::StatusOr<DescriptorPacket> packet =
      DecodePacket(absl::string_view(buffer.data(), static_cast<size_t>(size)));
  if (!packet.ok()) return packet.status();
  if (ancillary.descriptors.size() != DescriptorCount(*packet)) {
    return absl::InvalidArgumentError(
        absl::StrCat("a ", PacketName(*packet), " packet came with ", ancillary.descriptors.size(),
                     " descriptors, expected ", DescriptorCount(*packet)));
  }
  return ReceivedPacket{*std::move(packet), std::move(ancillary.descriptors)};
}

absl::StatusOr<PeerIdentity> DescriptorChannel::IdentifyPeer() {
  ucred peer = {};
  socklen_t size = sizeof(peer);
  if (::getsockopt(socket_.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) {
    return ErrnoStatus("SO_PEERCRED");
  }
  if (peer.pid <= 0) {
    return absl::UnauthenticatedError(
        "the peer's process id reads 0: it lives in a pid namespace that this process cannot see, "
        "so "
        "that it could neither be watched nor killed; run the broker in the host's pid namespace "
        "(hostPID: true)");
  }
  const int on = 1;
  if (::setsockopt(socket_.get(), SOL_SOCKET, SO_PASSCRED, &on, sizeof(on)) != 0) {
    return ErrnoStatus("SO_PASSCRED");
  }

  int kernel_pidfd = -1;
  size = sizeof(kernel_pidfd);
  const bool from_socket =
      ::getsockopt(socket_.get(), SOL_SOCKET, SO_PEERPIDFD, &kernel_pidfd, &size) == 0;
  absl::StatusOr<ProcessHandle> process =
      from_socket ? ProcessHandle::FromPidfd(UniqueFd(kernel_pidfd), peer.pid)
                  : ProcessHandle::Open(peer.pid);
  if (!process.ok()) {
    return absl::UnauthenticatedError(
        absl::StrCat("cannot identify the peer: ", process.status().message()));
  }
  // The second look: a process that died closed its end, so if the connection still stands, nobody
  // else got its number before the pidfd was opened.
  if (HungUp(socket_.get()) || process->Exited()) {
    return absl::UnauthenticatedError(
        absl::StrCat("process ", peer.pid, " went away while it was being identified"));
  }
  required_sender_ = peer.pid;
  return PeerIdentity{peer.uid, peer.gid, *std::move(process)};
}

void DescriptorChannel::Shutdown() { ::shutdown(socket_.get(), SHUT_RDWR); }

absl::Status DescriptorChannel::UnexpectedPacket(const DescriptorPacket& packet,
                                                 absl::string_view expected) {
  if (const auto* failed = std::get_if<Failed>(&packet)) {
    return absl::FailedPreconditionError(failed->message);
  }
  if (const auto* refused = std::get_if<Refused>(&packet)) {
    return absl::PermissionDeniedError(refused->message);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("expected a ", expected, " packet, a ", PacketName(packet), " packet came"));
}

absl::StatusOr<DescriptorListener> DescriptorListener::Listen(const std::string& path,
                                                              mode_t mode) {
  absl::StatusOr<sockaddr_un> address = Address(path);
  if (!address.ok()) return address.status();
  absl::StatusOr<UniqueFd> socket = NewSocket();
  if (!socket.ok()) return socket.status();
  // Accepted sockets inherit it, so that packets sent before accept() name their sender too.
  const int on = 1;
  if (::setsockopt(socket->get(), SOL_SOCKET, SO_PASSCRED, &on, sizeof(on)) != 0) {
    return ErrnoStatus("SO_PASSCRED");
  }

  struct stat entry;
  if (::lstat(path.c_str(), &entry) == 0) {
    if (!S_ISSOCK(entry.st_mode)) {
      return absl::AlreadyExistsError(absl::StrCat(path, " exists and is no socket; remove it"));
    }
    if (DescriptorChannel::Connect(path).ok()) {
      return absl::AlreadyExistsError(
          absl::StrCat("another process listens on ", path, "; stop it or choose another path"));
    }
    if (::unlink(path.c_str()) != 0) return ErrnoStatus(absl::StrCat("cannot replace ", path));
  }
  // fchmod before bind gives the file its mode from the start (the umask is still applied to it).
  if (::fchmod(socket->get(), mode) != 0 ||
      ::bind(socket->get(), Generic(*address), sizeof(*address)) != 0) {
    return ErrnoStatus(absl::StrCat("cannot create the socket ", path));
  }
  if (::chmod(path.c_str(), mode) != 0 || ::lstat(path.c_str(), &entry) != 0) {
    return ErrnoStatus(absl::StrCat("cannot set the permissions of ", path));
  }
  if (::listen(socket->get(), kListenBacklog) != 0) return ErrnoStatus("listen");
  return DescriptorListener(*std::move(socket), path, entry.st_ino);
}

DescriptorListener::~DescriptorListener() {
  // A successor may have replaced the file already.
  struct stat entry;
  if (socket_.valid() && ::lstat(path_.c_str(), &entry) == 0 && entry.st_ino == inode_) {
    ::unlink(path_.c_str());
  }
}

absl::StatusOr<DescriptorChannel> DescriptorListener::Accept(absl::Duration timeout) {
  const absl::Time deadline = MonotonicNow() + timeout;
  for (;;) {
    if (absl::Status status = Await(socket_.get(), POLLIN, deadline, "nobody connected");
        !status.ok()) {
      return status;
    }
    UniqueFd connection(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (connection.valid()) return DescriptorChannel(std::move(connection));
    if (errno == EINVAL) return absl::CancelledError("the listener was shut down");
    if (errno != EINTR && errno != ECONNABORTED && errno != EAGAIN) return ErrnoStatus("accept");
  }
}

void DescriptorListener::Shutdown() { ::shutdown(socket_.get(), SHUT_RDWR); }

}  // namespace palimpsest
