// Holds back what a worker copies in the background, parameters that come back and KV blocks, to a
// rate that the broker names. The rest of the link is for rotating layers, of this tenant or
// others: a layer that comes late stalls a step, a restore that takes longer delays a first token.
//
// Copies take turns in the order in which they ask. Each begins when those before it have had as
// long as they take at the rate, so that over any time at most rate * time and one copy begin: what
// was not used before is not saved up. Copies had better be small, as one that has begun is not
// held back.
#ifndef PALIMPSEST_WORKER_MEMORY_LINK_PACER_H_
#define PALIMPSEST_WORKER_MEMORY_LINK_PACER_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "common/bytes.h"
#include "common/mutex.h"

namespace palimpsest {

// When the copies of a queue may begin. Pure: times must not run backwards.
class PacedQueue {
 public:
  // 0: all at once, as at first.
  void SetRate(double bytes_per_second, absl::Time now);
  bool limited() const { return rate_ > 0; }

  // Adds a copy; its place, for Turn.
  double Enter(Bytes bytes, absl::Time now);
  // When the copy at this place may begin if the rate stays as it is; `now` or earlier: at once.
  absl::Time Turn(double place, absl::Time now);

 private:
  void Pass(absl::Time now);

  double rate_ = 0;
  // Bytes of all copies that entered, and of those whose time has passed, as of `since_`.
  double entered_ = 0;
  double passed_ = 0;
  absl::Time since_ = absl::InfinitePast();
};

// Threads: thread-safe. AwaitTurn blocks, on a lowered rate for longer than it seemed when it was
// called, and never after Open.
class LinkPacer {
 public:
  enum class Kind : uint8_t { kRestore, kBlocks };
  static constexpr size_t kKinds = 2;

  // `on_waited` is called by threads that had to wait, without a lock; may be null.
  explicit LinkPacer(std::function<void(Kind, absl::Duration)> on_waited = nullptr)
      : on_waited_(std::move(on_waited)) {}

  // 0: no limit, as at first. Counts for those that wait already, too.
  void SetLimit(double bytes_per_second);
  // Nobody waits from now on: the worker ends.
  void Open();
  bool limited() const;

  // Blocks until a copy of this size may begin, and counts it.
  void AwaitTurn(Kind kind, Bytes bytes);

  // Counted, and waited, since the start.
  Bytes copied(Kind kind) const;
  absl::Duration waited(Kind kind) const;

 private:
  struct Totals {
    Bytes copied;
    absl::Duration waited;
  };

  const std::function<void(Kind, absl::Duration)> on_waited_;

  mutable Mutex mu_;
  CondVar changed_;
  PacedQueue queue_ ABSL_GUARDED_BY(mu_);
  bool open_ ABSL_GUARDED_BY(mu_) = false;
  std::array<Totals, kKinds> totals_ ABSL_GUARDED_BY(mu_);
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MEMORY_LINK_PACER_H_
