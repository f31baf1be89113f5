#include "worker/server/generation_stream.h"

#include <utility>

namespace palimpsest {

GenerationStream::GenerationStream(uint64_t ticket, size_t capacity, std::function<void()> ready,
                                   std::shared_ptr<std::atomic<int32_t>> alive)
    : ticket_(ticket), capacity_(capacity), alive_(std::move(alive)), ready_(std::move(ready)) {
  alive_->fetch_add(1, std::memory_order_relaxed);
}

GenerationStream::~GenerationStream() { alive_->fetch_sub(1, std::memory_order_relaxed); }

bool GenerationStream::Push(SampledToken token) {
  MutexLock lock(&mutex_);
  if (tokens_.size() >= capacity_) return false;
  tokens_.push_back(std::move(token));
  return true;
}

void GenerationStream::Finish(End end) {
  ended_ = true;
  MutexLock lock(&mutex_);
  end_ = std::move(end);
}

void GenerationStream::Notify() {
  // The reader may drop its last reference to what `ready` points to in the call.
  const std::function<void()> ready = ended_ ? std::exchange(ready_, nullptr) : ready_;
  if (ready) ready();
}

GenerationStream::Batch GenerationStream::Take() {
  MutexLock lock(&mutex_);
  return {std::exchange(tokens_, {}), std::exchange(end_, std::nullopt)};
}

}  // namespace palimpsest
