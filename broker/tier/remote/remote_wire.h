// What the store of a tier in another node's memory and the owner of that memory say to each other.
// A block's bytes come with the request that stores it and with the reply that loads it. Pure.
// Everything that is decoded may be anything.
#ifndef PALIMPSEST_BROKER_TIER_REMOTE_REMOTE_WIRE_H_
#define PALIMPSEST_BROKER_TIER_REMOTE_REMOTE_WIRE_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/block_key.h"
#include "common/bytes.h"

namespace palimpsest {

inline constexpr size_t kMaxReplyText = 256;

struct RemoteRequest {
  enum class Kind : uint32_t {
    kStore = 1,   // key, length, checksum, tenant, and the block's bytes
    kLoad = 2,    // place, key, length
    kRemove = 3,  // place, key
    kPurge = 4,   // tenant
  };

  Kind kind = Kind::kStore;
  uint64_t id = 0;  // of the sender; the reply repeats it
  uint64_t place = 0;
  BlockKey key;
  Bytes length;
  uint64_t checksum = 0;  // BlockChecksum
  std::string tenant;

  friend bool operator==(const RemoteRequest&, const RemoteRequest&) = default;
};

struct RemoteReply {
  uint64_t id = 0;
  // OK, NotFound, ResourceExhausted, DataLoss; others: the request was wrong.
  absl::StatusCode code = absl::StatusCode::kOk;
  std::string text;
  uint64_t place = 0;  // of a kStore
  // Of a kLoad, with the block's bytes.
  Bytes length;
  uint64_t checksum = 0;

  friend bool operator==(const RemoteReply&, const RemoteReply&) = default;
};

std::string EncodeRequest(const RemoteRequest& request);
// InvalidArgument unless it is exactly what EncodeRequest makes of something.
absl::StatusOr<RemoteRequest> DecodeRequest(absl::string_view bytes);

// `text` is cut to kMaxReplyText.
std::string EncodeReply(const RemoteReply& reply);
absl::StatusOr<RemoteReply> DecodeReply(absl::string_view bytes);

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_TIER_REMOTE_REMOTE_WIRE_H_
