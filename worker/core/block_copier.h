// Copies KV blocks within the KV region. One implementation per compute back-end.
#ifndef PALIMPSEST_WORKER_CORE_BLOCK_COPIER_H_
#define PALIMPSEST_WORKER_CORE_BLOCK_COPIER_H_

#include "absl/types/span.h"
#include "worker/core/block_manager.h"

namespace palimpsest {

class BlockCopier {
 public:
  virtual ~BlockCopier() = default;

  // Called by the engine thread when no step is in flight. The copies are complete when it returns.
  // No target is a source.
  virtual void Copy(absl::Span<const BlockMove> moves) = 0;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_CORE_BLOCK_COPIER_H_
