// The tokens of one request on their way from the engine thread to whoever sends them. The engine
// never waits for the reader: the buffer is bounded, and a reader who falls behind by more than it
// holds loses the request.
//
// Threads: the engine calls Push, Finish and Notify; the reader calls Take from any thread.
#ifndef PALIMPSEST_WORKER_SERVER_GENERATION_STREAM_H_
#define PALIMPSEST_WORKER_SERVER_GENERATION_STREAM_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/mutex.h"
#include "worker/core/sampling.h"
#include "worker/core/sequence.h"

namespace palimpsest {

class GenerationStream {
 public:
  struct End {
    // Why there is no complete output; OK if there is.
    absl::Status status;
    // With an error: when another try may succeed; 0 if nothing is known.
    absl::Duration retry_after;
    // With OK.
    FinishReason reason = FinishReason::kLength;
    int32_t stop_trim_bytes = 0;
    SequenceUsage usage;
  };

  struct Batch {
    std::vector<SampledToken> tokens;
    // Set once, after the last token.
    std::optional<End> end;
  };

  // `ready` is called by Notify; it must not block. `alive` counts the streams that exist.
  GenerationStream(uint64_t ticket, size_t capacity, std::function<void()> ready,
                   std::shared_ptr<std::atomic<int32_t>> alive);
  ~GenerationStream();
  GenerationStream(const GenerationStream&) = delete;
  GenerationStream& operator=(const GenerationStream&) = delete;

  // Names the request to the engine.
  uint64_t ticket() const { return ticket_; }

  // False if the buffer is full; the token is dropped then.
  bool Push(SampledToken token);
  // No Push after it.
  void Finish(End end);
  // Tells the reader that there is something to take. After the end it also lets go of `ready`.
  void Notify();

  // What arrived since the last call.
  Batch Take();

 private:
  const uint64_t ticket_;
  const size_t capacity_;
  const std::shared_ptr<std::atomic<int32_t>> alive_;
  std::function<void()> ready_;  // the engine thread's
  Mutex mutex_;
  std::vector<SampledToken> tokens_ ABSL_GUARDED_BY(mutex_);
  std::optional<End> end_ ABSL_GUARDED_BY(mutex_);
  bool ended_ = false;  // the engine thread's
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_SERVER_GENERATION_STREAM_H_
