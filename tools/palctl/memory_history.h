// What a node's memory did during a measurement, from the broker's answers at intervals.
#ifndef PALIMPSEST_TOOLS_PALCTL_MEMORY_HISTORY_H_
#define PALIMPSEST_TOOLS_PALCTL_MEMORY_HISTORY_H_

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/mutex.h"
#include "proto/palimpsest/v1/broker.pb.h"

namespace palimpsest::palctl {

// Pure; not thread-safe.
class MemoryHistory {
 public:
  // Names of tenants.
  explicit MemoryHistory(std::vector<std::string> tenants);

  // The first answer is what counters are compared with.
  void Add(absl::Duration now, const v1::GetStatusResponse& status);

  // {"slab_bytes", "seconds": [...], "free": [...], "tenants": [{"name", "parameter": [...], "kv",
  // "slot", "workspace", "freed_layers", "mean_freed_layers", "most_freed_layers",
  // "most_missing_bytes", "stall_seconds", "rotation_bytes", "restored_bytes", "restores",
  // "reversions"}]}. Lists have one number for each answer: slabs, and layers without memory of
  // their own less those whose room slots take. Missing: parameters without slabs, whether their
  // layers rotate or wait for the model to be asked. Reversions: memory that went back to
  // parameters by itself.
  nlohmann::ordered_json ToJson() const;

 private:
  struct Counters {
    double stall_seconds = 0;
    uint64_t rotation_bytes = 0;
  };
  struct Series {
    std::vector<uint32_t> parameter, kv, slot, workspace, freed_layers;
    int64_t most_missing = 0;  // slabs
    Counters first, last;
    uint64_t restored_bytes = 0;
    int64_t restores = 0, reversions = 0;
  };

  void AddTransfers(const v1::GetStatusResponse& status);

  const std::vector<std::string> tenants_;
  std::vector<Series> series_;
  std::vector<double> seconds_;
  std::vector<uint32_t> free_;
  uint64_t slab_bytes_ = 0;
  double seen_until_ = 0;  // finished_at of the last transfer that was counted
};

// Asks at intervals from a thread of its own, from construction until Stop.
class MemorySampler {
 public:
  using Ask = std::function<absl::StatusOr<v1::GetStatusResponse>()>;

  // `ask` is called from the thread; what it fails at is left out.
  MemorySampler(std::vector<std::string> tenants, absl::Duration interval, Ask ask);
  ~MemorySampler();
  MemorySampler(const MemorySampler&) = delete;
  MemorySampler& operator=(const MemorySampler&) = delete;

  // Asks once more and ends the thread. Once.
  MemoryHistory Stop();

 private:
  void Sample();
  void Run();

  const absl::Duration interval_;
  const Ask ask_;
  const absl::Time start_;
  Mutex mu_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  MemoryHistory history_;  // of the thread while it runs
  std::thread thread_;
};

}  // namespace palimpsest::palctl

#endif  // PALIMPSEST_TOOLS_PALCTL_MEMORY_HISTORY_H_
