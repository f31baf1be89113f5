// The inside of a TierStore. One thread (or whoever calls RunOnce) ends and begins everything; the
// others only enqueue. What runs outside the lock, in that thread, is collected under it (Actions).
#ifndef PALIMPSEST_BROKER_TIER_TIER_STORE_CORE_H_
#define PALIMPSEST_BROKER_TIER_TIER_STORE_CORE_H_

#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "broker/tier/circuit_breaker.h"
#include "broker/tier/foreign_catalog.h"
#include "broker/tier/tier_catalog.h"
#include "broker/tier/tier_store.h"
#include "broker/tier/transfer_meter.h"
#include "common/mutex.h"

namespace palimpsest {

class TierStore::Core {
 public:
  Core(const Options& options, std::unique_ptr<TierBackend> backend, const Clock& clock,
       Observer* observer);

  absl::Status Open();
  // False if the medium was not done with everything in time; then nothing here may be freed.
  bool Shutdown();

  absl::Status Load(TierLoad request, Done done);
  absl::Status Store(TierStoring request, Done done);
  bool Remove(const BlockKey& key);
  absl::Status Purge(const std::string& tenant, absl::Time deadline, Done done);
  bool Contains(const BlockIdentity& id) const;
  absl::Duration ExpectedLoad(Bytes length) const;
  std::vector<BlockRecord> Records() const;
  void SetCapacity(Bytes capacity);
  void SetTenantLimit(const std::string& tenant, Bytes limit);
  TierStatus status() const;
  TenantTierStatus tenant_status(const std::string& tenant) const;
  bool WaitUntilServing(absl::Duration timeout) const;
  absl::Time RunOnce();
  absl::Status CheckConsistency() const;

 private:
  using JobId = uint64_t;

  struct Job {
    enum class Kind { kLoad, kStore, kRemove, kPurge, kProbe, kDiscover };

    JobId id = 0;
    Kind kind = Kind::kLoad;
    // Null: a load of what another node may have stored, a purge, a probe, a look.
    TierCatalog::Entry* entry = nullptr;
    // Of the block that is moved; for a load without entry only the identity, until it was found.
    BlockRecord record;
    TierPlace place;
    bool found = false;
    PinnedBytes<std::byte> to;
    PinnedBytes<const std::byte> from;
    absl::Time deadline = absl::InfiniteFuture();
    Done done;  // null once whoever waits was released
    bool in_flight = false;
    absl::Time accepted_by_medium;  // in the order of starts, for stalls
    absl::Time began;
  };

  struct Completion {
    JobId job = 0;
    absl::Status status;
    std::optional<StoredBlock> found;
    Discovery discovery;
    TierPlace place;
    bool source_corrupt = false;
    absl::Time ended;
  };

  struct Event {
    enum class Kind { kStored, kForeign, kRemoved, kFreed };
    Kind kind;
    BlockRecord record;
    Bytes footprint;
  };

  struct Actions {
    std::vector<Job*> starts;
    std::vector<Event> events;
    std::vector<std::pair<Done, absl::Status>> answers;
    std::vector<std::unique_ptr<Job>> finished;
  };

  // A round trip of two scratch blocks, one after the other.
  struct Probe {
    enum class Step { kWrite, kRead, kRemove };
    std::vector<Bytes> sizes;  // still to come
    Step step = Step::kWrite;
    std::vector<std::byte> data;
    std::vector<std::byte> back;
    bool ok = true;
    // The breaker is closed, and this was measured.
    bool idle = false;
    TransferMeter loads;
    TransferMeter stores;
  };

  // InvalidArgument for a block that no tier takes.
  static absl::Status CheckRecord(const BlockRecord& record);

