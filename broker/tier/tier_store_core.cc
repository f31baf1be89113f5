#include "broker/tier/tier_store_core.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace palimpsest {
namespace {

constexpr size_t kMaxQueuedPurges = 1024;

absl::Status QueueFull(absl::string_view what, size_t limit) {
  return absl::ResourceExhaustedError(absl::StrCat(limit, " ", what, " wait already"));
}

absl::Status Broken(const std::string& last_failure) {
  return absl::UnavailableError(
      absl::StrCat("the tier is left alone",
                   last_failure.empty() ? " until its first probe" : " since " + last_failure));
}

}  // namespace

absl::Status TierStore::Core::CheckRecord(const BlockRecord& record) {
  if (record.length >= Bytes(1) && record.id.tokens.size() <= kMaxBlockTokens &&
      !record.id.tenant.empty() && record.id.tenant.size() <= kMaxTenantName &&
      record.id.tenant != kProbeTenant) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "a block of ", record.length.count(), " bytes, ", record.id.tokens.size(),
      " tokens and a tenant's name of ", record.id.tenant.size(), " bytes; expected 1 or more, ",
      kMaxBlockTokens, " or fewer and 1 to ", kMaxTenantName, ", other than ", kProbeTenant));
}

absl::Status TierStore::Options::Validate() const {
  if (capacity < Bytes(0) || max_in_flight < 1 || max_stores_in_flight < 1 ||
      max_stores_in_flight > max_in_flight || max_queued_loads < 1 || max_queued_stores < 1 ||
      store_bytes_per_second < Bytes(0) || longest_life <= absl::ZeroDuration() ||
      probe_bytes < KiB(4) || probe_bytes > GiB(1) || foreign_period <= absl::ZeroDuration() ||
      remeasure_after <= absl::ZeroDuration() || drain < absl::ZeroDuration() ||
      drain == absl::InfiniteDuration()) {
    return absl::InvalidArgumentError(
        "a tier's store expects a capacity and a pace of at least 0, at least one operation in "
        "flight of which at least one and at most all are stores, queues for at least one, a life "
        "above 0, probes of 4 KiB to 1 GiB, pauses between looks and "
        "measurements above 0 and a finite drain");
  }
  return breaker.Validate();
}

TierStore::Core::Core(const Options& options, std::unique_ptr<TierBackend> backend,
                      const Clock& clock, Observer* observer)
    : options_(options),
      backend_(std::move(backend)),
      clock_(clock),
      observer_(observer),
      catalog_(options.capacity),
      breaker_(options.breaker, clock.Now()),
      foreign_(options.foreign_blocks) {}

absl::Status TierStore::Core::Open() {
  absl::StatusOr<std::vector<StoredBlock>> blocks = backend_->Open();
  if (!blocks.ok()) return blocks.status();
  const absl::Time longest = clock_.Now() + options_.longest_life;
  MutexLock lock(&mu_);
  for (StoredBlock& block : *blocks) {
    const Bytes footprint = backend_->Footprint(block.record.length);
    // A clock that was set back must not make blocks live longer.
    block.record.expiry = std::min(block.record.expiry, longest);
    absl::StatusOr<TierCatalog::Entry*> entry = catalog_.Adopt(block, footprint);
    if (!entry.ok()) {
      catalog_.AddQuarantined(footprint);
    } else if (!CheckRecord(block.record).ok()) {
      catalog_.Condemn(*entry, TierBackend::RemoveReason::kUnwanted);
    }
  }
  if (options_.own_thread) thread_ = std::thread([this] { RunThread(); });
  return absl::OkStatus();
}

void TierStore::Core::Wake() {
  woken_ = true;
  changed_.SignalAll();
}

TierStore::Core::Job* TierStore::Core::AddJob(Job::Kind kind, absl::Time deadline, Done done) {
  auto job = std::make_unique<Job>();
  job->id = ++last_job_;
  job->kind = kind;
  job->deadline = deadline;
  job->done = std::move(done);
  if (job->done) deadlines_.insert({deadline, job->id});
  Job* const added = job.get();
  jobs_.emplace(added->id, std::move(job));
  Wake();
  return added;
}

void TierStore::Core::Condemn(TierCatalog::Entry* entry, TierBackend::RemoveReason reason) {
  if (catalog_.Condemn(entry, reason)) {
    events_.push_back({Event::Kind::kRemoved, entry->record, entry->footprint});
  } else if (entry->state == TierCatalog::State::kWriting) {
    condemned_while_queued_ = true;
  }
  Wake();
}

