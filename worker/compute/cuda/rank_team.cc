#include "worker/compute/cuda/rank_team.h"

#include "worker/compute/cuda/spin.h"

namespace palimpsest::cuda {

RankTeam::RankTeam(int ranks) {
  for (int rank = 0; rank < ranks; ++rank) threads_.emplace_back([this, rank] { Loop(rank); });
}

RankTeam::~RankTeam() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    begun_.SignalAll();
  }
  for (std::thread& thread : threads_) thread.join();
}

void RankTeam::Run(absl::FunctionRef<void(int rank)> work) {
  {
    MutexLock lock(&mutex_);
    work_ = &work;
    working_ = ranks();
    rounds_ = rounds_ + 1;
    begun_.SignalAll();
  }
  SpinUntil([&] { return working_ == 0; });
  MutexLock lock(&mutex_);
  while (working_ > 0) ended_.Wait(&mutex_);
}

void RankTeam::Loop(int rank) {
  for (uint64_t round = 1;; ++round) {
    SpinUntil([&] { return rounds_ >= round; });
    const Work* work;
    {
      MutexLock lock(&mutex_);
      while (rounds_ < round && !stopping_) begun_.Wait(&mutex_);
      if (rounds_ < round) return;
      work = work_;
    }
    (*work)(rank);
    MutexLock lock(&mutex_);
    working_ = working_ - 1;
    if (working_ == 0) ended_.Signal();
  }
}

}  // namespace palimpsest::cuda
