// A memory control group of the kernel, for tests that run processes under a limit.
#ifndef PALIMPSEST_BROKER_SERVER_TESTING_MEMORY_GROUP_H_
#define PALIMPSEST_BROKER_SERVER_TESTING_MEMORY_GROUP_H_

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/bytes.h"
#include "common/fd.h"
#include "common/file.h"

namespace palimpsest {

// Removed on destruction, which every process must have left by then.
class MemoryGroup {
 public:
  // Below this process's group (version 1), or below the root (version 2, where a group that has
  // processes can have no others below it). An error where control groups cannot be written.
  static absl::StatusOr<MemoryGroup> Create(Bytes limit) {
    const std::string own = OwnGroupOfVersionOne();
    const bool one = !own.empty();
    std::string folder = one ? absl::StrCat("/sys/fs/cgroup/memory", own, "/palimpsest_XXXXXX")
                             : std::string("/sys/fs/cgroup/palimpsest_XXXXXX");
    if (!one) (void)Put("/sys/fs/cgroup/cgroup.subtree_control", "+memory");
    if (mkdtemp(folder.data()) == nullptr) {
      return ErrnoStatus(absl::StrCat("no control group can be made (", folder, ")"));
    }
    MemoryGroup group(folder, one ? "memory.usage_in_bytes" : "memory.current");
    const absl::Status limited =
        Put(absl::StrCat(folder, one ? "/memory.limit_in_bytes" : "/memory.max"),
            absl::StrCat(limit.count()));
    if (!limited.ok()) return limited;
    return group;
  }

  MemoryGroup(MemoryGroup&& other) noexcept
      : folder_(std::exchange(other.folder_, "")), usage_file_(std::move(other.usage_file_)) {}
  MemoryGroup& operator=(MemoryGroup&& other) noexcept {
    std::swap(folder_, other.folder_);
    std::swap(usage_file_, other.usage_file_);
    return *this;
  }
  ~MemoryGroup() {
    if (!folder_.empty()) rmdir(folder_.c_str());
  }

  absl::Status Enter(pid_t pid) const { return Put(folder_ + "/cgroup.procs", absl::StrCat(pid)); }
  // For a shell that enters the group.
  std::string EnterCommand() const {
    return absl::StrCat("echo $$ > ", folder_, "/cgroup.procs || exit 9; ");
  }
  Bytes Used() const {
    int64_t used = 0;
    const auto text = ReadFile(absl::StrCat(folder_, "/", usage_file_), KiB(4));
    return text.ok() && absl::SimpleAtoi(*text, &used) ? Bytes(used) : Bytes(0);
  }

 private:
  MemoryGroup(std::string folder, std::string usage_file)
      : folder_(std::move(folder)), usage_file_(std::move(usage_file)) {}

  static std::string OwnGroupOfVersionOne() {
    const std::string groups = ReadFile("/proc/self/cgroup", KiB(64)).value_or("");
    for (absl::string_view line : absl::StrSplit(groups, '\n')) {
      const std::vector<std::string> fields = absl::StrSplit(line, absl::MaxSplits(':', 2));
      if (fields.size() == 3 && fields[1] == "memory") return fields[2];
    }
    return "";
  }

  static absl::Status Put(const std::string& path, const std::string& text) {
    const UniqueFd file(open(path.c_str(), O_WRONLY | O_CLOEXEC));
    if (!file.valid() || write(file.get(), text.data(), text.size()) < 0) {
      return ErrnoStatus(absl::StrCat("write ", path));
    }
    return absl::OkStatus();
  }

  std::string folder_;
  std::string usage_file_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_SERVER_TESTING_MEMORY_GROUP_H_
