// What swap copiers of all back-ends have in common: one thread for each direction, so that KV that
// leaves does not hold up what returns; transfers of a direction go one after the other.
//
// Threads: as swap_copier.h. Implementations are called by the two threads only, and must call
// StopThreads in their destructor.
#ifndef PALIMPSEST_WORKER_MEMORY_THREADED_SWAP_COPIER_H_
#define PALIMPSEST_WORKER_MEMORY_THREADED_SWAP_COPIER_H_

#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/bytes.h"
#include "common/mutex.h"
#include "worker/core/swap_copier.h"
#include "worker/memory/link_pacer.h"

namespace palimpsest {

class ThreadedSwapCopier : public SwapCopier {
 public:
  // Requires StopThreads.
  ~ThreadedSwapCopier() override;

  void Start(SwapTransfer transfer) override;
  std::vector<SwapEnded> TakeEnded() override;
  void AwaitAll() override;
  void SetWakeup(std::function<void()> wakeup) override;
  absl::Duration waited() const override;
  // DeadlineExceeded after a minute: the copies hang.
  absl::Status AwaitLayer(int layer) override;

 protected:
  // Copies await their turns there; null: nobody's. Outlives the copier.
  explicit ThreadedSwapCopier(LinkPacer* pacer) : pacer_(pacer) {}

  void StartThreads();
  // What was started ends before.
  void StopThreads();

  // Blocks until all bytes are in host memory. Adds to `checksums` those of what went to a block
  // store.
  virtual absl::Status CopyOut(const SwapTransfer& transfer, std::vector<uint64_t>& checksums) = 0;
  // Blocks until all bytes are in the KV region. Calls Pass on the way; for the last layer when
  // blocks that came from a block store are checked. Counts the `intact` ones, from the first on.
  virtual absl::Status CopyIn(const SwapTransfer& transfer, int32_t& intact) = 0;
  // Layers before this one are there, as far as AwaitLayer says so.
  void Pass(int layers);

  // For copies in the direction in which parameters come: blocks until this one may begin.
  void AwaitTurn(Bytes bytes);

  // Whether a transfer is awaited that has not ended.
  bool Awaited() const;

 private:
  struct Direction {
    std::deque<SwapTransfer> queue;
    bool busy = false;
  };

  void Run(SwapTransfer::Direction which);
  Direction& Of(SwapTransfer::Direction which) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return which == SwapTransfer::Direction::kOut ? out_ : in_;
  }
  // Whether a step that has come to this layer must wait.
  bool Missing(int layer) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  LinkPacer* const pacer_;

  mutable Mutex mutex_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  Direction out_ ABSL_GUARDED_BY(mutex_);
  Direction in_ ABSL_GUARDED_BY(mutex_);    // the transfer under way is the first
  int passed_ ABSL_GUARDED_BY(mutex_) = 0;  // layers of that one
  std::vector<SwapEnded> ended_ ABSL_GUARDED_BY(mutex_);
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  absl::Duration waited_ ABSL_GUARDED_BY(mutex_);
  std::function<void()> wakeup_ ABSL_GUARDED_BY(mutex_);
  std::thread out_thread_;
  std::thread in_thread_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MEMORY_THREADED_SWAP_COPIER_H_
