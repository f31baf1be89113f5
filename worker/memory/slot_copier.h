// Copies rotating layers from the parameter image into their slots ahead of their use, in host
// memory: a thread that follows SlotSequence. The gate of the worker's parameters hands AwaitStage
// and ReleaseStage of rotating stages on to it.
//
// Copies are checked as restores are, if the restorer checks; a layer whose bytes are wrong is
// never let through, and `on_failure` is called.
//
// Threads: thread-safe, but for Start and Stop: those come while no step is in flight. Await
// blocks, and Stop does for the copy of one slab at most.
#ifndef PALIMPSEST_WORKER_MEMORY_SLOT_COPIER_H_
#define PALIMPSEST_WORKER_MEMORY_SLOT_COPIER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/bytes.h"
#include "common/mutex.h"
#include "common/rotation.h"
#include "worker/core/slot_sequence.h"
#include "worker/memory/image_restorer.h"
#include "worker/memory/parameter_gate.h"
#include "worker/memory/parameter_slabs.h"

namespace palimpsest {

class SlotCopier : public RotatingStages {
 public:
  struct Options {
    // Both outlive the copier. `base` is the parameter region's.
    const ImageRestorer* restorer = nullptr;
    std::byte* base = nullptr;
    Bytes slab_bytes;
    std::vector<ParameterSlabs::StageSpan> stages;
    // Longest wait for a layer.
    absl::Duration patience = absl::Seconds(60);
    // Called by the copier's thread, without a lock: behind each copy of a layer, and once if a
    // layer cannot be copied.
    std::function<void(Bytes, absl::Duration)> on_copied;
    std::function<void(const absl::Status&)> on_failure;
  };

  // Nothing rotates at first.
  explicit SlotCopier(Options options);
  ~SlotCopier() override;

  // The addresses of these stages are mapped, and their slots hold nothing. Copies begin.
  void Start(const Rotation& rotation);
  // Nothing rotates, and nothing is written to any slot from then on.
  void Stop();

  // Blocks until the stage's bytes are in its slot, where they stay until it is released.
  // OutOfRange for a stage that does not rotate, or whose turn it is not: then, and on every other
  // error, the step is abandoned. The first rotating stage's turn it is always: a step begins.
  absl::Status Await(int stage) override;
  void Release(int stage) override;
  void Restart() override;
  // Nothing more is copied.
  void Fail(absl::Status status) override;

 private:
  void Loop();
  void Copy(int32_t layer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Of rotating layers, by its stage; -1.
  int32_t LayerOf(int stage) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const Options options_;

  Mutex mu_;
  CondVar changed_;
  Rotation rotation_ ABSL_GUARDED_BY(mu_);
  SlotSequence sequence_ ABSL_GUARDED_BY(mu_) = SlotSequence(0, 0);
  bool stopped_ ABSL_GUARDED_BY(mu_) = true;  // no copy is to begin or go on
  bool copying_ ABSL_GUARDED_BY(mu_) = false;
  bool ending_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status failure_ ABSL_GUARDED_BY(mu_);
  std::thread thread_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MEMORY_SLOT_COPIER_H_
