#include "broker/tier/remote/remote_wire.h"

#include <algorithm>
#include <cassert>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "common/block_identity.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

namespace palimpsest {
namespace {

// They differ from version to version.
constexpr uint32_t kRequestMagic = 0x31'51'52'50;  // "PRQ1"
constexpr uint32_t kReplyMagic = 0x31'50'52'50;    // "PRP1"

// The tenant's name follows.
struct RequestFields {
  uint32_t magic;
  uint32_t kind;
  uint64_t id;
  uint64_t place;
  uint64_t key[2];
  int64_t length;
  uint64_t checksum;
  uint64_t tenant_bytes;
};
static_assert(sizeof(RequestFields) == 64);

// The text follows.
struct ReplyFields {
  uint32_t magic;
  uint32_t code;
  uint64_t id;
  uint64_t place;
  int64_t length;
  uint64_t checksum;
  uint64_t text_bytes;
};
static_assert(sizeof(ReplyFields) == 48);

absl::Status NoMessage(absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("another node sent what is no ", what));
}

template <typename Fields>
std::string Begin(const Fields& fields) {
  return {reinterpret_cast<const char*>(&fields), sizeof fields};
}

}  // namespace

std::string EncodeRequest(const RemoteRequest& request) {
  assert(request.tenant.size() <= kMaxTenantName);
  return Begin(RequestFields{.magic = kRequestMagic,
                             .kind = static_cast<uint32_t>(request.kind),
                             .id = request.id,
                             .place = request.place,
                             .key = {request.key.high, request.key.low},
                             .length = request.length.count(),
                             .checksum = request.checksum,
                             .tenant_bytes = request.tenant.size()}) +
         request.tenant;
}

absl::StatusOr<RemoteRequest> DecodeRequest(absl::string_view bytes) {
  RequestFields fields;
  if (bytes.size() < sizeof fields) return NoMessage("request");
  std::memcpy(&fields, bytes.data(), sizeof fields);
  bytes.remove_prefix(sizeof fields);
  if (fields.magic != kRequestMagic || fields.kind < 1 || fields.kind > 4 || fields.length < 0 ||
      fields.tenant_bytes > kMaxTenantName || fields.tenant_bytes != bytes.size()) {
    return NoMessage("request");
  }
  return RemoteRequest{.kind = static_cast<RemoteRequest::Kind>(fields.kind),
                       .id = fields.id,
                       .place = fields.place,
                       .key = {fields.key[0], fields.key[1]},
                       .length = Bytes(fields.length),
                       .checksum = fields.checksum,
                       .tenant = std::string(bytes)};
}

std::string EncodeReply(const RemoteReply& reply) {
  const absl::string_view text = absl::string_view(reply.text).substr(0, kMaxReplyText);
  return absl::StrCat(Begin(ReplyFields{.magic = kReplyMagic,
                                        .code = static_cast<uint32_t>(reply.code),
                                        .id = reply.id,
                                        .place = reply.place,
                                        .length = reply.length.count(),
                                        .checksum = reply.checksum,
                                        .text_bytes = text.size()}),
                      text);
}

absl::StatusOr<RemoteReply> DecodeReply(absl::string_view bytes) {
  ReplyFields fields;
  if (bytes.size() < sizeof fields) return NoMessage("reply");
  std::memcpy(&fields, bytes.data(), sizeof fields);
  bytes.remove_prefix(sizeof fields);
  if (fields.magic != kReplyMagic || fields.length < 0 || fields.text_bytes > kMaxReplyText ||
      fields.text_bytes != bytes.size()) {
    return NoMessage("reply");
  }
  return RemoteReply{.id = fields.id,
                     .code = static_cast<absl::StatusCode>(fields.code),
                     .text = std::string(bytes),
                     .place = fields.place,
                     .length = Bytes(fields.length),
                     .checksum = fields.checksum};
}

}  // namespace palimpsest
