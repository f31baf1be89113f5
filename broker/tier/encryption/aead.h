// Authenticated encryption with nonces of 192 bits, so that random ones are never the same:
// XAES-256-GCM (https://c2sp.org/XAES-256-GCM). The first half of the nonce and the key make a key
// of their own (SP 800-108 with CMAC), under which the second half is the nonce of AES-256-GCM.
//
// Thread-safe.
#ifndef PALIMPSEST_BROKER_TIER_ENCRYPTION_AEAD_H_
#define PALIMPSEST_BROKER_TIER_ENCRYPTION_AEAD_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace palimpsest {

inline constexpr size_t kSecretKeyBytes = 32;

// Secret bytes, overwritten when they are given up. Printing one is a leak.
class SecretKey {
 public:
  SecretKey() = default;  // all zero
  SecretKey(const SecretKey&) = default;
  SecretKey& operator=(const SecretKey&) = default;
  ~SecretKey();

  static SecretKey Random();
  // HMAC-SHA256 of `label`: a key for one use.
  SecretKey Derive(absl::string_view label) const;

  uint8_t* data() { return bytes_.data(); }
  const uint8_t* data() const { return bytes_.data(); }

 private:
  std::array<uint8_t, kSecretKeyBytes> bytes_{};
};

using Aes16 = std::array<uint8_t, 16>;

// One block of AES-256, enciphered and deciphered: a permutation of 128 bits.
Aes16 EncipherBlock(const SecretKey& key, const Aes16& block);
Aes16 DecipherBlock(const SecretKey& key, const Aes16& block);

class Aead {
 public:
  static constexpr size_t kNonceBytes = 24;
  static constexpr size_t kTagBytes = 16;
  using Nonce = std::array<uint8_t, kNonceBytes>;
  using Tag = std::array<uint8_t, kTagBytes>;

  explicit Aead(const SecretKey& key);

  static Nonce RandomNonce();

  // Enciphers `plain`, and zeros behind it until `sealed` is full. `bound` is authenticated with
  // it. A nonce must never be used for two different messages. Requires sealed.size() >=
  // plain.size().
  Tag Seal(const Nonce& nonce, absl::string_view bound, absl::Span<const std::byte> plain,
           absl::Span<std::byte> sealed) const;

  // Fills `plain` with the beginning of what was sealed. False if not exactly that is given; then
  // `plain` is zero. Requires plain.size() <= sealed.size().
  bool Open(const Nonce& nonce, const Tag& tag, absl::string_view bound,
            absl::Span<const std::byte> sealed, absl::Span<std::byte> plain) const;

 private:
  SecretKey KeyOf(const Nonce& nonce) const;

  const SecretKey key_;
  Aes16 mask_;  // K1 of CMAC
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_TIER_ENCRYPTION_AEAD_H_
