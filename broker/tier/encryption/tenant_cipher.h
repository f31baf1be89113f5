// What a tier below sees of a tenant's blocks, and back.
//
//   key       one AES block under a key of its own: a permutation, so names neither collide nor
//   tell
//             anything of tokens, and all nodes with the tenant's key make the same one
//   parent    zero
//   tokens    a mark, a nonce, a tag, and enciphered: length, parent, checksum and tokens. The
//   nonce
//             is a MAC of all that is sealed, so that the same record always looks the same: nobody
//             has to remember how a block was stored
//   tenant    as it is: it names the key, and a purge works without it
//   length    whole units of 4 KiB, with the nonce and tag of the block's bytes
//   checksum  zero
//   expiry    as it is
//   bytes     enciphered under a random nonce of 192 bits; key, parent, tokens, tenant, length and
//             checksum are bound to them
//
// So who reads the medium learns whose blocks lie there, how many, how large in units, of how many
// tokens and until when; who writes it can lose blocks, lengthen their life, or bring back what was
// once stored, but not make one of other bytes or under another identity.
//
// Pure. Thread-safe.
#ifndef PALIMPSEST_BROKER_TIER_ENCRYPTION_TENANT_CIPHER_H_
#define PALIMPSEST_BROKER_TIER_ENCRYPTION_TENANT_CIPHER_H_

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "broker/tier/block_record.h"
#include "broker/tier/encryption/aead.h"

namespace palimpsest {

class TenantCipher {
 public:
  // A sealed record's tokens, beside those of the block.
  static constexpr size_t kExtraTokens = 19;
  // Of a block that can be sealed.
  static constexpr size_t kMaxTokens = kMaxBlockTokens - kExtraTokens;

  explicit TenantCipher(const SecretKey& key);

  static Bytes SealedLength(Bytes length);

  BlockKey SealKey(const BlockKey& key) const;
  // The inverse.
  BlockKey OpenKey(const BlockKey& sealed) const;
  // Requires at most kMaxTokens tokens. The same for the same record, whatever its expiry is.
  BlockRecord SealRecord(const BlockRecord& record) const;
  // DataLoss unless SealRecord made it, with this key, for a tenant of the same name.
  absl::StatusOr<BlockRecord> OpenRecord(const BlockRecord& sealed) const;

  // `to` has SealedLength(record.length) bytes, `from` record.length.
  void SealBytes(const BlockRecord& record, absl::Span<const std::byte> from,
                 absl::Span<std::byte> to) const;
  // The inverse. DataLoss unless they are what SealBytes made for this record; `to` is zero then.
  absl::Status OpenBytes(const BlockRecord& record, absl::Span<const std::byte> from,
                         absl::Span<std::byte> to) const;

 private:
  const SecretKey names_;
  const SecretKey nonces_;
  const Aead records_;
  const Aead bytes_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_TIER_ENCRYPTION_TENANT_CIPHER_H_
