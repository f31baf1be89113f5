// One tenant's worker in a soak: a process that does random things with the block store and
// compares every block that it gets, and what starts it again when it or the broker was killed.
//
// Threads: Run is called by a thread of its own; Kill and Signal by another one meanwhile; the rest
// while Run does not run.
#ifndef PALIMPSEST_BROKER_BLOCKS_TESTING_SOAK_WORKER_H_
#define PALIMPSEST_BROKER_BLOCKS_TESTING_SOAK_WORKER_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "broker/blocks/testing/soak_node.h"
#include "broker/server/testing/worker_process.h"
#include "common/mutex.h"

namespace palimpsest {

// What was done, and what came of it. Misses are none of a soak's business; other bytes are.
struct SoakCounts {
  uint64_t operations = 0;
  uint64_t stored = 0;    // blocks
  uint64_t asked = 0;     // blocks
  uint64_t compared = 0;  // of them, those that came, each with its bytes
  uint64_t damaged = 0;   // in T1
  uint64_t restarts = 0;

  SoakCounts& operator+=(const SoakCounts& more);
};

class SoakWorker {
 public:
  static constexpr uint64_t kSequences = 48;

  SoakWorker(SoakNode& node, std::string tenant, uint64_t seed)
      : node_(node), tenant_(std::move(tenant)), random_(seed) {}

  // Kills it if it runs.
  absl::Status Start();
  // Works until `stop`, then ends what it has begun. `damages`: changes bytes of T1, too.
  absl::Status Run(const std::atomic<bool>& stop, bool damages);
  void Kill();
  void Signal(int signal);
  // Starts it again if it was killed, or its broker.
  absl::Status Refresh();

  // Asks for all of its sequences, and compares what comes.
  absl::Status ReadBack();
  // As ReadBack, when nothing may come.
  absl::Status ReadNothing();
  // That there is room for a new block, and that it can be had: nothing that happened is for good.
  absl::Status ProveRoom();
  const std::string& tenant() const { return tenant_; }
  SoakCounts TakeCounts() { return std::exchange(counts_, {}); }

 private:
  // How many blocks a sequence has.
  static uint32_t LengthOf(uint64_t sequence) {
    return 1 + static_cast<uint32_t>(sequence * 7 % 12);
  }
  // Unavailable if the process is gone, or the broker. A number, or 0.
  absl::StatusOr<uint64_t> Do(const std::string& command);
  absl::Status Step(bool damages);
  absl::Status Read(uint64_t sequence, uint64_t wait_ms);
  absl::Status HoldAndRead(uint64_t sequence, bool damages);
  absl::Status Write(uint64_t sequence);
  absl::Status Hint(uint64_t sequence);
  // Whether an error is what must happen when somebody was killed.
  bool Excused(const absl::Status& status) const;

  SoakNode& node_;
  const std::string tenant_;
  std::mt19937_64 random_;
  SoakCounts counts_;
  uint64_t last_request_ = 0;
  uint64_t last_proof_ = kSequences;
  uint64_t generation_ = 0;  // of the broker that it is attached to
  bool attached_ = false;
  std::atomic<bool> killed_ = false;
  Mutex mu_;  // for Kill and Signal, while it is exchanged
  std::unique_ptr<WorkerProcess> process_ ABSL_GUARDED_BY(mu_);
  WorkerProcess* mine_ = nullptr;  // the same
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_BLOCKS_TESTING_SOAK_WORKER_H_
