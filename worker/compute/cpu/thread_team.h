// A fixed team of threads that run one function together, phase by phase.
//
// Threads: the owner calls Start and Join alternately from one thread; Barrier and Claim are for
// the team's own threads inside `body`. Idle threads sleep in the kernel; at a barrier a thread
// spins for some microseconds first, because the others are usually about to arrive.
#ifndef PALIMPSEST_WORKER_COMPUTE_CPU_THREAD_TEAM_H_
#define PALIMPSEST_WORKER_COMPUTE_CPU_THREAD_TEAM_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace palimpsest {

class ThreadTeam {
 public:
  // `body(i)` is called by thread i, 0 .. threads - 1, once for each Start. Requires threads >= 1.
  ThreadTeam(int threads, std::function<void(int)> body);
  // Waits for a run in progress.
  ~ThreadTeam();

  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  int size() const { return static_cast<int>(threads_.size()); }

  void Start();
  // Returns when every thread has left `body`; at once if none is running.
  void Join();

  // Returns once all threads have called it. What they wrote before is visible after.
  void Barrier();

  struct Range {
    int64_t first = 0;
    int64_t last = 0;
    bool empty() const { return first == last; }
  };

  // Takes a share of 0 .. total - 1 that no other thread got since the last barrier (or Start);
  // empty when all is taken. Shares are multiples of `grain` except the last, and shrink as the end
  // comes near. All calls between two barriers must agree on `total`.
  Range Claim(int64_t total, int64_t grain);

 private:
  void Loop(int thread);

  const std::function<void(int)> body_;
  std::atomic<bool> stop_{false};

  // On cache lines of their own: written by all threads in every phase.
  alignas(64) std::atomic<uint32_t> run_{0};
  alignas(64) std::atomic<uint32_t> running_{0};
  alignas(64) std::atomic<uint32_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> generation_{0};
  alignas(64) std::atomic<int64_t> claimed_{0};

  std::vector<std::thread> threads_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_COMPUTE_CPU_THREAD_TEAM_H_
