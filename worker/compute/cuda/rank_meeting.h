// Where the threads of ranks that must go on or give up together meet. Thread-safe.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_RANK_MEETING_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_RANK_MEETING_H_

#include <atomic>
#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "common/mutex.h"

namespace palimpsest::cuda {

class RankMeeting {
 public:
  explicit RankMeeting(int ranks) : ranks_(ranks) {}

  // Blocks until every rank's thread has called it, then runs the last caller's `decide`, whose
  // status all of them return. What it wrote may be read by all until they meet again. After Abort:
  // the status of that, for those who wait too.
  absl::Status Meet(absl::FunctionRef<absl::Status()> decide);

  // The first status, which is not OK, counts.
  void Abort(const absl::Status& status);
  absl::Status aborted() const;

 private:
  const int ranks_;
  mutable Mutex mutex_;
  CondVar changed_;
  int present_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status outcome_ ABSL_GUARDED_BY(mutex_);
  absl::Status aborted_ ABSL_GUARDED_BY(mutex_);
  // Meetings that have ended. Written with the mutex held, read without: a meeting that lasts
  // microseconds is not worth a sleep.
  std::atomic<uint64_t> ended_ = 0;
};

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_RANK_MEETING_H_
