// palimpsest-worker: serves one model for one tenant on memory that the node's broker grants.
#include <signal.h>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <iostream>
#include <string>

#include "common/log.h"
#include "common/yaml_config.h"
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

int Fail(int code, const absl::Status& status) {
  std::cerr << "palimpsest-worker: " << status.message() << "\n";
  return code;
}

[[noreturn]] void Die(const absl::Status& status) {
  Log(LogLevel::kError, "the worker cannot go on", {{"error", status}});
  // Without unwinding: other threads still use what destructors would take down.
  std::_Exit(1);
}

int Serve(const WorkerConfig& config) {
  // Blocked before any thread starts, so that only the waits below take them.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  signal(SIGPIPE, SIG_IGN);

  InitLog("worker", config.log_level);
  auto process = WorkerProcess::Start(config, Die);
  if (!process.ok()) return Fail(1, process.status());
  Log(LogLevel::kInfo, "serving",
      {{"tenant", config.tenant},
       {"model", config.model_name},
       {"address", (*process)->address()},
       {"metrics", (*process)->metrics_address()}});
  int signal = 0;
  sigwait(&signals, &signal);
  Log(LogLevel::kInfo, "draining", {{"signal", signal}, {"patience", config.drain_timeout}});
  (*process)->Shutdown([&] {
    const timespec now = {};
    return sigtimedwait(&signals, nullptr, &now) > 0;
  });
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
  app.add_option("--config", path, "YAML configuration; deploy/local/alpha.yaml is an example")
      ->type_name("FILE")
      ->required();
  app.add_flag("--print-config", print_config,
               "print the configuration, defaults included, and exit");
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
  return palimpsest::Serve(*config);
}
