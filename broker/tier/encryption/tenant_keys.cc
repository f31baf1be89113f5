#include "broker/tier/encryption/tenant_keys.h"

#include <fcntl.h>
#include <openssl/crypto.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/fd.h"

namespace palimpsest {
namespace {

absl::Status Refuse(const std::string& path, absl::string_view why) {
  return absl::FailedPreconditionError(absl::StrCat("the key ", path, " ", why));
}

absl::Status CheckOwner(const std::string& path, const struct stat& entry) {
  if (!S_ISREG(entry.st_mode)) return Refuse(path, "is not a regular file");
  if (entry.st_uid != 0 && entry.st_uid != ::geteuid()) {
    return Refuse(path, absl::StrCat("belongs to user ", entry.st_uid, ", expected root or user ",
                                     ::geteuid()));
  }
  if ((entry.st_mode & 0177) != 0) {
    return Refuse(path, absl::StrFormat("has mode %04o, expected 0600 or 0400; run: chmod 600 %s",
                                        entry.st_mode & 07777, path));
  }
  return absl::OkStatus();
}

absl::StatusOr<SecretKey> ReadKey(const std::string& path) {
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (!file.valid()) {
    return Refuse(
        path, absl::StrCat("cannot be opened: ", ErrnoStatus("").message(),
                           "; a tenant whose blocks are enciphered needs one of ", kSecretKeyBytes,
                           " random bytes, made by: (umask 77; openssl "
                           "rand ",
                           kSecretKeyBytes, " > ", path, ")"));
  }
  struct stat entry;
  if (::fstat(file.get(), &entry) != 0) {
    return Refuse(path, absl::StrCat("cannot be examined: ", ErrnoStatus("").message()));
  }
  if (absl::Status status = CheckOwner(path, entry); !status.ok()) return status;
  std::array<uint8_t, kSecretKeyBytes + 1> bytes;
  const ssize_t got = ::pread(file.get(), bytes.data(), bytes.size(), 0);
  SecretKey key;
  std::copy_n(bytes.begin(), kSecretKeyBytes, key.data());
  OPENSSL_cleanse(bytes.data(), bytes.size());
  if (got < 0) return Refuse(path, absl::StrCat("cannot be read: ", ErrnoStatus("").message()));
  if (static_cast<size_t>(got) != kSecretKeyBytes) {
    return Refuse(path, absl::StrCat("has ", entry.st_size, " bytes, expected ", kSecretKeyBytes));
  }
  return key;
}

}  // namespace

absl::StatusOr<TenantKeys> TenantKeys::Load(const std::string& folder,
                                            const std::vector<std::string>& tenants) {
  TenantKeys keys;
  keys.folder_ = folder;
  for (const std::string& tenant : tenants) {
    if (tenant.empty() || tenant.size() > kMaxTenantName || tenant[0] == '.' ||
        absl::StrContains(tenant, '/') || absl::StrContains(tenant, '\0')) {
      return absl::InvalidArgumentError(absl::StrCat(
          "a tenant whose blocks are enciphered has the name '", tenant, "'; expected ", "1 to ",
          kMaxTenantName, " bytes that name a file, without '/', not hidden"));
    }
    absl::StatusOr<SecretKey> key = ReadKey(absl::StrCat(folder, "/", tenant, ".key"));
    if (!key.ok()) return key.status();
    keys.ciphers_[tenant] = std::make_unique<TenantCipher>(*key);
  }
  return keys;
}

const TenantCipher* TenantKeys::Find(const std::string& tenant) const {
  const auto found = ciphers_.find(tenant);
  return found == ciphers_.end() ? nullptr : found->second.get();
}

}  // namespace palimpsest
