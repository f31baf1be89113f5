// Wears a block store out, phase by phase: random work of several tenants' workers, something that
// goes wrong meanwhile, then a look at every sum, at every block, and at times at what is left when
// everything was taken out.
//
// The seed decides the phases and what workers do; in which order the processes get to it is the
// machine's, so that a failure may need several runs to come again.
#ifndef PALIMPSEST_BROKER_BLOCKS_TESTING_SOAK_H_
#define PALIMPSEST_BROKER_BLOCKS_TESTING_SOAK_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "broker/blocks/testing/soak_node.h"
#include "broker/blocks/testing/soak_worker.h"

namespace palimpsest {

class Soak {
 public:
  struct Options {
    uint64_t seed = 1;
    // It ends after as many phases, or when this time is over; 0: no bound.
    uint64_t phases = 0;
    absl::Duration time;
    // How long workers work in a phase, at most.
    absl::Duration phase = absl::Seconds(3);
  };

  explicit Soak(const Options& options);

  // Prints what it does. The error says in which phase what was wrong.
  absl::Status Run();
  // After an error: leaves the node's folder behind. Where it is.
  const std::string& Keep();

 private:
  // One thing that goes wrong.
  struct Trouble {
    const char* name;
    // Begins it. It lasts until SoakNode::Heal.
    absl::Status (Soak::*begin)();
    // Several times while it lasts; may be null.
    absl::Status (Soak::*goes_on)();
    bool damages = false;
  };
  static const std::vector<Trouble>& Troubles();

  absl::Status Phase(const Trouble& trouble);
  absl::Status Work(const Trouble& trouble);
  absl::Status LookAtEverything();
  void Summarize() const;

  absl::Status Calm() { return absl::OkStatus(); }
  absl::Status Errors();
  absl::Status FullMedia();
  absl::Status Damage();
  absl::Status Slowness();
  absl::Status NoMemory();
  absl::Status FolderGone();
  absl::Status PeerGone();
  absl::Status Purges();
  absl::Status StandStill();
  absl::Status DamageFiles();
  absl::Status Limits();
  absl::Status StopSomebody();
  absl::Status KillAWorker();
  absl::Status KillTheBroker();

  absl::Status TellSome(const std::string& faults);
  uint64_t Below(uint64_t bound) { return random_() % bound; }

  const Options options_;
  std::mt19937_64 random_;
  SoakNode node_;
  std::vector<std::unique_ptr<SoakWorker>> workers_;
  SoakCounts counts_;
  uint64_t phases_ = 0;
  uint64_t brokers_killed_ = 0;
  uint64_t broker_killed_in_ = 0;  // phase
  uint64_t workers_killed_ = 0;
  uint64_t bytes_damaged_ = 0;
  uint64_t leak_checks_ = 0;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_BLOCKS_TESTING_SOAK_H_
