// A folder of its own for a node that is measured: configurations, secrets, sockets and logs, and
// the programs that run in it, which are those that are shipped.
//
// Threads: const members are thread-safe. The folder is removed at the end; whoever started
// processes in it ends them before.
#ifndef PALIMPSEST_TOOLS_PALCTL_BENCH_FOLDER_H_
#define PALIMPSEST_TOOLS_PALCTL_BENCH_FOLDER_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/process.h"

namespace palimpsest::palctl {

// Where palctl finds the other programs: bin/ of a bundle, or bazel-bin.
std::string DefaultBinaries();

// A program that is shipped, and its package in the source tree.
struct BenchProgram {
  absl::string_view name;
  absl::string_view package;
};
inline constexpr BenchProgram kBrokerProgram = {"palimpsest-broker", "broker/server"};
inline constexpr BenchProgram kWorkerProgram = {"palimpsest-worker", "worker/server"};
inline constexpr BenchProgram kPackerProgram = {"packer", "worker/model"};

class BenchFolder {
 public:
  // In `parent` (empty: /tmp). `binaries` holds the programs, as DefaultBinaries says.
  // InvalidArgument for a parent whose path is too long.
  static absl::StatusOr<std::unique_ptr<BenchFolder>> Create(std::string binaries,
                                                             const std::string& parent = "");
  ~BenchFolder();
  BenchFolder(const BenchFolder&) = delete;
  BenchFolder& operator=(const BenchFolder&) = delete;

  // Short: a socket in it has a path that fits.
  const std::string& path() const { return path_; }

  // NotFound names a program that is not there.
  absl::StatusOr<std::string> Program(const BenchProgram& program) const;

  absl::Status Write(absl::string_view file, absl::string_view content) const;
  // A new secret in a file that nobody else can read; returns the secret.
  absl::StatusOr<std::string> WriteSecret(absl::string_view file) const;

  // Runs `program --config NAME.yaml` and `more` in the folder; the output is added to NAME.log.
  absl::StatusOr<ChildProcess> Spawn(absl::string_view name, const BenchProgram& program,
                                     const std::vector<std::string>& more = {}) const;

  // The ends of these processes' logs, each under its name.
  std::string LogEnds(const std::vector<std::string>& names) const;

 private:
  BenchFolder(std::string path, std::string binaries)
      : path_(std::move(path)), binaries_(std::move(binaries)) {}

  const std::string path_;
  const std::string binaries_;
};

}  // namespace palimpsest::palctl

#endif  // PALIMPSEST_TOOLS_PALCTL_BENCH_FOLDER_H_