absl::StatusOr<TierCatalog::Entry*> TierStore::Core::AdmitLoad(const TierLoad& request,
                                                               absl::Time now) {
  TierCounters::Misses& misses = counters_.misses;
  if (closing_) {
    ++misses.cancelled;
    return absl::CancelledError("the store is being closed");
  }
  if (!breaker_.allows()) {
    ++misses.broken;
    return Broken(last_failure_);
  }
  TierCatalog::Entry* const entry = catalog_.Find(request.id.key);
  const auto length = Bytes(static_cast<int64_t>(request.to.bytes.size()));
  if (entry == nullptr || entry->state != TierCatalog::State::kReady) {
    // What is purged may still lie on a medium that others share.
    if (entry != nullptr || !backend_->shared() || purging_.contains(request.id.tenant)) {
      ++misses.absent;
      return absl::NotFoundError("no such block");
    }
  } else if (entry->record.id != request.id) {
    ++misses.collided;
    return absl::NotFoundError("another block has the same key");
  } else if (entry->record.expiry <= now) {
    ++misses.expired;
    Condemn(entry, TierBackend::RemoveReason::kUnwanted);
    return absl::NotFoundError("the block has expired");
  } else if (entry->record.length != length) {
    ++misses.refused;
    return absl::InvalidArgumentError(absl::StrCat(
        "room for ", length.count(), " bytes for a block of ", entry->record.length.count()));
  }
  if (request.deadline <= now) {
    ++misses.late;
    return absl::DeadlineExceededError("the deadline was over before the load was asked for");
  }
  if (queued_loads_.size() >= options_.max_queued_loads) {
    ++misses.refused;
    return QueueFull("loads", options_.max_queued_loads);
  }
  return entry;
}

absl::Status TierStore::Core::Load(TierLoad request, Done done) {
  const absl::Time now = clock_.Now();
  MutexLock lock(&mu_);
  absl::StatusOr<TierCatalog::Entry*> entry = AdmitLoad(request, now);
  if (!entry.ok()) return entry.status();
  const StoredBlock* foreign = nullptr;
  if (*entry == nullptr) {
    absl::StatusOr<const StoredBlock*> known = AdmitForeign(request, now);
    if (!known.ok()) return known.status();
    foreign = *known;
  }
  Job* const job = AddJob(Job::Kind::kLoad, request.deadline, std::move(done));
  job->entry = *entry;
  if (job->entry != nullptr) {
    catalog_.BeginLoad(job->entry);
    job->record = job->entry->record;
    job->place = job->entry->place;
    job->found = true;
  } else if (foreign != nullptr) {
    job->record = foreign->record;
    job->place = foreign->place;
    job->found = true;
    foreign_.Touch(job->record.id.key);
  } else {
    job->record.id = std::move(request.id);
  }
  job->to = std::move(request.to);
  queued_loads_.insert(job->id);
  return absl::OkStatus();
}

absl::StatusOr<TierCatalog::Entry*> TierStore::Core::AdmitStore(const TierStoring& request,
                                                                absl::Time now) {
  TierCounters::Unstored& unstored = counters_.unstored;
  if (closing_) {
    ++unstored.cancelled;
    return absl::CancelledError("the store is being closed");
  }
  absl::Status valid = CheckRecord(request.record);
  if (valid.ok() && request.from.bytes.size() != request.record.length.count()) {
    valid = absl::InvalidArgumentError(absl::StrCat(
        request.from.bytes.size(), " bytes given for a block of ", request.record.length.count()));
  }
  if (!valid.ok()) {
    ++unstored.refused;
    return valid;
  }
  if (!breaker_.allows()) {
    ++unstored.broken;
    return Broken(last_failure_);
  }
  if (request.deadline <= now || request.record.expiry <= now) {
    ++unstored.late;
    return absl::DeadlineExceededError(
        "the deadline, or the block's life, was over before it "
        "could be stored");
  }
  if (queued_stores_.size() >= options_.max_queued_stores) {
    ++unstored.refused;
    return QueueFull("stores", options_.max_queued_stores);
  }
  absl::StatusOr<TierCatalog::Entry*> entry =
      catalog_.Add(request.record, backend_->Footprint(request.record.length));
  if (!entry.ok()) ++(absl::IsAlreadyExists(entry.status()) ? unstored.duplicate : unstored.full);
  return entry;
}

