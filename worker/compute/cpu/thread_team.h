// Threads that run one function together, phase by phase, without waiting for those that the kernel
// does not let run: a phase is over when its work is done, not when every thread has arrived, and a
// thread that comes late finds the finished phases empty. So a step goes on at the pace of the
// threads that have a CPU, also where several processes share the CPUs.
//
// Threads: the owner calls Start and Join alternately from one thread; ForEach is for the team's
// own threads. Idle threads sleep in the kernel; at the end of a phase a thread spins for some
// microseconds first, because the others are usually about to finish.
#ifndef PALIMPSEST_WORKER_COMPUTE_CPU_THREAD_TEAM_H_
#define PALIMPSEST_WORKER_COMPUTE_CPU_THREAD_TEAM_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"

namespace palimpsest {

class ThreadTeam {
 public:
  // One thread's part in a run.
  class Member {
   public:
    // 0 .. threads - 1.
    int thread() const { return thread_; }

    // Calls `work(first, last)` for parts of 0 .. total - 1 until all of it was done by somebody,
    // at least `grain` units a part except the last. Then one thread calls `finish`; when that has
    // returned the phase is over and ForEach returns in every thread. What was written in the phase
    // is visible after it. All members make the same calls in the same order. A thread that gets no
    // work returns later than the others, possibly when they are many phases ahead: outside `work`
    // and `finish` it must not read what a later phase writes.
    void ForEach(int64_t total, int64_t grain, absl::FunctionRef<void(int64_t, int64_t)> work,
                 absl::FunctionRef<void()> finish);
    void ForEach(int64_t total, int64_t grain, absl::FunctionRef<void(int64_t, int64_t)> work);

   private:
    friend class ThreadTeam;
    Member(ThreadTeam& team, int thread, uint32_t phase)
        : team_(team), thread_(thread), phase_(phase) {}

    ThreadTeam& team_;
    const int thread_;
    uint32_t phase_;  // the next one
  };

  // Requires 1 <= threads < 2^16 and totals below 2^32. `body` runs once per Start in each thread
  // that wakes before the run is over.
  ThreadTeam(int threads, std::function<void(Member&)> body);
  // Waits for a run in progress.
  ~ThreadTeam();

  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  int size() const { return static_cast<int>(threads_.size()); }

  void Start();
  // Returns when `body` has returned in a thread, so that all phases are over, and no thread is in
  // it; at once if nothing was started.
  void Join();

 private:
  struct Part {
    int64_t first = 0;
    int64_t last = 0;
  };

  void Loop(int thread);
  bool Enter();
  void Leave();
  Part Claim(uint32_t phase, int64_t total, int64_t grain);
  void AwaitPhase(uint32_t phase);

  const std::function<void(Member&)> body_;
  std::atomic<bool> stop_{false};
  uint32_t first_phase_ = 0;  // of the current run; written before it opens

  // On cache lines of their own: written by all threads in every phase.
  alignas(64) std::atomic<uint32_t> run_{0};
  // Number of threads in `body`, and kClosed once one has left it: then no other enters.
  alignas(64) std::atomic<uint32_t> state_;
  // The current phase in the high half, its first unit that nobody has taken in the low half.
  alignas(64) std::atomic<uint64_t> claim_{0};
  alignas(64) std::atomic<int64_t> done_{0};  // units of the current phase
  // Phases that are over, of all runs.
  alignas(64) std::atomic<uint32_t> completed_{0};

  std::vector<std::thread> threads_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_COMPUTE_CPU_THREAD_TEAM_H_
