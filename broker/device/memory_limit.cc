#include "broker/device/memory_limit.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/file.h"

namespace palimpsest {
namespace {

constexpr Bytes kMaxFile = MiB(1);

// The number in a file; nothing for "max" and for files that are not there.
std::optional<Bytes> ReadNumber(const std::string& path) {
  absl::StatusOr<std::string> text = ReadFile(path, KiB(4));
  int64_t value;
  if (!text.ok() || !absl::SimpleAtoi(*text, &value) || value < 0) return std::nullopt;
  return Bytes(value);
}

// A field of /proc/meminfo or memory.stat; the former counts in kB.
std::optional<Bytes> ReadField(const std::string& path, absl::string_view name) {
  absl::StatusOr<std::string> text = ReadFile(path, kMaxFile);
  if (!text.ok()) return std::nullopt;
  for (absl::string_view line : absl::StrSplit(*text, '\n')) {
    const std::vector<absl::string_view> words =
        absl::StrSplit(line, absl::ByAnyChar(" :"), absl::SkipEmpty());
    int64_t value;
    if (words.size() < 2 || words[0] != name || !absl::SimpleAtoi(words[1], &value)) continue;
    return words.size() > 2 && words[2] == "kB" ? KiB(value) : Bytes(value);
  }
  return std::nullopt;
}

struct Group {
  std::string folder;  // where its hierarchy is mounted
  std::string path;    // inside the hierarchy
  std::string limit_file;
  std::string usage_file;
  std::string cache_field;  // of memory.stat: page cache that can be dropped
};

// The memory control groups of this process, as /proc/self/cgroup names them.
std::vector<Group> MemoryGroups(const std::string& root) {
  std::vector<Group> groups;
  absl::StatusOr<std::string> text = ReadFile(root + "/proc/self/cgroup", kMaxFile);
  if (!text.ok()) return groups;
  for (absl::string_view line : absl::StrSplit(*text, '\n')) {
    const std::vector<std::string> fields = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (fields.size() != 3) continue;
    const std::vector<std::string> controllers = absl::StrSplit(fields[1], ',');
    if (fields[1].empty()) {
      for (const char* mount : {"/sys/fs/cgroup", "/sys/fs/cgroup/unified"}) {
        groups.push_back(
            {root + mount, fields[2], "memory.max", "memory.current", "inactive_file"});
      }
    } else if (std::find(controllers.begin(), controllers.end(), "memory") != controllers.end()) {
      groups.push_back({root + "/sys/fs/cgroup/memory", fields[2], "memory.limit_in_bytes",
                        "memory.usage_in_bytes", "total_inactive_file"});
    }
  }
  return groups;
}

absl::Status CheckGroup(Bytes needed, const Group& group) {
  std::string path = group.path;
  // From a container the path may lead out of what is mounted ("/../.."); the mount itself is then
  // the container's group.
  if (absl::StrContains(path, "..")) path = "";
  while (true) {
    while (!path.empty() && path.back() == '/') path.pop_back();
    const std::string folder = group.folder + path;
    const std::string limit_path = absl::StrCat(folder, "/", group.limit_file);
    if (const std::optional<Bytes> limit = ReadNumber(limit_path); limit.has_value()) {
      const Bytes used = ReadNumber(absl::StrCat(folder, "/", group.usage_file)).value_or(Bytes(0));
      const Bytes cache = ReadField(folder + "/memory.stat", group.cache_field).value_or(Bytes(0));
      const Bytes busy = std::max(used - cache, Bytes(0));
      if (*limit - busy < needed) {
        return absl::ResourceExhaustedError(
            absl::StrCat(needed.ToString(), " are needed, but the control group's limit ",
                         limit_path, " is ", limit->ToString(), " and ", busy.ToString(),
                         " are in use; raise the limit (the container's memory limit) or make the "
                         "pool smaller"));
      }
    }
    if (path.empty()) return absl::OkStatus();
    path.resize(path.rfind('/'));
  }
}

}  // namespace

absl::Status CheckMemoryLimit(Bytes needed, const std::string& root) {
  const std::optional<Bytes> available = ReadField(root + "/proc/meminfo", "MemAvailable");
  if (available.has_value() && *available < needed) {
    return absl::ResourceExhaustedError(
        absl::StrCat(needed.ToString(), " are needed, but the machine has ", available->ToString(),
                     " available (MemAvailable of /proc/meminfo); make the pool smaller"));
  }
  for (const Group& group : MemoryGroups(root)) {
    if (absl::Status status = CheckGroup(needed, group); !status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace palimpsest
