// What the store's thread does: end, release, begin.
#include <algorithm>
#include <cassert>

#include "absl/strings/str_cat.h"
#include "broker/tier/tier_store_core.h"
#include "common/block_checksum.h"
#include "common/monotonic_time.h"

namespace palimpsest {
namespace {

constexpr size_t kExpiredPerPass = 64;
constexpr int kRemovalAttempts = 3;
constexpr absl::Duration kLongestNap = absl::Minutes(1);

using RemoveReason = TierBackend::RemoveReason;

}  // namespace

absl::Time TierStore::Core::RunOnce() {
  Actions actions;
  absl::Time next;
  {
    MutexLock lock(&mu_);
    woken_ = false;
    const absl::Time now = clock_.Now();
    const bool served = breaker_.allows();
    std::vector<Completion> completions;
    completions.swap(completions_);
    for (Completion& completion : completions) Finish(std::move(completion), &actions);
    ReleaseLate(now, &actions);
    CancelCondemned(&actions);
    LookForStalls(now);
    Expire(now);
    if (closing_) {
      ReleaseAll(absl::CancelledError("the store is being closed"), &actions);
    } else {
      if (!breaker_.allows()) {
        ReleaseAll(
            absl::UnavailableError(absl::StrCat("the tier is left alone since ", last_failure_)),
            &actions);
      }
      StartDue(now, &actions);
    }
    if (served != breaker_.allows()) changed_.SignalAll();
    actions.events.swap(events_);
    next = NextEvent(now);
  }
  Perform(std::move(actions));
  return next;
}

void TierStore::Core::RunThread() {
  absl::Time drained_by = absl::InfiniteFuture();  // of the machine's time, whatever clock_ says
  while (true) {
    const absl::Time next = RunOnce();
    MutexLock lock(&mu_);
    if (closing_ && drained_by == absl::InfiniteFuture()) {
      drained_by = MonotonicNow() + options_.drain;
    }
    if (closing_ && (in_flight_ == 0 || MonotonicNow() >= drained_by)) return;
    const absl::Time nap_over =
        MonotonicNow() + std::clamp(next - clock_.Now(), absl::ZeroDuration(), kLongestNap);
    while (!woken_) {
      if (changed_.WaitWithDeadline(&mu_, std::min(nap_over, drained_by))) break;
    }
  }
}

bool TierStore::Core::Shutdown() {
  {
    MutexLock lock(&mu_);
    closing_ = true;
    Wake();
  }
  if (thread_.joinable()) {
    thread_.join();
  } else {
    RunThread();
  }
  {
    MutexLock lock(&mu_);
    given_up_ = in_flight_ > 0;
  }
  RunOnce();  // answers those whose operations have ended or never will
  {
    MutexLock lock(&mu_);
    if (given_up_) return false;
  }
  backend_->Close();
  return true;
}

void TierStore::Core::Complete(Completion completion) {
  completion.ended = clock_.Now();
  MutexLock lock(&mu_);
  completions_.push_back(std::move(completion));
  Wake();
}

void TierStore::Core::Answer(Job* job, absl::Status status, Actions* actions) {
  if (!job->done) return;
  deadlines_.erase({job->deadline, job->id});
  actions->answers.emplace_back(std::move(job->done), std::move(status));
  job->done = nullptr;
}

void TierStore::Core::Retire(Job* job, Actions* actions) {
  assert(!job->done);
  const auto owned = jobs_.find(job->id);
  actions->finished.push_back(std::move(owned->second));
  jobs_.erase(owned);
}

void TierStore::Core::DropQueued(Job* job, Actions* actions) {
  assert(!job->in_flight);
  if (job->kind == Job::Kind::kLoad) {
    queued_loads_.erase(job->id);
    if (job->entry != nullptr) catalog_.EndLoad(job->entry);
  } else {
    assert(job->kind == Job::Kind::kStore);
    queued_stores_.erase(job->id);
    events_.push_back({Event::Kind::kFreed, {}, job->entry->footprint});
    catalog_.Erase(job->entry);
  }
  Retire(job, actions);
}

void TierStore::Core::ReleaseLate(absl::Time now, Actions* actions) {
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    Job* const job = jobs_.at(deadlines_.begin()->second).get();
    if (job->kind == Job::Kind::kLoad) ++counters_.misses.late;
    if (job->kind == Job::Kind::kStore) ++counters_.unstored.late;
    Answer(job, absl::DeadlineExceededError("the tier did not answer in time"), actions);
    // A purge goes on.
    if (!job->in_flight && job->kind != Job::Kind::kPurge) DropQueued(job, actions);
  }
}

