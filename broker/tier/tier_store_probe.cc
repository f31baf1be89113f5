// A round trip of two scratch blocks: what measures a tier at first and when nobody uses it, and
// what closes its breaker.
#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "broker/tier/tier_store_core.h"
#include "common/block_checksum.h"
#include "common/random.h"

namespace palimpsest {
namespace {

constexpr Bytes kSmallProbe = KiB(4);
// Scratch blocks that a process left behind are misses of a shared tier, and swept, after this
// time.
constexpr absl::Duration kProbeLife = absl::Minutes(10);

// What is found to be so much faster or slower than was believed is looked at again soon.
constexpr double kSurprise = 2;

bool Surprises(absl::Duration believed, absl::Duration found) {
  return found > believed * kSurprise || believed > found * kSurprise;
}

}  // namespace

absl::Time TierStore::Core::NextProbe() const {
  if (probe_ != nullptr || closing_) return absl::InfiniteFuture();
  if (!breaker_.allows()) return breaker_.next_probe();
  return in_flight_ > 0 ? absl::InfiniteFuture() : remeasure_at_;
}

void TierStore::Core::BeginProbe(absl::Time now, Actions* actions) {
  probe_ = std::make_unique<Probe>();
  probe_->idle = breaker_.allows();
  if (!probe_->idle) breaker_.BeginProbe();
  probe_->sizes = {options_.probe_bytes, kSmallProbe};
  Job* const job = AddJob(Job::Kind::kProbe, absl::InfiniteFuture(), nullptr);
  if (leftover_.has_value()) {
    job->record = leftover_->record;
    job->place = leftover_->place;
    probe_->step = Probe::Step::kRemove;
  } else {
    NextScratch(job, now);
  }
  MarkStarted(job, now, actions);
}

void TierStore::Core::NextScratch(Job* job, absl::Time now) {
  const Bytes length = probe_->sizes.back();
  probe_->sizes.pop_back();
  probe_->step = Probe::Step::kWrite;
  probe_->data.resize(length.count());
  const uint64_t seed = RandomSeed();
  for (size_t at = 0; at + sizeof seed <= probe_->data.size(); at += sizeof seed) {
    const uint64_t word = (seed + at) * 0x9e3779b97f4a7c15;
    std::memcpy(probe_->data.data() + at, &word, sizeof word);
  }
  probe_->back.assign(length.count(), std::byte{0});
  job->record = {.id = {.key = {RandomSeed(), RandomSeed()}, .tokens = {}, .tenant = kProbeTenant},
                 .length = length,
                 .expiry = now + kProbeLife};
  job->record.checksum = BlockChecksum(job->record.id.key, probe_->data);
  job->from.bytes = probe_->data;
  job->to.bytes = {};
}

void TierStore::Core::FinishProbeStep(Job* job, const Completion& completion, Actions* actions) {
  const absl::Duration elapsed = std::max(completion.ended - job->began, absl::ZeroDuration());
  absl::Status status = completion.status;
  if (probe_->step == Probe::Step::kRemove && absl::IsNotFound(status)) status = absl::OkStatus();
  if (status.ok() && elapsed > breaker_.slow()) {
    status = absl::DeadlineExceededError(
        absl::StrCat("a probe's step took ", absl::FormatDuration(elapsed)));
  }
  bool more = false;
  switch (probe_->step) {
    case Probe::Step::kWrite:
      // A full medium answers: blocks that are there can be loaded.
      if (absl::IsResourceExhausted(status)) {
        status = absl::OkStatus();
        break;
      }
      if (!completion.status.ok()) break;
      (probe_->idle ? probe_->stores : stores_).Record(job->record.length, elapsed);
      job->place = completion.place;
      job->from.bytes = {};
      job->to.bytes = absl::MakeSpan(probe_->back);
      probe_->step = Probe::Step::kRead;
      more = true;
      break;
    case Probe::Step::kRead:
      if (status.ok()) {
        (probe_->idle ? probe_->loads : loads_).Record(job->record.length, elapsed);
      }
      job->to.bytes = {};
      probe_->step = Probe::Step::kRemove;
      more = true;
      break;
    case Probe::Step::kRemove:
      leftover_.reset();
      if (!completion.status.ok() && !absl::IsNotFound(completion.status)) {
        leftover_ = {job->record, job->place};
      }
      more = status.ok() && probe_->ok && !probe_->sizes.empty();
      if (more) NextScratch(job, completion.ended);
      break;
  }
  if (!status.ok()) {
    probe_->ok = false;
    last_failure_ = absl::StrCat("a probe failed: ", status.message());
  }
  if (more && !closing_) {
    MarkStarted(job, completion.ended, actions);
    return;
  }
  EndProbe(elapsed, completion.ended);
  Retire(job, actions);
}

void TierStore::Core::EndProbe(absl::Duration elapsed, absl::Time now) {
  const std::unique_ptr<Probe> probe = std::move(probe_);
  const bool ok = probe->ok && !closing_;
  bool again_soon = !probe->idle;
  if (!probe->idle) {
    breaker_.EndProbe(ok, now);
  } else {
    breaker_.Record(ok, elapsed, now);
    if (ok && probe->loads.measured()) {
      again_soon =
          Surprises(loads_.Expect(options_.probe_bytes), probe->loads.Expect(options_.probe_bytes));
      loads_ = probe->loads;
    }
    // A full medium stores nothing.
    if (ok && probe->stores.measured()) stores_ = probe->stores;
  }
  idle_for_ = again_soon ? options_.remeasure_after
                         : std::min(idle_for_ * 2, options_.breaker.longest_back_off);
  remeasure_at_ = now + idle_for_;
}

}  // namespace palimpsest
