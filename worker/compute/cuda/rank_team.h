// A thread for each rank of a tensor-parallel model, for work that the ranks do side by side.
//
// Threads: Run is called by one thread at a time.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_RANK_TEAM_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_RANK_TEAM_H_

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "common/mutex.h"

namespace palimpsest::cuda {

class RankTeam {
 public:
  explicit RankTeam(int ranks);
  ~RankTeam();

  int ranks() const { return static_cast<int>(threads_.size()); }

  // Calls work(rank) on each rank's thread, always the same one. Blocks until all have returned.
  void Run(absl::FunctionRef<void(int rank)> work);

 private:
  using Work = absl::FunctionRef<void(int rank)>;

  void Loop(int rank);

  Mutex mutex_;
  CondVar begun_;
  CondVar ended_;
  const Work* work_ ABSL_GUARDED_BY(mutex_) = nullptr;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  // Written with the mutex held, read without: see SpinUntil.
  std::atomic<uint64_t> rounds_ = 0;
  std::atomic<int> working_ = 0;
  std::vector<std::thread> threads_;
};

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_RANK_TEAM_H_
