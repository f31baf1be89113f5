// The soak of the block store (tools/soak).
#include <csignal>
#include <cstdint>
#include <string>

#include "CLI/CLI.hpp"
#include "absl/strings/str_format.h"
#include "broker/blocks/testing/soak.h"
#include "common/random.h"

namespace palimpsest {
namespace {

constexpr char kHelp[] =
    "Works on a broker with all of its tiers while everything goes wrong: processes are killed "
    "and\n"
    "stopped, media fail, fill, slow and lie, folders vanish, limits change. Compares every block\n"
    "that comes back, and after each phase every sum.\n"
    "Exit status: 0 if nothing was wrong, 1 with what was and where the logs are.";

int Run(const Soak::Options& options) {
  std::signal(SIGPIPE, SIG_IGN);
  absl::PrintF("seed %d\n", options.seed);
  Soak soak(options);
  const absl::Status status = soak.Run();
  if (status.ok()) return 0;
  absl::PrintF("%s\nlogs and media are in %s; again: tools/soak --seed %d --phase-seconds %g\n",
               status.ToString(), soak.Keep(), options.seed, absl::ToDoubleSeconds(options.phase));
  return 1;
}

}  // namespace
}  // namespace palimpsest

int main(int argc, char** argv) {
  palimpsest::Soak::Options options;
  options.seed = palimpsest::RandomSeed() >> 32;
  double minutes = 30;
  double phase = 3;
  CLI::App app(palimpsest::kHelp, "tools/soak");
  app.add_option("--minutes", minutes, "how long")->capture_default_str();
  app.add_option("--seed", options.seed, "of what happens; random by default");
  app.add_option("--phases", options.phases, "at most so many; 0: as many as there is time for")
      ->capture_default_str();
  app.add_option("--phase-seconds", phase, "of work in a phase, at most")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  options.time = absl::Minutes(minutes);
  options.phase = absl::Seconds(phase);
  return palimpsest::Run(options);
}
