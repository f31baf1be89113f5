#include "broker/tier/threaded_backend.h"

#include <cassert>
#include <utility>

namespace palimpsest {

ThreadedBackend::ThreadedBackend(std::unique_ptr<BlockingBackend> medium, int threads)
    : medium_(std::move(medium)) {
  assert(threads >= 1);
  threads_.reserve(threads);
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { RunThread(); });
}

ThreadedBackend::~ThreadedBackend() { Close(); }

void ThreadedBackend::Close() {
  {
    MutexLock lock(&mu_);
    closed_ = true;
    changed_.SignalAll();
  }
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void ThreadedBackend::Enqueue(Work work) {
  MutexLock lock(&mu_);
  assert(!closed_);
  work_.push_back(std::move(work));
  changed_.Signal();
}

void ThreadedBackend::RunThread() {
  while (true) {
    Work work;
    {
      MutexLock lock(&mu_);
      while (work_.empty() && !closed_) changed_.Wait(&mu_);
      if (work_.empty()) return;
      work = std::move(work_.front());
      work_.pop_front();
    }
    work();
  }
}

void ThreadedBackend::Write(const BlockRecord& record, absl::Span<const std::byte> from,
                            Written done) {
  Enqueue([this, &record, from, done = std::move(done)]() mutable {
    done(medium_->Write(record, from));
  });
}

void ThreadedBackend::Read(const BlockRecord& record, TierPlace place, absl::Span<std::byte> to,
                           Done done) {
  Enqueue([this, &record, place, to, done = std::move(done)]() mutable {
    done(medium_->Read(record, place, to));
  });
}

void ThreadedBackend::Remove(const BlockRecord& record, TierPlace place, RemoveReason reason,
                             Done done) {
  Enqueue([this, &record, place, reason, done = std::move(done)]() mutable {
    done(medium_->Remove(record, place, reason));
  });
}

void ThreadedBackend::Purge(const std::string& tenant, Done done) {
  Enqueue([this, &tenant, done = std::move(done)]() mutable { done(medium_->Purge(tenant)); });
}

void ThreadedBackend::Find(const BlockIdentity& id, Found done) {
  Enqueue([this, &id, done = std::move(done)]() mutable { done(medium_->Find(id)); });
}

void ThreadedBackend::Discover(Discovered done) {
  Enqueue([this, done = std::move(done)]() mutable { done(medium_->Discover()); });
}

}  // namespace palimpsest
