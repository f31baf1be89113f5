// palimpsest-broker: the memory broker of a node.
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "CLI/CLI.hpp"
#include "broker/server/broker_config.h"
#include "broker/server/broker_server.h"
#include "common/log.h"
#include "common/yaml_config.h"

namespace palimpsest {
namespace {

// Beside this program where it is installed; in the build tree otherwise.
std::string DefaultPacker() {
  std::error_code error;
  const std::filesystem::path folder =
      std::filesystem::read_symlink("/proc/self/exe", error).parent_path();
  for (const char* name : {"palimpsest-packer", "packer"}) {
    if (std::filesystem::exists(folder / name, error)) return (folder / name).string();
  }
  return (folder / "../../worker/model/packer").lexically_normal().string();
}

constexpr char kHelp[] =
    "The memory broker of a node: owns its memory and grants slabs of it to workers (gRPC service\n"
    "palimpsest.v1.Broker on a Unix socket, health checks, reflection). Start it before the "
    "workers.\n"
    "SIGTERM or SIGINT ends it with status 0; workers go on with the memory they hold and return "
    "to\n"
    "its successor.\n"
    "Exit status: 0 ended cleanly, 1 could not start or go on, 2 wrong usage or configuration.";

int Fail(int code, const absl::Status& status) {
  std::fprintf(stderr, "palimpsest-broker: %s\n", std::string(status.message()).c_str());
  return code;
}

[[noreturn]] void Die(const absl::Status& status) {
  Log(LogLevel::kError, "the broker cannot go on", {{"error", status}});
  // Without unwinding: other threads still hold what destructors would take down.
  std::_Exit(EXIT_FAILURE);
}

int Run(const std::string& config_path, bool print_config) {
  absl::StatusOr<YamlConfig> yaml = YamlConfig::ReadFile(config_path);
  if (!yaml.ok()) return Fail(2, yaml.status());
  const absl::StatusOr<BrokerConfig> config = ReadBrokerConfig(*yaml, DefaultPacker());
  if (!config.ok()) return Fail(2, config.status());
  if (print_config) {
    std::fputs(yaml->EffectiveYaml().c_str(), stdout);
    return EXIT_SUCCESS;
  }
  InitLog("broker", config->log_level);
  // All threads inherit the mask, so that the signals wait for sigwait below.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  std::signal(SIGPIPE, SIG_IGN);

  absl::StatusOr<std::unique_ptr<BrokerServer>> server = BrokerServer::Start(*config, Die);
  if (!server.ok()) return Fail(1, server.status());
  Log(LogLevel::kInfo, "serving",
      {{"node", config->node},
       {"pool", config->pool_bytes},
       {"tenants", config->tenants.size()},
       {"control_socket", config->control_socket},
       {"metrics", (*server)->metrics_address()}});
  int signal = 0;
  sigwait(&signals, &signal);
  Log(LogLevel::kInfo, "shutting down", {{"signal", signal}});
  (*server)->Shutdown();
  return EXIT_SUCCESS;
}

}  // namespace
}  // namespace palimpsest

int main(int argc, char** argv) {
  std::string config;
  bool print_config = false;
  CLI::App app(palimpsest::kHelp, "palimpsest-broker");
  app.add_option("--config", config, "YAML configuration; deploy/local/broker.yaml is an example")
      ->type_name("FILE")
      ->required();
  app.add_flag("--print-config", print_config,
               "print the configuration, defaults included, and exit");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  return palimpsest::Run(config, print_config);
}