void TierStore::Core::ReleaseAll(const absl::Status& status, Actions* actions) {
  std::vector<Job*> waiting;
  for (const auto& [deadline, id] : deadlines_) waiting.push_back(jobs_.at(id).get());
  for (Job* job : waiting) {
    const bool purge = job->kind == Job::Kind::kPurge;
    // What is under way while the store closes may yet end well, and a purge waits for the tier.
    if (closing_ ? job->in_flight && !given_up_ : purge) continue;
    if (job->kind == Job::Kind::kLoad) {
      ++(closing_ ? counters_.misses.cancelled : counters_.misses.broken);
    } else if (job->kind == Job::Kind::kStore) {
      ++(closing_ ? counters_.unstored.cancelled : counters_.unstored.broken);
    }
    Answer(job, status, actions);
    if (!job->in_flight && !purge) DropQueued(job, actions);
  }
}

void TierStore::Core::CancelCondemned(Actions* actions) {
  if (!condemned_while_queued_) return;
  condemned_while_queued_ = false;
  std::vector<Job*> condemned;
  for (JobId id : queued_stores_) {
    Job* const job = jobs_.at(id).get();
    if (job->entry->condemned) condemned.push_back(job);
  }
  for (Job* job : condemned) {
    ++counters_.unstored.cancelled;
    Answer(job, absl::CancelledError("removed before it was stored"), actions);
    DropQueued(job, actions);
  }
}

void TierStore::Core::Judge(const absl::Status& status, absl::Duration elapsed, absl::Time now) {
  const bool ok = status.ok() || absl::IsNotFound(status) || absl::IsResourceExhausted(status) ||
                  absl::IsAlreadyExists(status) || absl::IsFailedPrecondition(status);
  if (!ok) {
    last_failure_ = std::string(status.message());
  } else if (elapsed > breaker_.slow()) {
    last_failure_ = absl::StrCat("an operation took ", absl::FormatDuration(elapsed));
  }
  breaker_.Record(ok, elapsed, now);
}

void TierStore::Core::Finish(Completion completion, Actions* actions) {
  Job* const job = jobs_.at(completion.job).get();
  started_.erase({job->accepted_by_medium, job->id});
  job->in_flight = false;
  --in_flight_;
  if (job->kind == Job::Kind::kStore || job->kind == Job::Kind::kRemove) --stores_in_flight_;
  if (job->kind == Job::Kind::kProbe) {
    FinishProbeStep(job, completion, actions);
    return;
  }
  const absl::Duration elapsed = std::max(completion.ended - job->began, absl::ZeroDuration());
  if (job->kind == Job::Kind::kDiscover) {
    FinishDiscover(std::move(completion), elapsed);
    Retire(job, actions);
    return;
  }
  if (!completion.source_corrupt) Judge(completion.status, elapsed, completion.ended);
  if (job->done && completion.ended >= job->deadline) {
    if (job->kind == Job::Kind::kLoad) ++counters_.misses.late;
    if (job->kind == Job::Kind::kStore) ++counters_.unstored.late;
    Answer(job, absl::DeadlineExceededError("the tier answered too late"), actions);
  }
  switch (job->kind) {
    case Job::Kind::kLoad:
      if (job->found) {
        if (completion.status.ok()) loads_.Record(job->record.length, elapsed);
        remeasure_at_ = completion.ended + idle_for_;
        FinishLoad(job, completion, actions);
      } else {
        FinishFind(job, std::move(completion), actions);
      }
      return;
    case Job::Kind::kStore:
      if (completion.status.ok()) stores_.Record(job->record.length, elapsed);
      remeasure_at_ = completion.ended + idle_for_;
      FinishStore(job, completion, actions);
      return;
    case Job::Kind::kRemove:
      FinishRemove(job, completion);
      break;
    case Job::Kind::kPurge:
      if (--purging_.at(job->record.id.tenant) == 0) purging_.erase(job->record.id.tenant);
      Answer(job, completion.status, actions);
      break;
    case Job::Kind::kProbe:
    case Job::Kind::kDiscover:
      break;
  }
  Retire(job, actions);
}

