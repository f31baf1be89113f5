// palimpsest-worker: serves one model for one tenant on memory that the node's broker grants.
#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "common/log.h"
#include "common/yaml_config.h"
#include "worker/server/supervisor.h"
#include "worker/server/worker_config.h"
#include "worker/server/worker_process.h"

namespace palimpsest {
namespace {

constexpr char kHelp[] =
    "A worker of a Palimpsest node: serves one model for one tenant (gRPC service\n"
    "palimpsest.v1.Worker, health checks, reflection) on memory that the broker grants.\n"
    "SIGTERM or SIGINT stops new requests, lets running ones finish within drain_timeout, gives "
    "the\n"
    "memory back and ends with status 0; a second signal cuts the wait short.\n"
    "Exit status: 0 ended cleanly, 1 could not start or go on, 2 wrong usage or configuration.";

constexpr absl::Duration kShortestLook = absl::Milliseconds(10);
constexpr absl::Duration kLongestLook = absl::Seconds(1);

int Fail(int code, const absl::Status& status) {
  std::cerr << "palimpsest-worker: " << status.message() << "\n";
  return code;
}

[[noreturn]] void Die(const absl::Status& status) {
  Log(LogLevel::kError, "the worker cannot go on", {{"error", status}});
  // Without unwinding: other threads still use what destructors would take down.
  std::_Exit(1);
}

// Blocked before any thread starts, so that only those who wait for them take them.
sigset_t BlockSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  signal(SIGPIPE, SIG_IGN);
  return signals;
}

int Supervise(const WorkerConfig& config, std::vector<std::string> command) {
  BlockSignals();
  InitLog("worker", config.log_level);
  const absl::Status status = Supervisor(config, std::move(command)).Run();
  return status.ok() ? 0 : Fail(1, status);
}

// The next signal within `patience`; 0: none. A supervised worker heeds those of its parent alone,
// which passes on what it gets: a terminal or a service manager may signal both.
int TakeSignal(const sigset_t& signals, absl::Duration patience, bool supervised) {
  const timespec timeout = absl::ToTimespec(patience);
  siginfo_t info;
  const int signal = sigtimedwait(&signals, &info, &timeout);
  return signal > 0 && (!supervised || info.si_pid == getppid()) ? signal : 0;
}

// Waits for a signal, or for the time to hibernate: 0.
int AwaitEnd(const WorkerProcess& process, const sigset_t& signals, bool supervised) {
  absl::Duration idle = process.hibernate_after();
  if (idle > absl::ZeroDuration() && !supervised) {
    Log(LogLevel::kWarning, "hibernate_after is ignored: set `supervise: true` in this file");
  }
  if (idle == absl::ZeroDuration() || !supervised) idle = absl::InfiniteDuration();
  const absl::Duration look = std::clamp(idle / 10, kShortestLook, kLongestLook);
  while (process.IdleFor() < idle) {
    if (const int signal = TakeSignal(signals, look, supervised); signal > 0) return signal;
  }
  return 0;
}

int Serve(const WorkerConfig& config, std::optional<SupervisedChild> supervised) {
  const sigset_t signals = BlockSignals();
  InitLog("worker", config.log_level);
  auto process = WorkerProcess::Start(
      config, Die,
      supervised.has_value() ? std::optional(supervised->listen_socket()) : std::nullopt);
  if (!process.ok()) return Fail(1, process.status());
  Log(LogLevel::kInfo, "serving",
      {{"tenant", config.tenant},
       {"model", config.model_name},
       {"address", (*process)->address()},
       {"metrics", (*process)->metrics_address()}});
  if (supervised.has_value()) supervised->SayReady();
  const int signal = AwaitEnd(**process, signals, supervised.has_value());
  if (signal == 0) {
    Log(LogLevel::kInfo, "hibernating", {{"idle_for", (*process)->IdleFor()}});
    supervised->SayHibernating((*process)->BeginHibernation());
    (*process)->EndForHibernation();
    process->reset();
    return 0;
  }
  Log(LogLevel::kInfo, "draining", {{"signal", signal}, {"patience", config.drain_timeout}});
  (*process)->Shutdown(
      [&] { return TakeSignal(signals, absl::ZeroDuration(), supervised.has_value()) > 0; });
  process->reset();
  Log(LogLevel::kInfo, "ended");
  return 0;
}

}  // namespace
}  // namespace palimpsest

int main(int argc, char** argv) {
  CLI::App app(palimpsest::kHelp, "palimpsest-worker");
  std::string path;
  bool print_config = false;
  int supervisor = 0;
  app.add_option("--config", path, "YAML configuration; deploy/local/alpha.yaml is an example")
      ->type_name("FILE")
      ->required();
  app.add_flag("--print-config", print_config,
               "print the configuration, defaults included, and exit");
  app.add_option("--supervised-by", supervisor, "process that started this one")->group("");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  auto yaml = palimpsest::YamlConfig::ReadFile(path);
  if (!yaml.ok()) return palimpsest::Fail(2, yaml.status());
  const auto config = palimpsest::ReadWorkerConfig(*yaml);
  if (!config.ok()) return palimpsest::Fail(2, config.status());
  if (print_config) {
    std::cout << yaml->EffectiveYaml();
    return 0;
  }
  if (supervisor != 0) {
    auto child = palimpsest::SupervisedChild::Adopt(supervisor);
    if (!child.ok()) return palimpsest::Fail(1, child.status());
    return palimpsest::Serve(*config, *std::move(child));
  }
  if (!config->supervise) return palimpsest::Serve(*config, std::nullopt);
  std::error_code error;
  const std::string self = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error) {
    return palimpsest::Fail(
        1, absl::InternalError("cannot read /proc/self/exe, which a supervisor starts again: " +
                               error.message()));
  }
  return palimpsest::Supervise(*config, {self, "--config", path, "--supervised-by"});
}
