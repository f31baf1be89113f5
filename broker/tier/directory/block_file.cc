#include "broker/tier/directory/block_file.h"

#include <xxhash.h>

#include <cassert>
#include <cstring>

#include "absl/strings/str_cat.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

namespace palimpsest {
namespace {

constexpr uint64_t kMagic = 0x3a31'564b'4c41'50;  // "PALKV1:"

// Behind it: the tokens, the node's and the tenant's name, zeros to the end of the page.
struct Fixed {
  uint64_t magic;
  uint64_t checksum;  // of all that follows it
  uint64_t key[2];
  uint64_t parent[2];
  int64_t length;
  uint64_t block_checksum;
  int64_t expiry;  // nanoseconds of Unix time; INT64_MAX: never
  uint64_t generation;
  uint32_t pages;
  uint32_t tokens;
  uint32_t node_bytes;
  uint32_t tenant_bytes;
};
static_assert(sizeof(Fixed) == 96);
static_assert(sizeof(Fixed) + kMaxBlockTokens * sizeof(TokenId) + kMaxNodeName + kMaxTenantName <=
              kMaxBlockFileHeader);

size_t UsedBytes(const Fixed& fixed) {
  return sizeof fixed + fixed.tokens * sizeof(TokenId) + fixed.node_bytes + fixed.tenant_bytes;
}

uint64_t Checksum(absl::Span<const std::byte> header) {
  constexpr size_t kFrom = offsetof(Fixed, key);
  return XXH3_64bits(header.data() + kFrom, header.size() - kFrom);
}

absl::Status NoHeader(absl::string_view why) {
  return absl::DataLossError(absl::StrCat("no header of a block: ", why));
}

absl::StatusOr<Fixed> ReadFixed(absl::Span<const std::byte> page) {
  Fixed fixed;
  if (page.size() < kBlockFilePage) return NoHeader("it is too short");
  std::memcpy(&fixed, page.data(), sizeof fixed);
  if (fixed.magic != kMagic) return NoHeader("it begins with something else");
  if (fixed.tokens > kMaxBlockTokens || fixed.node_bytes == 0 || fixed.node_bytes > kMaxNodeName ||
      fixed.tenant_bytes == 0 || fixed.tenant_bytes > kMaxTenantName || fixed.length < 1 ||
      fixed.pages != (UsedBytes(fixed) + kBlockFilePage - 1) / kBlockFilePage) {
    return NoHeader("its numbers make no sense");
  }
  return fixed;
}

}  // namespace

std::string EncodeBlockFileHeader(const BlockFileHeader& header) {
  const BlockRecord& record = header.record;
  const BlockIdentity& id = record.id;
  assert(id.tokens.size() <= kMaxBlockTokens && record.length >= Bytes(1));
  assert(!header.node.empty() && header.node.size() <= kMaxNodeName);
  assert(!id.tenant.empty() && id.tenant.size() <= kMaxTenantName);
  Fixed fixed = {.magic = kMagic,
                 .checksum = 0,
                 .key = {id.key.high, id.key.low},
                 .parent = {id.parent.high, id.parent.low},
                 .length = record.length.count(),
                 .block_checksum = record.checksum,
                 .expiry = absl::ToUnixNanos(record.expiry),
                 .generation = header.generation,
                 .pages = 0,
                 .tokens = static_cast<uint32_t>(id.tokens.size()),
                 .node_bytes = static_cast<uint32_t>(header.node.size()),
                 .tenant_bytes = static_cast<uint32_t>(id.tenant.size())};
  fixed.pages = (UsedBytes(fixed) + kBlockFilePage - 1) / kBlockFilePage;
  std::string encoded(reinterpret_cast<const char*>(&fixed), sizeof fixed);
  if (!id.tokens.empty()) {
    encoded.append(reinterpret_cast<const char*>(id.tokens.data()),
                   id.tokens.size() * sizeof(TokenId));
  }
  absl::StrAppend(&encoded, header.node, id.tenant);
  encoded.resize(fixed.pages * kBlockFilePage);
  fixed.checksum = Checksum({reinterpret_cast<const std::byte*>(encoded.data()), encoded.size()});
  std::memcpy(encoded.data() + offsetof(Fixed, checksum), &fixed.checksum, sizeof fixed.checksum);
  return encoded;
}

absl::StatusOr<size_t> BlockFileHeaderSize(absl::Span<const std::byte> first_page) {
  absl::StatusOr<Fixed> fixed = ReadFixed(first_page);
  if (!fixed.ok()) return fixed.status();
  return fixed->pages * kBlockFilePage;
}

absl::StatusOr<BlockFileHeader> DecodeBlockFileHeader(absl::Span<const std::byte> header) {
  absl::StatusOr<Fixed> fixed = ReadFixed(header);
  if (!fixed.ok()) return fixed.status();
  if (header.size() != fixed->pages * kBlockFilePage) return NoHeader("it has another length");
  if (fixed->checksum != Checksum(header)) return NoHeader("its checksum is wrong");
  BlockFileHeader decoded;
  BlockIdentity& id = decoded.record.id;
  id.key = {fixed->key[0], fixed->key[1]};
  id.parent = {fixed->parent[0], fixed->parent[1]};
  id.tokens.resize(fixed->tokens);
  const std::byte* from = header.data() + sizeof *fixed;
  if (fixed->tokens > 0) std::memcpy(id.tokens.data(), from, fixed->tokens * sizeof(TokenId));
  from += fixed->tokens * sizeof(TokenId);
  decoded.node.assign(reinterpret_cast<const char*>(from), fixed->node_bytes);
  from += fixed->node_bytes;
  id.tenant.assign(reinterpret_cast<const char*>(from), fixed->tenant_bytes);
  decoded.record.length = Bytes(fixed->length);
  decoded.record.checksum = fixed->block_checksum;
  decoded.record.expiry =
      fixed->expiry == INT64_MAX ? absl::InfiniteFuture() : absl::FromUnixNanos(fixed->expiry);
  decoded.generation = fixed->generation;
  return decoded;
}

}  // namespace palimpsest