void TierStore::Core::FinishFind(Job* job, Completion completion, Actions* actions) {
  absl::Status status = completion.status;
  uint64_t* miss = absl::IsNotFound(status) ? &counters_.misses.absent : &counters_.misses.failed;
  if (status.ok()) {
    const BlockRecord& record = completion.found->record;
    if (record.id != job->record.id) {
      miss = &counters_.misses.collided;
      status = absl::NotFoundError("another block has the same key");
    } else if (record.length.count() != job->to.bytes.size()) {
      miss = &counters_.misses.refused;
      status = absl::InvalidArgumentError(absl::StrCat(
          "room for ", job->to.bytes.size(), " bytes for a block of ", record.length.count()));
    } else if (record.expiry <= completion.ended) {
      miss = &counters_.misses.expired;
      status = absl::NotFoundError("the block has expired");
    } else if (purging_.contains(record.id.tenant)) {
      miss = &counters_.misses.absent;
      status = absl::NotFoundError("the tenant is purged");
    }
  }
  if (status.ok() && job->done && !closing_) {
    job->record = std::move(completion.found->record);
    job->place = completion.found->place;
    job->found = true;
    MarkStarted(job, completion.ended, actions);
    return;
  }
  if (absl::IsNotFound(completion.status)) ForgetForeign(job->record.id.key);
  if (status.ok()) status = absl::CancelledError("the store is being closed");
  if (job->done) ++*(absl::IsCancelled(status) ? &counters_.misses.cancelled : miss);
  Answer(job, std::move(status), actions);
  Retire(job, actions);
}

void TierStore::Core::FinishLoad(Job* job, const Completion& completion, Actions* actions) {
  const absl::Status& status = completion.status;
  if (job->entry != nullptr) {
    if (absl::IsDataLoss(status)) Condemn(job->entry, RemoveReason::kCorrupt);
    if (absl::IsNotFound(status)) Condemn(job->entry, RemoveReason::kUnwanted);
    catalog_.EndLoad(job->entry);
  } else if (absl::IsDataLoss(status) || absl::IsNotFound(status)) {
    ForgetForeign(job->record.id.key);
  }
  if (job->done) {
    if (status.ok()) {
      ++counters_.hits;
      counters_.bytes_loaded += job->record.length.count();
    } else {
      ++(absl::IsDataLoss(status)   ? counters_.misses.corrupt
         : absl::IsNotFound(status) ? counters_.misses.absent
                                    : counters_.misses.failed);
    }
  }
  Answer(job, status, actions);
  Retire(job, actions);
}

void TierStore::Core::FinishStore(Job* job, const Completion& completion, Actions* actions) {
  const absl::Status& status = completion.status;
  // What came late is not published.
  const bool wanted = job->done && !job->entry->condemned;
  if (!wanted) catalog_.Condemn(job->entry, RemoveReason::kUnwanted);
  if (!status.ok()) {
    if (job->done) {
      ++(completion.source_corrupt            ? counters_.unstored.corrupt
         : absl::IsAlreadyExists(status)      ? counters_.unstored.duplicate
         : absl::IsResourceExhausted(status)  ? counters_.unstored.full
         : absl::IsFailedPrecondition(status) ? counters_.unstored.refused
                                              : counters_.unstored.failed);
    }
    events_.push_back({Event::Kind::kFreed, {}, job->entry->footprint});
    catalog_.Erase(job->entry);
    Answer(job, status, actions);
  } else if (catalog_.Publish(job->entry, completion.place)) {
    ForgetForeign(job->record.id.key);
    ++counters_.stored;
    counters_.bytes_stored += job->record.length.count();
    events_.push_back({Event::Kind::kStored, job->entry->record, job->entry->footprint});
    Answer(job, status, actions);
  } else {
    if (job->done) ++counters_.unstored.cancelled;
    Answer(job, absl::CancelledError("removed while it was stored"), actions);
  }
  Retire(job, actions);
}

