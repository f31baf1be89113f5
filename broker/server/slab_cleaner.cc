#include "broker/server/slab_cleaner.h"

#include <algorithm>
#include <utility>

#include "common/log.h"

namespace palimpsest {

SlabCleaner::SlabCleaner(Options options, Clean clean, Done done)
    : options_(options), clean_(std::move(clean)), done_(std::move(done)) {
  for (size_t i = 0; i < options_.threads; ++i) threads_.emplace_back([this] { Run(); });
}

void SlabCleaner::Stop() {
  {
    MutexLock lock(&mu_);
    stopping_ = true;
    changed_.SignalAll();
  }
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void SlabCleaner::Enqueue(absl::Span<const SlabId> slabs) {
  MutexLock lock(&mu_);
  waiting_.insert(waiting_.end(), slabs.begin(), slabs.end());
  changed_.SignalAll();
}

void SlabCleaner::Run() {
  while (true) {
    std::vector<SlabId> batch;
    {
      MutexLock lock(&mu_);
      while (waiting_.empty() && !stopping_) {
        const absl::Duration patience =
            failed_.empty() ? absl::InfiniteDuration() : options_.retry_delay;
        if (changed_.WaitWithTimeout(&mu_, patience)) {
          waiting_.insert(waiting_.end(), failed_.begin(), failed_.end());
          failed_.clear();
        }
      }
      if (stopping_) return;
      const size_t count = std::min(options_.batch, waiting_.size());
      batch.assign(waiting_.begin(), waiting_.begin() + static_cast<ptrdiff_t>(count));
      waiting_.erase(waiting_.begin(), waiting_.begin() + static_cast<ptrdiff_t>(count));
    }
    const std::vector<absl::Status> results = clean_(batch);
    std::vector<SlabId> cleaned, failed;
    for (size_t i = 0; i < batch.size(); ++i) {
      (results[i].ok() ? cleaned : failed).push_back(batch[i]);
      if (results[i].ok()) continue;
      Log(LogLevel::kError, "a slab could not be cleaned and is tried again",
          {{"slab", batch[i]}, {"error", results[i]}});
    }
    if (!cleaned.empty()) done_(cleaned);
    if (!failed.empty()) {
      MutexLock lock(&mu_);
      failed_.insert(failed_.end(), failed.begin(), failed.end());
    }
  }
}

}  // namespace palimpsest
