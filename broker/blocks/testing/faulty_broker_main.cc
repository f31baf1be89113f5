// A broker whose tiers and memory go wrong as it is told (common/testing/command_loop.h): all of it
// is what runs elsewhere, but for what stands below the stores of its tiers (FaultyBackend) and for
// who gives T1 its memory.
//
//   faults TIER NAME=SHARE ...   of TierFaults, the others being none; delay_ms=N
//   hold TIER read|written       FaultInjector::Hold
//   held TIER                    how many stand still
//   go-on TIER
//   memory given|refused         for chunks of T1
//   check                        everything that it keeps in sums, recounted
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <map>
#include <string>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "broker/device/host_memory.h"
#include "broker/server/broker_config.h"
#include "broker/server/broker_server.h"
#include "broker/tier/faulty_backend.h"
#include "common/log.h"
#include "common/testing/command_loop.h"
#include "common/yaml_config.h"

namespace palimpsest {
namespace {

absl::StatusOr<TierFaults> ReadFaults(const Command& command) {
  static const std::map<std::string, double TierFaults::*> shares = {
      {"failed_reads", &TierFaults::failed_reads},
      {"failed_writes", &TierFaults::failed_writes},
      {"full_writes", &TierFaults::full_writes},
      {"damaged_reads", &TierFaults::damaged_reads},
      {"damaged_writes", &TierFaults::damaged_writes},
      {"torn_writes", &TierFaults::torn_writes},
      {"late", &TierFaults::late},
  };
  TierFaults faults;
  for (size_t i = 2; i < command.words().size(); ++i) {
    const std::pair<std::string, std::string> said = absl::StrSplit(command.word(i), '=');
    double value = 0;
    if (!absl::SimpleAtod(said.second, &value)) return absl::InvalidArgumentError(command.word(i));
    if (said.first == "delay_ms") {
      faults.delay = absl::Milliseconds(value);
    } else if (const auto share = shares.find(said.first); share != shares.end()) {
      faults.*share->second = value;
    } else {
      return absl::InvalidArgumentError(command.word(i));
    }
  }
  return faults;
}

class FaultyBroker {
 public:
  explicit FaultyBroker(uint64_t seed) : seed_(seed) {}

  absl::Status Start(const std::string& config_path) {
    absl::StatusOr<YamlConfig> yaml = YamlConfig::ReadFile(config_path);
    if (!yaml.ok()) return yaml.status();
    const absl::StatusOr<BrokerConfig> config = ReadBrokerConfig(*yaml, "");
    if (!config.ok()) return config.status();
    InitLog("broker", config->log_level);
    BrokerServer::BlockSeams seams;
    seams.chunk_maker = [this](Bytes size) -> absl::StatusOr<UniqueFd> {
      if (no_memory_) return absl::ResourceExhaustedError("no memory (injected)");
      return NewHostMemory("palimpsest-chunk", size, HostPages::kSmall);
    };
    seams.tier_wrapper = [this](const std::string& tier, std::unique_ptr<TierBackend> medium) {
      FaultInjector& faults = tiers_.try_emplace(tier, seed_ + tiers_.size()).first->second;
      return std::make_unique<FaultyBackend>(std::move(medium), faults);
    };
    auto server = BrokerServer::Start(
        *config,
        [](const absl::Status& status) {
          Log(LogLevel::kError, "the broker cannot go on", {{"error", status}});
          _exit(EXIT_FAILURE);
        },
        OpenCudaPool, std::move(seams));
    if (!server.ok()) return server.status();
    server_ = *std::move(server);
    return absl::OkStatus();
  }

  CommandAnswer Obey(const Command& command) {
    if (command.name() == "check") return AnswerOf(Check());
    if (command.name() == "memory") return no_memory_ = command.word(1) == "refused", "";
    const auto tier = tiers_.find(command.word(1));
    if (tier == tiers_.end()) return absl::NotFoundError(command.word(1));
    FaultInjector& faults = tier->second;
    if (command.name() == "held") return absl::StrCat(faults.held());
    if (command.name() == "go-on") return faults.GoOn(), "";
    if (command.name() == "hold") {
      faults.Hold(command.word(2) == "read" ? FaultInjector::Stage::kRead
                                            : FaultInjector::Stage::kWritten);
      return "";
    }
    if (command.name() != "faults") return absl::UnimplementedError(command.name());
    const absl::StatusOr<TierFaults> read = ReadFaults(command);
    if (!read.ok()) return read.status();
    faults.Set(*read);
    return "";
  }

 private:
  absl::Status Check() {
    if (absl::Status slabs = server_->broker().CheckConsistency(); !slabs.ok()) return slabs;
    return server_->blocks() == nullptr ? absl::OkStatus() : server_->blocks()->CheckConsistency();
  }

  const uint64_t seed_;
  std::atomic<bool> no_memory_ = false;
  std::map<std::string, FaultInjector> tiers_;
  std::unique_ptr<BrokerServer> server_;
};

int Run(const std::string& config, uint64_t seed) {
  std::signal(SIGPIPE, SIG_IGN);
  FaultyBroker broker(seed);
  if (const absl::Status started = broker.Start(config); !started.ok()) {
    std::fprintf(stderr, "faulty_broker: %s\n", std::string(started.message()).c_str());
    return EXIT_FAILURE;
  }
  ObeyCommands([&broker](const Command& command) { return broker.Obey(command); });
  // Without destructors: it was started to be killed.
  _exit(EXIT_SUCCESS);
}

}  // namespace
}  // namespace palimpsest

// CONFIG [SEED]: what decides by lot which operations go wrong.
int main(int argc, char** argv) {
  uint64_t seed = 1;
  if (argc < 2 || argc > 3 || (argc == 3 && !absl::SimpleAtoi(argv[2], &seed))) {
    std::fprintf(stderr, "faulty_broker CONFIG [SEED]\n");
    return 2;
  }
  return palimpsest::Run(argv[1], seed);
}
