// Cleans slabs on threads of its own: what is queued comes back through `done`, in batches.
//
// A slab that cannot be cleaned (no descriptors or memory left for its successor) is tried again
// every retry_delay; until then it belongs to nobody.
//
// Threads: thread-safe. `clean` and `done` run on the cleaner's threads, without locks.
#ifndef PALIMPSEST_BROKER_SERVER_SLAB_CLEANER_H_
#define PALIMPSEST_BROKER_SERVER_SLAB_CLEANER_H_

#include <algorithm>
#include <cstddef>
#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "common/ids.h"
#include "common/mutex.h"

namespace palimpsest {

// Threads for a machine with so many CPUs. One alone does not zero as fast as memory can be
// written; a few do, and the workers need the CPUs too.
constexpr size_t CleanerThreads(size_t cpus) { return std::clamp<size_t>(cpus / 4, 2, 8); }

class SlabCleaner {
 public:
  struct Options {
    size_t threads = 1;
    size_t batch = 16;
    absl::Duration retry_delay = absl::Seconds(1);
  };
  // One status for each slab.
  using Clean = std::function<std::vector<absl::Status>(absl::Span<const SlabId>)>;
  using Done = std::function<void(absl::Span<const SlabId>)>;

  SlabCleaner(Options options, Clean clean, Done done);
  ~SlabCleaner() { Stop(); }
  SlabCleaner(const SlabCleaner&) = delete;
  SlabCleaner& operator=(const SlabCleaner&) = delete;

  // Returns after the slabs in hand; those that wait, or come later, stay as they are. Idempotent.
  void Stop();

  void Enqueue(absl::Span<const SlabId> slabs);

 private:
  void Run();

  const Options options_;
  const Clean clean_;
  const Done done_;
  Mutex mu_;
  CondVar changed_;
  std::deque<SlabId> waiting_ ABSL_GUARDED_BY(mu_);
  std::vector<SlabId> failed_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_SERVER_SLAB_CLEANER_H_
