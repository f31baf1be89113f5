#include "tools/palctl/bench_folder.h"

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <system_error>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "common/fd.h"
#include "common/file.h"
#include "common/random.h"

namespace palimpsest::palctl {
namespace {

namespace fs = std::filesystem;

constexpr Bytes kLongestLog = MiB(64);
constexpr size_t kLogLines = 12;
constexpr size_t kLongestParent = 32;

}  // namespace

std::string DefaultBinaries() {
  std::error_code error;
  const fs::path self = fs::read_symlink("/proc/self/exe", error).parent_path();
  const bool packed = fs::exists(self / "palimpsest-worker", error);
  return (packed ? self : self.parent_path().parent_path()).string();
}

absl::StatusOr<std::unique_ptr<BenchFolder>> BenchFolder::Create(std::string binaries,
                                                                 const std::string& parent) {
  std::error_code error;
  const std::string in = parent.empty() ? "/tmp" : fs::absolute(parent, error).string();
  // Paths of sockets have at most 107 characters.
  if (in.size() > kLongestParent) {
    return absl::InvalidArgumentError(absl::StrCat(
        in, " is too long for sockets in it: expected at most ", kLongestParent, " characters"));
  }
  std::string path = absl::StrCat(in, "/palimpsest-bench.XXXXXX");
  if (mkdtemp(path.data()) == nullptr) {
    return ErrnoStatus(absl::StrCat("cannot make a folder in ", in));
  }
  return std::unique_ptr<BenchFolder>(new BenchFolder(std::move(path), std::move(binaries)));
}

BenchFolder::~BenchFolder() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

absl::StatusOr<std::string> BenchFolder::Program(const BenchProgram& program) const {
  std::error_code error;
  for (const std::string& path :
       {absl::StrCat(binaries_, "/", program.name),
        absl::StrCat(binaries_, "/", program.package, "/", program.name)}) {
    if (fs::exists(path, error)) return fs::absolute(path).string();
  }
  return absl::NotFoundError(absl::StrCat("no ", program.name, " in ", binaries_, " or its ",
                                          program.package,
                                          ": build it, or give --binaries (bazel-bin, or bin/ of "
                                          "a folder that tools/bundle made)"));
}

absl::Status BenchFolder::Write(absl::string_view file, absl::string_view content) const {
  return WriteFileAtomically(absl::StrCat(path_, "/", file), content);
}

absl::StatusOr<std::string> BenchFolder::WriteSecret(absl::string_view file) const {
  std::string secret = absl::BytesToHexString(Token::Random().bytes());
  absl::Status status = WriteFileAtomically(absl::StrCat(path_, "/", file), secret, 0600);
  if (!status.ok()) return status;
  return secret;
}

absl::StatusOr<ChildProcess> BenchFolder::Spawn(absl::string_view name, const BenchProgram& program,
                                                const std::vector<std::string>& more) const {
  const auto path = Program(program);
  if (!path.ok()) return path.status();
  const UniqueFd log(open(absl::StrCat(path_, "/", name, ".log").c_str(),
                          O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
  SpawnOptions options;
  options.argv = {"/usr/bin/env", "-C", path_, *path, "--config", absl::StrCat(name, ".yaml")};
  std::copy(more.begin(), more.end(), std::back_inserter(options.argv));
  for (char** variable = environ; *variable != nullptr; ++variable) {
    options.environment.push_back(*variable);
  }
  options.output = log.get();
  return ChildProcess::Spawn(options);
}

std::string BenchFolder::LogEnds(const std::vector<std::string>& names) const {
  std::string text;
  for (const std::string& name : names) {
    const auto log = ReadFile(absl::StrCat(path_, "/", name, ".log"), kLongestLog);
    if (!log.ok()) continue;
    std::vector<absl::string_view> lines = absl::StrSplit(*log, '\n', absl::SkipEmpty());
    const size_t first = lines.size() - std::min(lines.size(), kLogLines);
    absl::StrAppend(&text, "--- ", name, ":\n",
                    absl::StrJoin(lines.begin() + static_cast<ptrdiff_t>(first), lines.end(), "\n"),
                    "\n");
  }
  return text;
}

}  // namespace palimpsest::palctl