void TierStore::Core::FinishRemove(Job* job, const Completion& completion) {
  TierCatalog::Entry* const entry = job->entry;
  if (completion.status.ok() || absl::IsNotFound(completion.status)) {
    if (entry->reason == RemoveReason::kCorrupt) {
      catalog_.Quarantine(entry);
      return;
    }
    events_.push_back({Event::Kind::kFreed, {}, entry->footprint});
    catalog_.Erase(entry);
  } else if (++entry->failed_removals < kRemovalAttempts) {
    catalog_.PutBack(entry);
  } else {
    catalog_.Quarantine(entry);
  }
}

void TierStore::Core::LookForStalls(absl::Time now) {
  while (!started_.empty() && now - started_.begin()->first > breaker_.slow()) {
    last_failure_ =
        absl::StrCat("an operation did not end within ", absl::FormatDuration(breaker_.slow()));
    breaker_.Stalled(now);
    started_.erase(started_.begin());
  }
}

void TierStore::Core::Expire(absl::Time now) {
  for (TierCatalog::Entry* entry : catalog_.Expired(now, kExpiredPerPass)) {
    Condemn(entry, RemoveReason::kUnwanted);
  }
  for (const BlockKey& key : foreign_.Expired(now, kExpiredPerPass)) ForgetForeign(key);
}

void TierStore::Core::MarkStarted(Job* job, absl::Time now, Actions* actions) {
  job->in_flight = true;
  job->accepted_by_medium = now;
  // Nobody waits for a look, which is many calls of the medium.
  if (job->kind != Job::Kind::kDiscover) started_.insert({now, job->id});
  ++in_flight_;
  if (job->kind == Job::Kind::kStore || job->kind == Job::Kind::kRemove) ++stores_in_flight_;
  actions->starts.push_back(job);
}

void TierStore::Core::StartFirst(absl::btree_set<JobId>* queue, absl::Time now, Actions* actions) {
  Job* const job = jobs_.at(*queue->begin()).get();
  queue->erase(queue->begin());
  MarkStarted(job, now, actions);
}

bool TierStore::Core::RoomForStores() const {
  return in_flight_ < options_.max_in_flight && stores_in_flight_ < options_.max_stores_in_flight;
}

void TierStore::Core::StartDue(absl::Time now, Actions* actions) {
  if (NextProbe() <= now) BeginProbe(now, actions);
  if (!breaker_.allows()) return;
  while (!queued_loads_.empty() && in_flight_ < options_.max_in_flight) {
    StartFirst(&queued_loads_, now, actions);
  }
  while (!queued_purges_.empty() && in_flight_ < options_.max_in_flight) {
    StartFirst(&queued_purges_, now, actions);
  }
  while (RoomForStores() && catalog_.has_removable()) {
    TierCatalog::Entry* const entry = catalog_.TakeRemovable();
    Job* const job = AddJob(Job::Kind::kRemove, absl::InfiniteFuture(), nullptr);
    job->entry = entry;
    MarkStarted(job, now, actions);
  }
  while (RoomForStores() && !queued_stores_.empty() && next_store_ <= now) {
    if (options_.store_bytes_per_second > Bytes(0)) {
      const Bytes length = jobs_.at(*queued_stores_.begin())->record.length;
      next_store_ =
          now + absl::Seconds(1) * (static_cast<double>(length.count()) /
                                    static_cast<double>(options_.store_bytes_per_second.count()));
    }
    StartFirst(&queued_stores_, now, actions);
  }
  if (LooksForForeign() && next_look_ <= now && in_flight_ < options_.max_in_flight) {
    looking_ = true;
    MarkStarted(AddJob(Job::Kind::kDiscover, absl::InfiniteFuture(), nullptr), now, actions);
  }
}

