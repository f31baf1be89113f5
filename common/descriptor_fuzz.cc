// Any bytes as a packet, decoded alone and received over a live connection together with
// descriptors: no crash, one encoding only, and no descriptor leaks.
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "common/descriptor_channel.h"

namespace palimpsest {
namespace {

void Check(bool condition) {
  if (!condition) std::abort();
}

// The lowest free number tells whether a descriptor was left open.
int LowestFree() {
  const UniqueFd fd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  Check(fd.valid());
  return fd.get();
}

void SendRaw(int socket, absl::string_view bytes, size_t descriptors) {
  constexpr size_t kMost = 80;  // more than the receiver takes
  std::array<int, kMost> fds;
  fds.fill(socket);
  const size_t length = std::min(descriptors, kMost) * sizeof(int);
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMost * sizeof(int))> control = {};
  iovec data = {const_cast<char*>(bytes.data()), bytes.size()};
  msghdr message = {};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  if (length > 0) {
    message.msg_control = control.data();
    message.msg_controllen = CMSG_SPACE(length);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(length);
    std::memcpy(CMSG_DATA(header), fds.data(), length);
  }
  (void)::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

// The first byte says how many descriptors come along, the rest is the packet.
void CheckPacket(const uint8_t* data, size_t size) {
  if (size == 0) return;
  const absl::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  absl::StatusOr<DescriptorPacket> decoded = DecodePacket(bytes);
  if (decoded.ok()) Check(*EncodePacket(*decoded) == bytes);

  const int before = LowestFree();
  {
    int ends[2];
    Check(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0);
    const UniqueFd sender(ends[0]);
    DescriptorChannel receiver{UniqueFd(ends[1])};
    if (data[0] & 0x80) Check(receiver.IdentifyPeer().ok());
    const int open_now = LowestFree();
    const size_t descriptors = data[0] & 0x7f;
    SendRaw(sender.get(), bytes, descriptors);
    {
      absl::StatusOr<ReceivedPacket> received = receiver.Receive(absl::ZeroDuration());
      if (received.ok()) {
        Check(decoded.ok() && received->packet == *decoded);
        Check(received->descriptors.size() == descriptors);
      }
    }
    Check(LowestFree() == open_now);
  }
  Check(LowestFree() == before);
}

}  // namespace
}  // namespace palimpsest

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  palimpsest::CheckPacket(data, size);
  return 0;
}
