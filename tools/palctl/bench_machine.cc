#include "tools/palctl/bench_machine.h"

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <filesystem>
#include <system_error>
#include <thread>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/fd.h"
#include "common/file.h"
#include "common/process.h"

namespace palimpsest::palctl {
namespace {

using Json = nlohmann::ordered_json;
namespace fs = std::filesystem;

constexpr absl::Duration kLongestLook = absl::Seconds(20);
constexpr Bytes kLongestText = MiB(4);

// The first line that a program says; empty if it cannot.
std::string Said(const std::vector<std::string>& command) {
  std::string path = "/tmp/palimpsest-said.XXXXXX";
  const UniqueFd out(mkostemp(path.data(), O_CLOEXEC));
  const auto remove = absl::MakeCleanup([&path] { unlink(path.c_str()); });
  SpawnOptions options;
  options.argv = {"/usr/bin/env"};
  options.argv.insert(options.argv.end(), command.begin(), command.end());
  for (char** variable = environ; *variable != nullptr; ++variable) {
    options.environment.push_back(*variable);
  }
  options.output = out.get();
  auto process = ChildProcess::Spawn(options);
  if (!process.ok() || !process->Wait(kLongestLook).ok()) return "";
  const std::string text = ReadFile(path, kLongestText).value_or("");
  return text.substr(0, text.find('\n'));
}

}  // namespace

std::string BenchCommit() {
  std::error_code error;
  const fs::path self = fs::read_symlink("/proc/self/exe", error).parent_path();
  const auto packed = ReadFile((self.parent_path() / "COMMIT").string(), kLongestText);
  if (packed.ok()) return std::string(absl::StripSuffix(*packed, "\n"));
  return Said({"git", "describe", "--always", "--abbrev=40", "--dirty=+changes"});
}

std::string BenchDate() {
  return absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", absl::Now(), absl::UTCTimeZone());
}

Json BenchHardware(const std::vector<int>& gpus) {
  std::string cpu = "unknown";
  // Files of /proc have no length that could be known beforehand.
  const std::string model = Said({"grep", "-m1", "model name", "/proc/cpuinfo"});
  if (const size_t colon = model.find(": "); colon != std::string::npos) {
    cpu = model.substr(colon + 2);
  }
  Json hardware = {{"cpu", cpu}, {"cpus", std::thread::hardware_concurrency()}};
  if (!gpus.empty()) {
    hardware["gpu"] = Said({"nvidia-smi", "--query-gpu=name", "--format=csv,noheader"});
    hardware["driver"] =
        Said({"nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"});
    hardware["gpus"] = gpus;
  }
  return hardware;
}

}  // namespace palimpsest::palctl