absl::Time TierStore::Core::NextEvent(absl::Time now) const {
  absl::Time next = std::min({catalog_.next_expiry(), foreign_.next_expiry(), NextProbe()});
  if (LooksForForeign() && next_look_ > now) next = std::min(next, next_look_);
  if (!deadlines_.empty()) next = std::min(next, deadlines_.begin()->first);
  if (!started_.empty()) {
    next = std::min(next, started_.begin()->first + breaker_.slow() + absl::Nanoseconds(1));
  }
  if (!queued_stores_.empty() && next_store_ > now) next = std::min(next, next_store_);
  return next;
}

void TierStore::Core::Perform(Actions actions) {
  for (Job* job : actions.starts) Start(job);
  for (auto& [done, status] : actions.answers) done(std::move(status));
  actions.finished.clear();  // lets go of pins before anybody is told of room
  if (observer_ == nullptr) return;
  for (const Event& event : actions.events) {
    switch (event.kind) {
      case Event::Kind::kStored:
        observer_->OnStored(event.record);
        break;
      case Event::Kind::kForeign:
        observer_->OnForeign(event.record);
        break;
      case Event::Kind::kRemoved:
        observer_->OnRemoved(event.record);
        break;
      case Event::Kind::kFreed:
        observer_->OnFreed(event.footprint);
        break;
    }
  }
}

void TierStore::Core::Start(Job* job) {
  const auto ended = [this, job](absl::Status status) {
    Complete({.job = job->id, .status = std::move(status)});
  };
  job->began = clock_.Now();
  if (job->kind == Job::Kind::kPurge) {
    backend_->Purge(job->record.id.tenant, ended);
  } else if (job->kind == Job::Kind::kDiscover) {
    backend_->Discover([this, job](absl::StatusOr<Discovery> told) {
      Completion completion{.job = job->id};
      if (told.ok()) {
        completion.discovery = *std::move(told);
      } else {
        completion.status = std::move(told).status();
      }
      Complete(std::move(completion));
    });
  } else if (job->kind == Job::Kind::kRemove) {
    backend_->Remove(job->entry->record, job->entry->place, job->entry->reason, ended);
  } else if (job->kind == Job::Kind::kLoad && !job->found) {
    backend_->Find(job->record.id, [this, job](absl::StatusOr<StoredBlock> found) {
      Completion completion{.job = job->id};
      if (found.ok()) {
        completion.found = *std::move(found);
      } else {
        completion.status = std::move(found).status();
      }
      Complete(std::move(completion));
    });
  } else if (!job->to.bytes.empty()) {
    // Verified by the back-end's thread, of which there may be many.
    backend_->Read(job->record, job->place, job->to.bytes, [this, job](absl::Status status) {
      if (status.ok() && BlockChecksum(job->record.id.key, job->to.bytes) != job->record.checksum) {
        status = absl::DataLossError("a block came back with another checksum");
      }
      Complete({.job = job->id, .status = std::move(status)});
    });
  } else if (!job->from.bytes.empty()) {
    if (BlockChecksum(job->record.id.key, job->from.bytes) != job->record.checksum) {
      Complete({.job = job->id,
                .status = absl::DataLossError("the block to be stored has another checksum"),
                .source_corrupt = true});
      return;
    }
    job->began = clock_.Now();
    backend_->Write(job->record, job->from.bytes, [this, job](absl::StatusOr<TierPlace> place) {
      Completion completion{.job = job->id};
      if (place.ok()) {
        completion.place = *place;
      } else {
        completion.status = std::move(place).status();
      }
      Complete(std::move(completion));
    });
  } else {
    backend_->Remove(job->record, job->place, RemoveReason::kUnwanted, ended);
  }
}

}  // namespace palimpsest
