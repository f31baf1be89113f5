// Work that is done once, over many gigabytes, by all cores.
#ifndef PALIMPSEST_WORKER_MODEL_PARALLEL_H_
#define PALIMPSEST_WORKER_MODEL_PARALLEL_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace palimpsest {

inline constexpr int kMostHelpers = 15;

// Calls work(i) for each i below `count`, on this thread and as many helpers as there are further
// cores (at most kMostHelpers), in no certain order; returns when all have returned. This thread
// calls after_own(done) behind each of its own, `done` being how many have ended anywhere.
inline void ForEachOnAllCores(int64_t count, const std::function<void(int64_t)>& work,
                              const std::function<void(int64_t done)>& after_own = nullptr) {
  std::atomic<int64_t> next = 0, done = 0;
  const auto run = [&](bool own) {
    for (int64_t i = next++; i < count; i = next++) {
      work(i);
      const int64_t ended = ++done;
      if (own && after_own) after_own(ended);
    }
  };
  const int64_t cores = std::max(1U, std::thread::hardware_concurrency());
  std::vector<std::thread> helpers(static_cast<size_t>(
      std::min({cores - 1, int64_t{kMostHelpers}, std::max<int64_t>(count - 1, 0)})));
  for (std::thread& helper : helpers) helper = std::thread(run, false);
  run(true);
  for (std::thread& helper : helpers) helper.join();
}

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MODEL_PARALLEL_H_
