#include "common/secret_file.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "common/file.h"

namespace palimpsest {
namespace {

constexpr size_t kMaxSecrets = 8;

}  // namespace

absl::StatusOr<std::unique_ptr<SecretFile>> SecretFile::Open(const std::string& path) {
  std::unique_ptr<SecretFile> file(new SecretFile(path));
  if (absl::Status status = file->ReloadIfChanged(); !status.ok()) return status;
  file->file_.Watch();
  return file;
}

SecretFile::SecretFile(const std::string& path)
    : path_(path), file_(path, [this] { return Load(); }) {}

absl::Status SecretFile::Load() {
  const absl::StatusOr<std::string> text = ReadSecretFile(path_);
  if (!text.ok()) return text.status();
  auto secrets = std::make_shared<std::vector<std::string>>();
  for (absl::string_view line : absl::StrSplit(*text, '\n')) {
    secrets->emplace_back(absl::StripSuffix(line, "\r"));
    if (secrets->back().empty() || secrets->size() > kMaxSecrets) {
      return absl::InvalidArgumentError(
          absl::StrCat("the secret file ", path_, " has an empty line or more than ", kMaxSecrets,
                       " lines: expected one secret a line"));
    }
  }
  MutexLock lock(&mutex_);
  secrets_ = std::move(secrets);
  return absl::OkStatus();
}

std::shared_ptr<const std::vector<std::string>> SecretFile::secrets() const {
  MutexLock lock(&mutex_);
  return secrets_;
}

}  // namespace palimpsest
