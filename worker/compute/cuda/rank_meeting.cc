#include "worker/compute/cuda/rank_meeting.h"

#include "worker/compute/cuda/spin.h"
#include "worker/core/check.h"

namespace palimpsest::cuda {

absl::Status RankMeeting::Meet(absl::FunctionRef<absl::Status()> decide) {
  uint64_t meeting;
  bool last;
  {
    MutexLock lock(&mutex_);
    if (!aborted_.ok()) return aborted_;
    meeting = ended_;
    last = ++present_ == ranks_;
    if (last) present_ = 0;
  }
  if (last) {
    absl::Status outcome = decide();
    MutexLock lock(&mutex_);
    if (!aborted_.ok()) return aborted_;
    outcome_ = outcome;
    ended_ = meeting + 1;
    changed_.SignalAll();
    return outcome;
  }
  SpinUntil([&] { return ended_ != meeting; });
  MutexLock lock(&mutex_);
  while (ended_ == meeting && aborted_.ok()) changed_.Wait(&mutex_);
  return ended_ != meeting ? outcome_ : aborted_;
}

void RankMeeting::Abort(const absl::Status& status) {
  PALIMPSEST_CHECK(!status.ok());
  MutexLock lock(&mutex_);
  if (!aborted_.ok()) return;
  aborted_ = status;
  changed_.SignalAll();
}

absl::Status RankMeeting::aborted() const {
  MutexLock lock(&mutex_);
  return aborted_;
}

}  // namespace palimpsest::cuda
