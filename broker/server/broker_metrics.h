// The broker's metrics (common/metrics_table.h), by what happens rather than by name.
//
// Threads: thread-safe; nothing blocks.
#ifndef PALIMPSEST_BROKER_SERVER_BROKER_METRICS_H_
#define PALIMPSEST_BROKER_SERVER_BROKER_METRICS_H_

#include <cstdint>
#include <map>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "broker/core/arbiter.h"
#include "broker/device/slab_device.h"
#include "broker/server/descriptor_server.h"
#include "common/bytes.h"
#include "common/metrics.h"
#include "common/mutex.h"
#include "proto/palimpsest/v1/broker.pb.h"

namespace palimpsest {

enum class AttachOutcome { kAttached, kReattached, kRefused };

// "revoke", "grant", "restore", "scrub", "rotate".
absl::string_view TransferKindName(TransferKind kind);

class BrokerMetrics {
 public:
  explicit BrokerMetrics(Metrics& metrics) : metrics_(metrics) {}

  void Attached(AttachOutcome outcome);
  void Moved(const TransferFinished& transfer, const std::string& tenant);
  void TurnBegan(const SendTakeTurn& turn, const std::string& tenant);
  void KvPressure(const std::string& tenant);
  void ActivationRefused(const std::string& tenant);
  void RevokeDeadlineMissed(const std::string& tenant);
  void LinkMeasured(int gpu, const SlabDevice::Link& link);
  void ImagePhase(absl::string_view phase, absl::Duration duration);

  // Brings the gauges, and the counters that others keep, up to date.
  void Refresh(const v1::GetStatusResponse& status, const DescriptorServerStats& descriptors,
               size_t sessions);
  void ForeignBlocks(const std::string& tenant, const std::string& tier, uint64_t blocks);
  // What hints keep in T1.
  void RetainedBytes(const std::string& tenant, Bytes retained);
  void RefreshRemaps(const v1::GetRemapLogResponse& log);

 private:
  // What a worker has counted since its start.
  struct WorkerTotals {
    int32_t pid = 0;
    double stall_seconds = 0;
    double rotation_bytes = 0;
    double restored_bytes = 0;
    double block_bytes = 0;
  };

  // Adds what the tenant's workers have counted since the last call.
  void AddWorkerTotals(const v1::TenantMemory& tenant) ABSL_EXCLUSIVE_LOCKS_REQUIRED(refresh_mu_);
  // Advances a counter to `total`.
  static void AdvanceTo(prometheus::Counter& counter, double total);
  void RefreshTier(const v1::TierMemory& tier);
  void RefreshBlocks(const std::string& tier, const v1::TenantTier& tenant);

  Metrics& metrics_;
  Mutex refresh_mu_;
  std::map<std::string, WorkerTotals> workers_ ABSL_GUARDED_BY(refresh_mu_);
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_SERVER_BROKER_METRICS_H_
