#include "broker/tier/encryption/tenant_cipher.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <vector>

#include "broker/tier/aligned_buffer.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

namespace palimpsest {
namespace {

// No token of a vocabulary is negative.
constexpr TokenId kMark = -0x50'4b'56'31;
constexpr Bytes kTrailer(Aead::kNonceBytes + Aead::kTagBytes);

// Before the tokens in what is sealed of a record.
struct Fixed {
  int64_t length;
  uint64_t parent[2];
  uint64_t checksum;
};
static_assert(sizeof(Fixed) % sizeof(TokenId) == 0);
static_assert((sizeof(kMark) + Aead::kNonceBytes + Aead::kTagBytes + sizeof(Fixed)) /
                  sizeof(TokenId) ==
              TenantCipher::kExtraTokens);

absl::Span<const std::byte> AsBytes(const std::string& text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

template <typename T>
void Append(std::string& out, const T& value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

std::string PlainRecord(const BlockRecord& record) {
  std::string plain;
  Append(plain, Fixed{.length = record.length.count(),
                      .parent = {record.id.parent.high, record.id.parent.low},
                      .checksum = record.checksum});
  if (!record.id.tokens.empty()) {
    plain.append(reinterpret_cast<const char*>(record.id.tokens.data()),
                 record.id.tokens.size() * sizeof(TokenId));
  }
  return plain;
}

// What a sealed record's place among others rests on.
std::string BoundToRecord(const BlockKey& sealed_key, Bytes sealed_length,
                          const std::string& tenant) {
  std::string bound;
  Append(bound, kMark);
  Append(bound, sealed_key);
  Append(bound, sealed_length.count());
  Append(bound, tenant.size());
  return bound + tenant;
}

std::string BoundToBytes(const BlockRecord& record) {
  std::string bound;
  Append(bound, record.id.key);
  Append(bound, record.id.tenant.size());
  return bound + record.id.tenant + PlainRecord(record);
}

Aes16 ToBytes(const BlockKey& key) {
  Aes16 bytes;
  std::memcpy(bytes.data(), &key, sizeof key);
  return bytes;
}

BlockKey ToKey(const Aes16& bytes) {
  BlockKey key;
  std::memcpy(&key, bytes.data(), sizeof key);
  return key;
}
static_assert(sizeof(BlockKey) == sizeof(Aes16));

absl::Status NotSealed() {
  return absl::DataLossError("what a tier has of a block was not sealed with its tenant's key");
}

}  // namespace

TenantCipher::TenantCipher(const SecretKey& key)
    : names_(key.Derive("palimpsest tier 1 names")),
      nonces_(key.Derive("palimpsest tier 1 nonces")),
      records_(key.Derive("palimpsest tier 1 records")),
      bytes_(key.Derive("palimpsest tier 1 bytes")) {}

Bytes TenantCipher::SealedLength(Bytes length) { return RoundUp(length + kTrailer, kIoUnit); }

BlockKey TenantCipher::SealKey(const BlockKey& key) const {
  return ToKey(EncipherBlock(names_, ToBytes(key)));
}

BlockKey TenantCipher::OpenKey(const BlockKey& sealed) const {
  return ToKey(DecipherBlock(names_, ToBytes(sealed)));
}

BlockRecord TenantCipher::SealRecord(const BlockRecord& record) const {
  assert(record.id.tokens.size() <= kMaxTokens);
  BlockRecord sealed = {.id = {.key = SealKey(record.id.key), .tenant = record.id.tenant},
                        .length = SealedLength(record.length),
                        .expiry = record.expiry};
  const std::string plain = PlainRecord(record);
  const std::string bound = BoundToRecord(sealed.id.key, sealed.length, record.id.tenant);
  const SecretKey mac = nonces_.Derive(bound + plain);
  Aead::Nonce nonce;
  std::copy_n(mac.data(), nonce.size(), nonce.begin());

  std::vector<TokenId>& out = sealed.id.tokens;
  out.resize(kExtraTokens + record.id.tokens.size());
  auto* to = reinterpret_cast<std::byte*>(out.data());
  std::byte* const text = to + sizeof kMark + sizeof nonce + Aead::kTagBytes;
  const Aead::Tag tag = records_.Seal(nonce, bound, AsBytes(plain), {text, plain.size()});
  std::memcpy(to, &kMark, sizeof kMark);
  std::memcpy(to + sizeof kMark, nonce.data(), sizeof nonce);
  std::memcpy(to + sizeof kMark + sizeof nonce, tag.data(), sizeof tag);
  return sealed;
}

absl::StatusOr<BlockRecord> TenantCipher::OpenRecord(const BlockRecord& sealed) const {
  const std::vector<TokenId>& in = sealed.id.tokens;
  if (in.size() < kExtraTokens || in[0] != kMark) return NotSealed();
  const auto* from = reinterpret_cast<const std::byte*>(in.data()) + sizeof kMark;
  Aead::Nonce nonce;
  Aead::Tag tag;
  std::memcpy(nonce.data(), from, sizeof nonce);
  std::memcpy(tag.data(), from + sizeof nonce, sizeof tag);
  from += sizeof nonce + sizeof tag;
  const size_t tokens = in.size() - kExtraTokens;
  std::string plain(sizeof(Fixed) + tokens * sizeof(TokenId), '\0');
  if (!records_.Open(nonce, tag, BoundToRecord(sealed.id.key, sealed.length, sealed.id.tenant),
                     {from, plain.size()},
                     {reinterpret_cast<std::byte*>(plain.data()), plain.size()})) {
    return NotSealed();
  }
  Fixed fixed;
  std::memcpy(&fixed, plain.data(), sizeof fixed);
  BlockRecord record = {.id = {.key = OpenKey(sealed.id.key),
                               .parent = {fixed.parent[0], fixed.parent[1]},
                               .tokens = std::vector<TokenId>(tokens),
                               .tenant = sealed.id.tenant},
                        .length = Bytes(fixed.length),
                        .checksum = fixed.checksum,
                        .expiry = sealed.expiry};
  if (tokens > 0) {
    std::memcpy(record.id.tokens.data(), plain.data() + sizeof fixed, tokens * sizeof(TokenId));
  }
  return record;
}

void TenantCipher::SealBytes(const BlockRecord& record, absl::Span<const std::byte> from,
                             absl::Span<std::byte> to) const {
  assert(from.size() == record.length.count());
  assert(to.size() == SealedLength(record.length).count());
  const Aead::Nonce nonce = Aead::RandomNonce();
  std::byte* const trailer = to.end() - kTrailer.count();
  const Aead::Tag tag = bytes_.Seal(nonce, BoundToBytes(record), from,
                                    {to.data(), static_cast<size_t>(trailer - to.data())});
  std::memcpy(trailer, nonce.data(), sizeof nonce);
  std::memcpy(trailer + sizeof nonce, tag.data(), sizeof tag);
}

absl::Status TenantCipher::OpenBytes(const BlockRecord& record, absl::Span<const std::byte> from,
                                     absl::Span<std::byte> to) const {
  assert(to.size() == record.length.count());
  assert(from.size() == SealedLength(record.length).count());
  const std::byte* const trailer = from.end() - kTrailer.count();
  Aead::Nonce nonce;
  Aead::Tag tag;
  std::memcpy(nonce.data(), trailer, sizeof nonce);
  std::memcpy(tag.data(), trailer + sizeof nonce, sizeof tag);
  const bool opened = bytes_.Open(nonce, tag, BoundToBytes(record),
                                  {from.data(), static_cast<size_t>(trailer - from.data())}, to);
  return opened ? absl::OkStatus() : NotSealed();
}

}  // namespace palimpsest