  // Admission, by whoever asks (tier_store_core.cc).
  absl::StatusOr<TierCatalog::Entry*> AdmitLoad(const TierLoad& request, absl::Time now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::StatusOr<TierCatalog::Entry*> AdmitStore(const TierStoring& request, absl::Time now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Job* AddJob(Job::Kind kind, absl::Time deadline, Done done) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Condemn(TierCatalog::Entry* entry, TierBackend::RemoveReason reason)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Wake() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // By the store's thread (tier_store_dispatch.cc).
  void RunThread();
  void Finish(Completion completion, Actions* actions) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void FinishFind(Job* job, Completion completion, Actions* actions)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void FinishLoad(Job* job, const Completion& completion, Actions* actions)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void FinishStore(Job* job, const Completion& completion, Actions* actions)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void FinishRemove(Job* job, const Completion& completion) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Judge(const absl::Status& status, absl::Duration elapsed, absl::Time now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Answer(Job* job, absl::Status status, Actions* actions) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // A job that has not begun, and whose waiter was answered.
  void DropQueued(Job* job, Actions* actions) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Retire(Job* job, Actions* actions) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void ReleaseLate(absl::Time now, Actions* actions) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void ReleaseAll(const absl::Status& status, Actions* actions) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void CancelCondemned(Actions* actions) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void LookForStalls(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Expire(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void StartDue(absl::Time now, Actions* actions) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool RoomForStores() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void MarkStarted(Job* job, absl::Time now, Actions* actions) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void StartFirst(absl::btree_set<JobId>* queue, absl::Time now, Actions* actions)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Time NextEvent(absl::Time now) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // The same, of probes: their one job changes from step to step (tier_store_probe.cc).
  void BeginProbe(absl::Time now, Actions* actions) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // When the next probe is due.
  absl::Time NextProbe() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void EndProbe(absl::Duration elapsed, absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void NextScratch(Job* job, absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void FinishProbeStep(Job* job, const Completion& completion, Actions* actions)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // Blocks of other nodes (tier_store_foreign.cc).
  // What a load is of: a block that is known, or, as far as anybody knows, none.
  absl::StatusOr<const StoredBlock*> AdmitForeign(const TierLoad& request, absl::Time now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Nothing if it is not known.
  void ForgetForeign(const BlockKey& key) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void ForgetForeignOf(const std::string& tenant) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool LooksForForeign() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void FinishDiscover(Completion completion, absl::Duration elapsed)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void TakeForeign(StoredBlock block, absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status CheckForeign() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // Outside the lock.
  void Perform(Actions actions);
  void Start(Job* job);
  void Complete(Completion completion);

  const Options options_;
  const std::unique_ptr<TierBackend> backend_;
  const Clock& clock_;
  Observer* const observer_;
  std::thread thread_;

  mutable Mutex mu_;
  mutable CondVar changed_;
  bool woken_ ABSL_GUARDED_BY(mu_) = false;
  bool closing_ ABSL_GUARDED_BY(mu_) = false;
  bool given_up_ ABSL_GUARDED_BY(mu_) = false;  // on operations that do not end, while closing
  TierCatalog catalog_ ABSL_GUARDED_BY(mu_);
  CircuitBreaker breaker_ ABSL_GUARDED_BY(mu_);
  TransferMeter loads_ ABSL_GUARDED_BY(mu_);
  TransferMeter stores_ ABSL_GUARDED_BY(mu_);
  // When they are measured if nothing is transferred until then, and how long after the last one.
  absl::Duration idle_for_ ABSL_GUARDED_BY(mu_) = options_.remeasure_after;
  absl::Time remeasure_at_ ABSL_GUARDED_BY(mu_) = absl::InfiniteFuture();
  TierCounters counters_ ABSL_GUARDED_BY(mu_);
  std::string last_failure_ ABSL_GUARDED_BY(mu_);

  JobId last_job_ ABSL_GUARDED_BY(mu_) = 0;
  absl::flat_hash_map<JobId, std::unique_ptr<Job>> jobs_ ABSL_GUARDED_BY(mu_);
  // Not yet begun, in the order in which they came.
  absl::btree_set<JobId> queued_loads_ ABSL_GUARDED_BY(mu_);
  absl::btree_set<JobId> queued_stores_ ABSL_GUARDED_BY(mu_);
  absl::btree_set<JobId> queued_purges_ ABSL_GUARDED_BY(mu_);
  // Of those who wait, and of what is under way and has not been found to stall.
  absl::btree_set<std::pair<absl::Time, JobId>> deadlines_ ABSL_GUARDED_BY(mu_);
  absl::btree_set<std::pair<absl::Time, JobId>> started_ ABSL_GUARDED_BY(mu_);
  int in_flight_ ABSL_GUARDED_BY(mu_) = 0;
  int stores_in_flight_ ABSL_GUARDED_BY(mu_) = 0;  // and removals
  bool condemned_while_queued_ ABSL_GUARDED_BY(mu_) = false;
  absl::Time next_store_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
  std::unique_ptr<Probe> probe_ ABSL_GUARDED_BY(mu_);
  // A scratch block that could not be removed: the next probe begins with it.
  std::optional<StoredBlock> leftover_ ABSL_GUARDED_BY(mu_);
  ForeignCatalog foreign_ ABSL_GUARDED_BY(mu_);
  bool looking_ ABSL_GUARDED_BY(mu_) = false;
  absl::Time next_look_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
  // Purges that the medium has not done, by tenant: what a look tells of it may be from before.
  absl::flat_hash_map<std::string, int> purging_ ABSL_GUARDED_BY(mu_);
  std::vector<Completion> completions_ ABSL_GUARDED_BY(mu_);
  std::vector<Event> events_ ABSL_GUARDED_BY(mu_);
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_TIER_TIER_STORE_CORE_H_
