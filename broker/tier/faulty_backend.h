// A tier's back-end over a real one, below which a test lets things go wrong while the tier works:
// errors, full media, damaged and torn blocks, completions that come late or not at all.
//
// Whether an operation goes wrong is drawn by lot, of numbers that a seed gives. What comes late
// has been done by the medium before; what fails has not been begun.
#ifndef PALIMPSEST_BROKER_TIER_FAULTY_BACKEND_H_
#define PALIMPSEST_BROKER_TIER_FAULTY_BACKEND_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/time/time.h"
#include "broker/tier/tier_backend.h"
#include "common/mutex.h"

namespace palimpsest {

// Shares of operations, from 0 to 1.
struct TierFaults {
  double failed_reads = 0;    // the medium reports an error
  double failed_writes = 0;   // writes, removals and purges
  double full_writes = 0;     // it says that it has no room
  double damaged_reads = 0;   // one byte comes wrong
  double damaged_writes = 0;  // one byte is stored wrong
  double torn_writes = 0;     // the second half is not stored
  double late = 0;            // reads and writes end `delay` later
  absl::Duration delay;
};

// What goes wrong in one tier. Thread-safe; outlives the tier.
class FaultInjector {
 public:
  using Report = absl::AnyInvocable<void()>;
  // What a test can make stand still: an operation that the medium has done, and not reported.
  enum class Stage { kRead, kWritten };

  explicit FaultInjector(uint64_t seed) : random_(seed) {}
  // Reports what waits.
  ~FaultInjector();
  FaultInjector(const FaultInjector&) = delete;
  FaultInjector& operator=(const FaultInjector&) = delete;

  void Set(const TierFaults& faults);
  // From now on what gets to the stage stands still there, but for probes.
  void Hold(Stage stage);
  size_t held() const;
  // What stands still or is late is reported now, and nothing stands still from now on.
  void GoOn();

 private:
  friend class FaultyBackend;

  bool Happens(double TierFaults::*share);
  // Reports now, later or when GoOn is called.
  void Deliver(Stage stage, bool probe, Report report);
  size_t Below(size_t bound);
  void RunThread();

  mutable Mutex mu_;
  CondVar changed_;
  bool ending_ ABSL_GUARDED_BY(mu_) = false;
  TierFaults faults_ ABSL_GUARDED_BY(mu_);
  std::mt19937_64 random_ ABSL_GUARDED_BY(mu_);
  std::map<Stage, bool> holds_ ABSL_GUARDED_BY(mu_);
  std::vector<Report> held_ ABSL_GUARDED_BY(mu_);
  std::multimap<absl::Time, Report> late_ ABSL_GUARDED_BY(mu_);
  std::thread reporter_{[this] { RunThread(); }};
};

class FaultyBackend : public TierBackend {
 public:
  FaultyBackend(std::unique_ptr<TierBackend> medium, FaultInjector& faults)
      : medium_(std::move(medium)), faults_(faults) {}

  std::string name() const override { return medium_->name(); }
  Bytes Footprint(Bytes length) const override { return medium_->Footprint(length); }
  absl::StatusOr<std::vector<StoredBlock>> Open() override { return medium_->Open(); }
  void Close() override { medium_->Close(); }
  void Write(const BlockRecord& record, absl::Span<const std::byte> from, Written done) override;
  void Read(const BlockRecord& record, TierPlace place, absl::Span<std::byte> to,
            Done done) override;
  void Remove(const BlockRecord& record, TierPlace place, RemoveReason reason, Done done) override;
  void Purge(const std::string& tenant, Done done) override;
  bool shared() const override { return medium_->shared(); }
  void Find(const BlockIdentity& id, Found done) override;
  void Discover(Discovered done) override;

 private:
  const std::unique_ptr<TierBackend> medium_;
  FaultInjector& faults_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_TIER_FAULTY_BACKEND_H_