absl::Status TierStore::Core::Store(TierStoring request, Done done) {
  const absl::Time now = clock_.Now();
  MutexLock lock(&mu_);
  request.record.expiry = std::min(request.record.expiry, now + options_.longest_life);
  absl::StatusOr<TierCatalog::Entry*> entry = AdmitStore(request, now);
  if (!entry.ok()) return entry.status();
  Job* const job = AddJob(Job::Kind::kStore, request.deadline, std::move(done));
  job->entry = *entry;
  job->record = std::move(request.record);
  job->from = std::move(request.from);
  queued_stores_.insert(job->id);
  return absl::OkStatus();
}

bool TierStore::Core::Remove(const BlockKey& key) {
  MutexLock lock(&mu_);
  TierCatalog::Entry* const entry = catalog_.Find(key);
  if (entry == nullptr || entry->condemned) return false;
  Condemn(entry, TierBackend::RemoveReason::kUnwanted);
  return true;
}

absl::Status TierStore::Core::Purge(const std::string& tenant, absl::Time deadline, Done done) {
  MutexLock lock(&mu_);
  if (closing_) return absl::CancelledError("the store is being closed");
  if (queued_purges_.size() >= kMaxQueuedPurges) return QueueFull("purges", kMaxQueuedPurges);
  for (TierCatalog::Entry* entry : catalog_.OfTenant(tenant)) {
    if (!entry->condemned) Condemn(entry, TierBackend::RemoveReason::kUnwanted);
  }
  ForgetForeignOf(tenant);
  ++purging_[tenant];
  Job* const job = AddJob(Job::Kind::kPurge, deadline, std::move(done));
  job->record.id.tenant = tenant;
  queued_purges_.insert(job->id);
  return absl::OkStatus();
}

bool TierStore::Core::Contains(const BlockIdentity& id) const {
  const absl::Time now = clock_.Now();
  MutexLock lock(&mu_);
  const TierCatalog::Entry* const entry = catalog_.Find(id.key);
  return breaker_.allows() && entry != nullptr && entry->state == TierCatalog::State::kReady &&
         entry->record.id == id && entry->record.expiry > now;
}

absl::Duration TierStore::Core::ExpectedLoad(Bytes length) const {
  MutexLock lock(&mu_);
  return breaker_.allows() ? loads_.Expect(length) : absl::InfiniteDuration();
}

std::vector<BlockRecord> TierStore::Core::Records() const {
  MutexLock lock(&mu_);
  return catalog_.Ready();
}

void TierStore::Core::SetCapacity(Bytes capacity) {
  MutexLock lock(&mu_);
  catalog_.set_capacity(capacity);
}

void TierStore::Core::SetTenantLimit(const std::string& tenant, Bytes limit) {
  MutexLock lock(&mu_);
  catalog_.SetLimit(tenant, limit);
}

TierStatus TierStore::Core::status() const {
  MutexLock lock(&mu_);
  TierStatus status;
  status.name = backend_->name();
  status.breaker = breaker_.state();
  status.times_opened = breaker_.times_opened();
  status.last_failure = last_failure_;
  status.capacity = catalog_.capacity();
  status.used = catalog_.used();
  status.quarantined = catalog_.quarantined();
  status.blocks = catalog_.ready();
  status.foreign = foreign_.size();
  status.queued_loads = queued_loads_.size();
  status.queued_stores = queued_stores_.size();
  status.in_flight = in_flight_;
  status.load_latency = loads_.latency();
  status.load_bandwidth = loads_.bandwidth();
  status.store_latency = stores_.latency();
  status.store_bandwidth = stores_.bandwidth();
  status.counters = counters_;
  return status;
}

TenantTierStatus TierStore::Core::tenant_status(const std::string& tenant) const {
  MutexLock lock(&mu_);
  return {catalog_.UsedBy(tenant), catalog_.LimitOf(tenant), catalog_.ReadyOf(tenant)};
}

bool TierStore::Core::WaitUntilServing(absl::Duration timeout) const {
  const absl::Time deadline = MonotonicNow() + timeout;
  MutexLock lock(&mu_);
  while (!breaker_.allows()) {
    if (changed_.WaitWithDeadline(&mu_, deadline)) return breaker_.allows();
  }
  return true;
}

absl::Status TierStore::Core::CheckConsistency() const {
  MutexLock lock(&mu_);
  if (absl::Status status = catalog_.CheckConsistency(); !status.ok()) return status;
  return CheckForeign();
}

}  // namespace palimpsest
