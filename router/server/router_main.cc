// palimpsest-router: the front door of a Palimpsest cluster.
#include <signal.h>

#include <CLI/CLI.hpp>
#include <iostream>

#include "absl/strings/str_cat.h"
#include "common/clock.h"
#include "common/grpc_idle_channels.h"
#include "common/log.h"
#include "router/server/router_config.h"
#include "router/server/router_server.h"

namespace {

using palimpsest::Clock;
using palimpsest::Log;
using palimpsest::LogLevel;
using palimpsest::YamlConfig;

constexpr char kHelp[] =
    "The front door of a Palimpsest cluster: authenticates tenants, tokenises, picks a worker and\n"
    "streams text back (gRPC service palimpsest.v1.Router, health checks, reflection).\n"
    "SIGTERM or SIGINT stops new requests, lets running ones finish, and ends with status 0.\n"
    "Exit status: 0 ended cleanly, 1 could not start, 2 wrong usage or configuration.";

int Fail(int code, const absl::Status& status) {
  std::cerr << "palimpsest-router: " << status.message() << "\n";
  return code;
}

int Serve(const palimpsest::router::RouterConfig& config) {
  // Blocked before any thread starts, so that sigwait below is the only one to take them.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);

  palimpsest::WatchIdleChannels();
  palimpsest::InitLog("router", config.log_level);
  auto server = palimpsest::router::RouterServer::Start(config, Clock::Real());
  if (!server.ok()) return Fail(1, server.status());
  Log(LogLevel::kInfo, "serving",
      {{"port", (*server)->port()}, {"metrics", (*server)->metrics_address()}});
  int signal = 0;
  sigwait(&signals, &signal);
  Log(LogLevel::kInfo, "draining", {{"patience", config.drain_timeout}});
  (*server)->Drain(config.drain_timeout);
  server->reset();
  Log(LogLevel::kInfo, "ended");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app(kHelp, "palimpsest-router");
  std::string path;
  bool print_config = false;
  app.add_option("--config", path, "YAML configuration; deploy/local/router.yaml is an example")
      ->type_name("FILE")
      ->required();
  app.add_flag("--print-config", print_config,
               "print the configuration, defaults included, and exit");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  absl::StatusOr<YamlConfig> yaml = YamlConfig::ReadFile(path);
  if (!yaml.ok()) return Fail(2, yaml.status());
  const auto config = palimpsest::router::ReadRouterConfig(*yaml);
  if (!config.ok()) return Fail(2, config.status());
  if (print_config) {
    std::cout << yaml->EffectiveYaml();
    return 0;
  }
  return Serve(*config);
}
