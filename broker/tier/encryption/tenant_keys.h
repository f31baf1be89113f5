// The keys of tenants whose blocks are kept enciphered: one file each, FOLDER/<tenant>.key, of 32
// random bytes (`openssl rand 32`), the same on all nodes that share a tier, with mode 0600 or
// less.
//
// Losing a key loses the blocks, which is a miss each; deleting one is a way to forget them all.
// Immutable, hence thread-safe.
#ifndef PALIMPSEST_BROKER_TIER_ENCRYPTION_TENANT_KEYS_H_
#define PALIMPSEST_BROKER_TIER_ENCRYPTION_TENANT_KEYS_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "broker/tier/encryption/tenant_cipher.h"

namespace palimpsest {

class TenantKeys {
 public:
  // Reads the keys of these tenants. FailedPrecondition if one is missing, is not of 32 bytes, or
  // could be read by others than this user: each tenant that is served must have one.
  static absl::StatusOr<TenantKeys> Load(const std::string& folder,
                                         const std::vector<std::string>& tenants);

  // Null if the tenant has no key. Valid as long as the keys are.
  const TenantCipher* Find(const std::string& tenant) const;

  const std::string& folder() const { return folder_; }

 private:
  std::string folder_;
  absl::flat_hash_map<std::string, std::unique_ptr<TenantCipher>> ciphers_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_TIER_ENCRYPTION_TENANT_KEYS_H_
