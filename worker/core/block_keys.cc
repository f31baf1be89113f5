#include "worker/core/block_keys.h"

#include <openssl/evp.h>

#include <cstring>
#include <memory>
#include <string>

#include "worker/core/check.h"

namespace palimpsest {
namespace {

// What a hash costs here is mostly what OpenSSL does around it: finding the algorithm, and making
// a context. Both are kept.
class Sha256 {
 public:
  Sha256() : algorithm_(EVP_MD_fetch(nullptr, "SHA256", nullptr)), context_(EVP_MD_CTX_new()) {
    PALIMPSEST_CHECK(algorithm_ != nullptr && context_ != nullptr);
  }
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;
  ~Sha256() {
    EVP_MD_CTX_free(context_);
    EVP_MD_free(algorithm_);
  }

  void Begin() { PALIMPSEST_CHECK(EVP_DigestInit_ex2(context_, algorithm_, nullptr) == 1); }
  void Add(const void* data, size_t size) {
    PALIMPSEST_CHECK(EVP_DigestUpdate(context_, data, size) == 1);
  }
  BlockKey End() {
    unsigned char digest[32];
    PALIMPSEST_CHECK(EVP_DigestFinal_ex(context_, digest, nullptr) == 1);
    BlockKey key;
    std::memcpy(&key.high, digest, sizeof key.high);
    std::memcpy(&key.low, digest + sizeof key.high, sizeof key.low);
    return key;
  }

 private:
  EVP_MD* const algorithm_;
  EVP_MD_CTX* const context_;
};

Sha256& ThreadSha256() {
  thread_local Sha256 hash;
  return hash;
}

}  // namespace

BlockKey ChainKey(const BlockKey& parent, absl::Span<const TokenId> tokens) {
  Sha256& hash = ThreadSha256();
  hash.Begin();
  hash.Add(&parent, sizeof parent);
  hash.Add(tokens.data(), tokens.size() * sizeof(TokenId));
  return hash.End();
}

BlockKey RootKey(const BlockKeyRoot& root) {
  Sha256& hash = ThreadSha256();
  hash.Begin();
  for (const absl::string_view part : {root.salt, root.fingerprint, root.kv_dtype, root.layout}) {
    const uint64_t size = part.size();
    hash.Add(&size, sizeof size);
    hash.Add(part.data(), part.size());
  }
  hash.Add(&root.block_tokens, sizeof root.block_tokens);
  return hash.End();
}

}  // namespace palimpsest
