#include "worker/model/fingerprint.h"

#include <fcntl.h>
#include <openssl/evp.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/fd.h"

namespace palimpsest {
namespace {

constexpr size_t kPiece = size_t{4} << 20;

// SHA-256 over values whose borders are part of what is hashed. OpenSSL's digest functions fail
// only for want of memory or of the algorithm, which Finish reports.
class FramedHash {
 public:
  FramedHash() : context_(EVP_MD_CTX_new()) {
    ok_ = context_ != nullptr && EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) == 1;
  }

  void Raw(const void* data, size_t size) {
    ok_ = ok_ && EVP_DigestUpdate(context_.get(), data, size) == 1;
  }
  void Number(uint64_t value) {
    unsigned char bytes[8];
    for (int i = 0; i < 8; ++i) bytes[i] = static_cast<unsigned char>(value >> (8 * i));
    Raw(bytes, sizeof(bytes));
  }
  void String(absl::string_view text) {
    Number(text.size());
    Raw(text.data(), text.size());
  }

  absl::StatusOr<std::string> Finish() {
    unsigned char digest[EVP_MAX_MD_SIZE];
    unsigned int size = 0;
    ok_ = ok_ && EVP_DigestFinal_ex(context_.get(), digest, &size) == 1;
    if (!ok_) return absl::InternalError("OpenSSL cannot compute SHA-256");
    return std::string(reinterpret_cast<char*>(digest), size);
  }

 private:
  struct Free {
    void operator()(EVP_MD_CTX* context) const { EVP_MD_CTX_free(context); }
  };
  std::unique_ptr<EVP_MD_CTX, Free> context_;
  bool ok_ = false;
};

struct SourceFile {
  std::string name;
  std::string path;
  UniqueFd fd;
  Bytes size;
};

absl::StatusOr<SourceFile> OpenSource(const std::string& folder, const std::string& name) {
  SourceFile file{.name = name, .path = absl::StrCat(folder, "/", name), .fd = {}, .size = {}};
  file.fd.Reset(::open(file.path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file.fd.valid()) return ErrnoStatus(absl::StrCat(file.path, ": cannot open"));
  struct stat info;
  if (::fstat(file.fd.get(), &info) != 0) return ErrnoStatus(file.path);
  if (!S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(file.path, ": expected a regular file"));
  }
  file.size = Bytes(info.st_size);
  return file;
}

// Names of the folder's weights, in the order in which they are hashed.
absl::StatusOr<std::vector<std::string>> WeightFiles(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (std::filesystem::directory_iterator it(folder, error), end; !error && it != end;
       it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (absl::EndsWith(name, ".safetensors")) names.push_back(name);
  }
  if (error) {
    return absl::Status(absl::ErrnoToStatusCode(error.value()),
                        absl::StrCat(folder, ": cannot list: ", error.message()));
  }
  if (names.empty()) {
    return absl::NotFoundError(absl::StrCat(folder, ": expected *.safetensors files, found none"));
  }
  std::sort(names.begin(), names.end());
  names.insert(names.begin(), "model.safetensors.index.json");
  return names;
}

// The files that an image depends on, in the order in which they are hashed.
absl::StatusOr<std::vector<SourceFile>> OpenSources(const std::string& folder, bool dummy) {
  std::vector<std::string> names = {"config.json", "generation_config.json"};
  if (!dummy) {
    auto weights = WeightFiles(folder);
    if (!weights.ok()) return weights.status();
    names.insert(names.end(), weights->begin(), weights->end());
  }
  std::vector<SourceFile> files;
  for (const std::string& name : names) {
    auto file = OpenSource(folder, name);
    if (file.ok()) {
      files.push_back(*std::move(file));
    } else if (!absl::IsNotFound(file.status()) || name == "config.json") {
      return file.status();
    }
  }
  return files;
}

}  // namespace

absl::StatusOr<std::string> FingerprintModel(
    const std::string& folder, const PackingSpec& spec,
    const std::function<void(Bytes done, Bytes total)>& progress) {
  auto files = OpenSources(folder, spec.dummy_seed.has_value());
  if (!files.ok()) return files.status();
  Bytes total;
  for (const SourceFile& file : *files) total += file.size;

  FramedHash hash;
  hash.String(spec.dummy_seed ? "palimpsest dummy image" : "palimpsest image");
  if (spec.dummy_seed) hash.Number(*spec.dummy_seed);
  hash.Number(spec.packing_version);
  hash.String(spec.dtype);
  hash.String(WeightFormatName(spec.format));
  hash.Number(static_cast<uint64_t>(spec.ranks));
  hash.Number(files->size());
  std::vector<char> piece(kPiece);
  Bytes done;
  for (const SourceFile& file : *files) {
    hash.String(file.name);
    hash.Number(static_cast<uint64_t>(file.size.count()));
    Bytes read;
    while (true) {
      const ssize_t got = ::pread(file.fd.get(), piece.data(), piece.size(), read.count());
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) return ErrnoStatus(absl::StrCat(file.path, ": cannot read"));
      if (got == 0) break;
      hash.Raw(piece.data(), static_cast<size_t>(got));
      read += Bytes(got);
      done += Bytes(got);
      if (read > file.size) break;
      if (progress) progress(done, total);
    }
    if (read != file.size) {
      return absl::AbortedError(absl::StrCat(
          file.path, ": changed size while it was read; try again once it is complete"));
    }
  }
  return hash.Finish();
}

}  // namespace palimpsest
