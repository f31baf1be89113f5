// The descriptor socket: packets of descriptor_protocol.h together with file descriptors over a
// SOCK_SEQPACKET Unix socket, and the identity of who is at the other end.
//
// Why identity can be trusted here and nowhere else: the kernel notes uid and pid of the process
// that called connect() (SO_PEERCRED), and of the process that sends a packet (SCM_CREDENTIALS).
// Neither can be forged without privileges. Three traps are avoided:
//   - A pid is only a number. Between connect() and our look at it the process may have died and
//   the
//     number may name another one. So the process is held by pidfd, taken from the socket itself
//     where the kernel can (SO_PEERPIDFD, Linux 6.5); elsewhere it is opened by number, and then
//     the connection is looked at again: if it is still open, and the process still runs, the
//     number was not free in between.
//   - A connected socket can be inherited or passed on. So every packet must come from the process
//     that connected, not merely over its connection.
//   - In a foreign pid namespace a peer's pid reads 0. Such a process can neither be watched nor
//     killed, so it is refused, with what to do about it.
//
// Received descriptors are owned at once, closed on every error path and never inherited by
// children (MSG_CMSG_CLOEXEC). A packet that was cut, carries more or fewer descriptors than it
// names, or does not decode is an error after which the connection must be closed.
#ifndef PALIMPSEST_COMMON_DESCRIPTOR_CHANNEL_H_
#define PALIMPSEST_COMMON_DESCRIPTOR_CHANNEL_H_

#include <sys/types.h>

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "common/descriptor_protocol.h"
#include "common/fd.h"
#include "common/process.h"

namespace palimpsest {

// Who connected. The handle stays valid (and names the same process) after the connection ended.
struct PeerIdentity {
  uid_t uid = 0;
  gid_t gid = 0;
  ProcessHandle process;
};

struct ReceivedPacket {
  DescriptorPacket packet;
  // Exactly DescriptorCount(packet).
  std::vector<UniqueFd> descriptors;
};

// One end of a connection. One thread may send while another receives; Shutdown may be called from
// any thread. Timeouts bound each call; it returns DeadlineExceeded when nothing was sent or
// received, and the connection is still usable.
class DescriptorChannel {
 public:
  // Connects to a listener. Unavailable when there is none.
  static absl::StatusOr<DescriptorChannel> Connect(const std::string& path);

  // Takes a connected SOCK_SEQPACKET socket, as one end of a socketpair.
  explicit DescriptorChannel(UniqueFd socket) : socket_(std::move(socket)) {}

  // Sends one packet; the descriptors stay the caller's. Requires DescriptorCount(packet) of them.
  // Unavailable when the peer is gone.
  absl::Status Send(const DescriptorPacket& packet, absl::Span<const int> descriptors,
                    absl::Duration timeout);

  // The next packet. Unavailable when the peer closed the connection; PermissionDenied for a packet
  // of another process than the one that IdentifyPeer found; InvalidArgument for what is no packet.
  absl::StatusOr<ReceivedPacket> Receive(absl::Duration timeout);

  // Receive, and a packet of any other type than T is an error: Failed and Refused become
  // FailedPrecondition and PermissionDenied with their message.
  template <typename T>
  absl::StatusOr<T> ReceiveA(absl::Duration timeout, std::vector<UniqueFd>* descriptors = nullptr);

  // Who is at the other end, as told above; from then on Receive takes packets of that process
  // only. For the accepting side: a client sees who called listen(). Unauthenticated with the
  // reason.
  absl::StatusOr<PeerIdentity> IdentifyPeer();

  // Ends the connection; calls in progress in other threads return.
  void Shutdown();

  // For poll.
  int fd() const { return socket_.get(); }

 private:
  static absl::Status UnexpectedPacket(const DescriptorPacket& packet, absl::string_view expected);

  UniqueFd socket_;
  pid_t required_sender_ = 0;  // 0: anybody
};

// A listening socket; the file is removed on destruction. One thread accepts; Shutdown may be
// called from any.
class DescriptorListener {
 public:
  // Creates `path` with these permissions. A file left by a dead listener is replaced; a live one
  // is AlreadyExists. The folder decides who may connect or replace the socket: it must not be
  // writable for others.
  static absl::StatusOr<DescriptorListener> Listen(const std::string& path, mode_t mode);

  DescriptorListener(DescriptorListener&&) = default;
  DescriptorListener& operator=(DescriptorListener&&) = delete;
  ~DescriptorListener();

  // DeadlineExceeded when nobody connected; Cancelled after Shutdown.
  absl::StatusOr<DescriptorChannel> Accept(absl::Duration timeout);

  void Shutdown();

  const std::string& path() const { return path_; }
  int fd() const { return socket_.get(); }

 private:
  DescriptorListener(UniqueFd socket, std::string path, ino_t inode)
      : socket_(std::move(socket)), path_(std::move(path)), inode_(inode) {}

  UniqueFd socket_;
  std::string path_;
  ino_t inode_ = 0;
};

template <typename T>
absl::StatusOr<T> DescriptorChannel::ReceiveA(absl::Duration timeout,
                                              std::vector<UniqueFd>* descriptors) {
  absl::StatusOr<ReceivedPacket> received = Receive(timeout);
  if (!received.ok()) return received.status();
  T* packet = std::get_if<T>(&received->packet);
  if (packet == nullptr) {
    return UnexpectedPacket(received->packet, PacketName(DescriptorPacket(T{})));
  }
  if (descriptors != nullptr) *descriptors = std::move(received->descriptors);
  return std::move(*packet);
}

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_DESCRIPTOR_CHANNEL_H_
