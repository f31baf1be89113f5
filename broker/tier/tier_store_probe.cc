// A round trip of two scratch blocks: what measures a tier at first, and what closes its breaker.
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

}  // namespace

void TierStore::Core::BeginProbe(absl::Time now, Actions* actions) {
  breaker_.BeginProbe();
  probe_ = std::make_unique<Probe>();
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
      stores_.Record(job->record.length, elapsed);
      job->place = completion.place;
      job->from.bytes = {};
      job->to.bytes = absl::MakeSpan(probe_->back);
      probe_->step = Probe::Step::kRead;
      more = true;
      break;
    case Probe::Step::kRead:
      if (status.ok()) loads_.Record(job->record.length, elapsed);
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
  breaker_.EndProbe(probe_->ok && !closing_, completion.ended);
  probe_.reset();
  Retire(job, actions);
}

}  // namespace palimpsest
