#include "broker/tier/faulty_backend.h"

#include <algorithm>

#include "absl/status/status.h"
#include "common/monotonic_time.h"

namespace palimpsest {
namespace {

absl::Status Error() { return absl::UnavailableError("input/output error (injected)"); }

}  // namespace

FaultInjector::~FaultInjector() {
  GoOn();
  {
    MutexLock lock(&mu_);
    ending_ = true;
    changed_.SignalAll();
  }
  reporter_.join();
}

void FaultInjector::Set(const TierFaults& faults) {
  MutexLock lock(&mu_);
  faults_ = faults;
}

void FaultInjector::Hold(Stage stage) {
  MutexLock lock(&mu_);
  holds_[stage] = true;
}

size_t FaultInjector::held() const {
  MutexLock lock(&mu_);
  return held_.size();
}

void FaultInjector::GoOn() {
  std::vector<Report> reports;
  {
    MutexLock lock(&mu_);
    holds_.clear();
    reports.swap(held_);
    for (auto& [due, report] : late_) reports.push_back(std::move(report));
    late_.clear();
  }
  for (Report& report : reports) report();
}

bool FaultInjector::Happens(double TierFaults::*share) {
  MutexLock lock(&mu_);
  // Nothing is drawn for what never happens: a calm phase changes nothing of the next one.
  return faults_.*share > 0 &&
         std::uniform_real_distribution<double>(0, 1)(random_) < faults_.*share;
}

size_t FaultInjector::Below(size_t bound) {
  MutexLock lock(&mu_);
  return random_() % bound;
}

void FaultInjector::Deliver(Stage stage, bool probe, Report report) {
  const bool late = Happens(&TierFaults::late);
  {
    MutexLock lock(&mu_);
    if (!probe && holds_[stage]) {
      held_.push_back(std::move(report));
      return;
    }
    if (late) {
      late_.emplace(MonotonicNow() + faults_.delay, std::move(report));
      changed_.SignalAll();
      return;
    }
  }
  report();
}

void FaultInjector::RunThread() {
  while (true) {
    Report report;
    {
      MutexLock lock(&mu_);
      while (late_.empty() ? !ending_ : !ending_ && late_.begin()->first > MonotonicNow()) {
        if (late_.empty()) {
          changed_.Wait(&mu_);
        } else {
          changed_.WaitWithDeadline(&mu_, late_.begin()->first);
        }
      }
      if (late_.empty()) return;
      report = std::move(late_.extract(late_.begin()).mapped());
    }
    report();
  }
}

void FaultyBackend::Write(const BlockRecord& record, absl::Span<const std::byte> from,
                          Written done) {
  if (faults_.Happens(&TierFaults::failed_writes)) return done(Error());
  if (faults_.Happens(&TierFaults::full_writes)) {
    return done(absl::ResourceExhaustedError("no space left on device (injected)"));
  }
  std::vector<std::byte> changed;
  if (faults_.Happens(&TierFaults::damaged_writes)) {
    changed.assign(from.begin(), from.end());
    changed[faults_.Below(changed.size())] ^= std::byte{1};
  } else if (faults_.Happens(&TierFaults::torn_writes)) {
    changed.assign(from.begin(), from.end());
    std::fill(changed.begin() + static_cast<ptrdiff_t>(changed.size() / 2), changed.end(),
              std::byte{0});
  }
  const absl::Span<const std::byte> stored = changed.empty() ? from : absl::MakeSpan(changed);
  const bool probe = record.id.tenant == kProbeTenant;
  medium_->Write(record, stored,
                 [this, probe, changed = std::move(changed),
                  done = std::move(done)](absl::StatusOr<TierPlace> place) mutable {
                   faults_.Deliver(FaultInjector::Stage::kWritten, probe,
                                   [done = std::move(done), place = std::move(place)]() mutable {
                                     done(std::move(place));
                                   });
                 });
}

void FaultyBackend::Read(const BlockRecord& record, TierPlace place, absl::Span<std::byte> to,
                         Done done) {
  if (faults_.Happens(&TierFaults::failed_reads)) return done(Error());
  const bool probe = record.id.tenant == kProbeTenant;
  medium_->Read(record, place, to,
                [this, probe, to, done = std::move(done)](absl::Status status) mutable {
                  if (status.ok() && faults_.Happens(&TierFaults::damaged_reads)) {
                    to[faults_.Below(to.size())] ^= std::byte{1};
                  }
                  faults_.Deliver(FaultInjector::Stage::kRead, probe,
                                  [done = std::move(done), status = std::move(status)]() mutable {
                                    done(std::move(status));
                                  });
                });
}

void FaultyBackend::Remove(const BlockRecord& record, TierPlace place, RemoveReason reason,
                           Done done) {
  if (faults_.Happens(&TierFaults::failed_writes)) return done(Error());
  medium_->Remove(record, place, reason, std::move(done));
}

void FaultyBackend::Purge(const std::string& tenant, Done done) {
  if (faults_.Happens(&TierFaults::failed_writes)) return done(Error());
  medium_->Purge(tenant, std::move(done));
}

void FaultyBackend::Find(const BlockIdentity& id, Found done) {
  if (faults_.Happens(&TierFaults::failed_reads)) return done(Error());
  medium_->Find(id, std::move(done));
}

void FaultyBackend::Discover(Discovered done) {
  if (faults_.Happens(&TierFaults::failed_reads)) return done(Error());
  medium_->Discover(std::move(done));
}

}  // namespace palimpsest
