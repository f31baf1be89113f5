#include "broker/tier/encryption/aead.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>

#include <algorithm>
#include <cassert>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "common/random.h"

namespace palimpsest {
namespace {

// EVP counts in int.
constexpr size_t kPiece = size_t{1} << 30;

// With right arguments OpenSSL fails only for want of memory or of the algorithm.
void Require(bool ok) {
  if (ok) return;
  std::fputs("libcrypto refuses AES-256-GCM or HMAC-SHA256\n", stderr);
  std::abort();
}

struct Free {
  void operator()(EVP_CIPHER_CTX* context) const { EVP_CIPHER_CTX_free(context); }
};
using Context = std::unique_ptr<EVP_CIPHER_CTX, Free>;

// Looking an algorithm up takes longer than a small message.
const EVP_CIPHER* Gcm() {
  static const EVP_CIPHER* const cipher = EVP_CIPHER_fetch(nullptr, "AES-256-GCM", nullptr);
  return cipher;
}
const EVP_CIPHER* Ecb() {
  static const EVP_CIPHER* const cipher = EVP_CIPHER_fetch(nullptr, "AES-256-ECB", nullptr);
  return cipher;
}

Context Begin(const EVP_CIPHER* cipher, const uint8_t* key, const uint8_t* nonce, bool encipher) {
  Context context(EVP_CIPHER_CTX_new());
  Require(context != nullptr && cipher != nullptr &&
          EVP_CipherInit_ex2(context.get(), cipher, key, nonce, encipher ? 1 : 0, nullptr) == 1);
  return context;
}

const uint8_t* Raw(const std::byte* bytes) { return reinterpret_cast<const uint8_t*>(bytes); }
uint8_t* Raw(std::byte* bytes) { return reinterpret_cast<uint8_t*>(bytes); }

void Update(const Context& context, uint8_t* to, const uint8_t* from, size_t size) {
  for (size_t at = 0; at < size; at += kPiece) {
    const size_t piece = std::min(kPiece, size - at);
    int written = 0;
    Require(EVP_CipherUpdate(context.get(), to == nullptr ? nullptr : to + at, &written, from + at,
                             static_cast<int>(piece)) == 1);
  }
}

void Bind(const Context& context, absl::string_view bound) {
  Update(context, nullptr, reinterpret_cast<const uint8_t*>(bound.data()), bound.size());
}

Aes16 OneBlock(const SecretKey& key, const Aes16& block, bool encipher) {
  const Context context = Begin(Ecb(), key.data(), nullptr, encipher);
  Aes16 out;
  EVP_CIPHER_CTX_set_padding(context.get(), 0);
  Update(context, out.data(), block.data(), block.size());
  return out;
}

template <size_t kSize>
std::array<uint8_t, kSize> RandomBytes() {
  static_assert(kSize <= kTokenBytes);
  const Token random = Token::Random();
  std::array<uint8_t, kSize> bytes;
  std::memcpy(bytes.data(), random.bytes().data(), kSize);
  return bytes;
}

}  // namespace

SecretKey::~SecretKey() { OPENSSL_cleanse(bytes_.data(), bytes_.size()); }

SecretKey SecretKey::Random() {
  SecretKey key;
  key.bytes_ = RandomBytes<kSecretKeyBytes>();
  return key;
}

SecretKey SecretKey::Derive(absl::string_view label) const {
  SecretKey derived;
  unsigned int size = 0;
  Require(HMAC(EVP_sha256(), bytes_.data(), kSecretKeyBytes,
               reinterpret_cast<const uint8_t*>(label.data()), label.size(), derived.bytes_.data(),
               &size) != nullptr &&
          size == kSecretKeyBytes);
  return derived;
}

Aes16 EncipherBlock(const SecretKey& key, const Aes16& block) { return OneBlock(key, block, true); }
Aes16 DecipherBlock(const SecretKey& key, const Aes16& block) {
  return OneBlock(key, block, false);
}

Aead::Aead(const SecretKey& key) : key_(key) {
  const Aes16 zero = EncipherBlock(key_, {});
  for (size_t i = 0; i < zero.size(); ++i) {
    const uint8_t next = i + 1 < zero.size() ? zero[i + 1] : 0;
    mask_[i] = static_cast<uint8_t>(zero[i] << 1 | next >> 7);
  }
  if ((zero[0] & 0x80) != 0) mask_.back() ^= 0x87;
}

Aead::Nonce Aead::RandomNonce() { return RandomBytes<kNonceBytes>(); }

SecretKey Aead::KeyOf(const Nonce& nonce) const {
  SecretKey derived;
  for (uint8_t half = 0; half < 2; ++half) {
    Aes16 message = {0, static_cast<uint8_t>(half + 1), 'X', 0};
    std::copy_n(nonce.begin(), 12, message.begin() + 4);
    for (size_t i = 0; i < message.size(); ++i) message[i] ^= mask_[i];
    const Aes16 part = EncipherBlock(key_, message);
    std::copy(part.begin(), part.end(), derived.data() + half * part.size());
  }
  return derived;
}

Aead::Tag Aead::Seal(const Nonce& nonce, absl::string_view bound, absl::Span<const std::byte> plain,
                     absl::Span<std::byte> sealed) const {
  assert(sealed.size() >= plain.size());
  const Context context = Begin(Gcm(), KeyOf(nonce).data(), nonce.data() + 12, true);
  Bind(context, bound);
  Update(context, Raw(sealed.data()), Raw(plain.data()), plain.size());
  const absl::Span<std::byte> rest = sealed.subspan(plain.size());
  std::fill(rest.begin(), rest.end(), std::byte{0});
  Update(context, Raw(rest.data()), Raw(rest.data()), rest.size());
  Tag tag;
  int written = 0;
  Require(EVP_CipherFinal_ex(context.get(), tag.data(), &written) == 1 &&
          EVP_CIPHER_CTX_ctrl(context.get(), EVP_CTRL_AEAD_GET_TAG, kTagBytes, tag.data()) == 1);
  return tag;
}

bool Aead::Open(const Nonce& nonce, const Tag& tag, absl::string_view bound,
                absl::Span<const std::byte> sealed, absl::Span<std::byte> plain) const {
  assert(plain.size() <= sealed.size());
  const Context context = Begin(Gcm(), KeyOf(nonce).data(), nonce.data() + 12, false);
  Bind(context, bound);
  Update(context, Raw(plain.data()), Raw(sealed.data()), plain.size());
  std::array<uint8_t, 4096> padding;
  for (absl::Span<const std::byte> rest = sealed.subspan(plain.size()); !rest.empty();) {
    const size_t piece = std::min(rest.size(), padding.size());
    Update(context, padding.data(), Raw(rest.data()), piece);
    rest.remove_prefix(piece);
  }
  Tag expected = tag;
  Require(EVP_CIPHER_CTX_ctrl(context.get(), EVP_CTRL_AEAD_SET_TAG, kTagBytes, expected.data()) ==
          1);
  int written = 0;
  if (EVP_CipherFinal_ex(context.get(), padding.data(), &written) == 1) return true;
  std::fill(plain.begin(), plain.end(), std::byte{0});
  return false;
}

}  // namespace palimpsest
