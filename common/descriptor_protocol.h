// What is said on the descriptor socket, the second channel between a worker and its broker: who a
// worker is, and which memory its file descriptors are. Pure: packets to bytes and back. Sending,
// receiving and the descriptors themselves are in descriptor_channel.h.
//
//   worker                                broker
//   Hello{version, tenant, secret}   ->
//                                    <-   Welcome{nonce} | Refused{message}
//   (Attach{nonce} over gRPC, and from then on, any number of times:)
//   Fetch{token of a Grant}          ->
//                                    <-   Descriptors{pieces, first, total, entries} + `pieces`
//                                         fds per entry, repeated until first + entries = total |
//                                         Failed{message}
//   (after a restart of the broker, between Welcome and Attach:)
//   ReturnSlabs{pieces, entries} + `pieces` fds per entry | ReturnImage{fingerprint} + one fd   ->
//                                    <-   Accepted | Failed{message}
//
// One packet is one SOCK_SEQPACKET message. Little-endian, lengths before strings, nothing
// optional, nothing trailing, so that every packet has one encoding. Everything is bounded: a
// decoder allocates no more than kMaxPacketBytes asks for.
#ifndef PALIMPSEST_COMMON_DESCRIPTOR_PROTOCOL_H_
#define PALIMPSEST_COMMON_DESCRIPTOR_PROTOCOL_H_

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/ids.h"
#include "common/random.h"

namespace palimpsest {

inline constexpr uint32_t kDescriptorProtocolVersion = 2;
inline constexpr size_t kMaxPacketBytes = 4096;
// SCM_MAX_FD of Linux.
inline constexpr size_t kMaxPacketDescriptors = 253;
// Of one slab: as many as its pool has GPUs. A slab's descriptors are in one packet.
inline constexpr size_t kMaxSlabPieces = 64;
inline constexpr size_t kMaxTenantBytes = 128;
inline constexpr size_t kMaxSecretBytes = 1024;
inline constexpr size_t kMaxMessageBytes = 1024;

struct Hello {
  uint32_t version = kDescriptorProtocolVersion;
  std::string tenant;
  // Empty where the tenant is recognised by its uid.
  std::string secret;
  friend bool operator==(const Hello&, const Hello&) = default;
};

struct Welcome {
  // Attach presents it; single use.
  Token nonce;
  friend bool operator==(const Welcome&, const Welcome&) = default;
};

// The broker closes the connection after it.
struct Refused {
  std::string message;
  friend bool operator==(const Refused&, const Refused&) = default;
};

struct Fetch {
  Token token;
  friend bool operator==(const Fetch&, const Fetch&) = default;
};

struct SlabEntry {
  SlabId slab_id;
  Epoch epoch;
  friend bool operator==(const SlabEntry&, const SlabEntry&) = default;
};

enum class DescriptorKind : uint8_t { kSlabs = 1, kImage = 2 };

struct Descriptors {
  DescriptorKind kind = DescriptorKind::kSlabs;
  // Number of entries in the packets before this one, and in all packets of this answer.
  uint32_t first = 0;
  uint32_t total = 0;
  // kSlabs: 1 to MaxPacketEntries(pieces); the packet's descriptors are those of the first entry,
  // then those of the second, and so on. kImage: none, one descriptor.
  std::vector<SlabEntry> entries;
  // Descriptors of each entry: 1 to kMaxSlabPieces.
  uint8_t pieces = 1;
  friend bool operator==(const Descriptors&, const Descriptors&) = default;
};

struct ReturnSlabs {
  // As in Descriptors.
  std::vector<SlabEntry> entries;
  uint8_t pieces = 1;
  friend bool operator==(const ReturnSlabs&, const ReturnSlabs&) = default;
};

// One descriptor.
struct ReturnImage {
  std::string fingerprint;  // 32 bytes
  friend bool operator==(const ReturnImage&, const ReturnImage&) = default;
};

struct Accepted {
  friend bool operator==(const Accepted&, const Accepted&) = default;
};

// The request was not served; the connection stays.
struct Failed {
  std::string message;
  friend bool operator==(const Failed&, const Failed&) = default;
};

using DescriptorPacket = std::variant<Hello, Welcome, Refused, Fetch, Descriptors, ReturnSlabs,
                                      ReturnImage, Accepted, Failed>;

// The most slabs of so many pieces that fit a packet.
constexpr size_t MaxPacketEntries(size_t pieces) { return kMaxPacketDescriptors / pieces; }

// How many file descriptors travel with a packet.
size_t DescriptorCount(const DescriptorPacket& packet);

// "Hello", "Fetch", ...: for messages. Tells no secrets.
absl::string_view PacketName(const DescriptorPacket& packet);

// InvalidArgument when the packet breaks a bound above; messages that are too long are cut instead.
absl::StatusOr<std::string> EncodePacket(const DescriptorPacket& packet);

// InvalidArgument for every input that EncodePacket does not return.
absl::StatusOr<DescriptorPacket> DecodePacket(absl::string_view bytes);

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_DESCRIPTOR_PROTOCOL_H_
