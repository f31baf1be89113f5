// Copies KV blocks that lie in this process's memory.
#ifndef PALIMPSEST_WORKER_COMPUTE_CPU_HOST_BLOCK_COPIER_H_
#define PALIMPSEST_WORKER_COMPUTE_CPU_HOST_BLOCK_COPIER_H_

#include <cstddef>
#include <cstring>

#include "absl/types/span.h"
#include "worker/core/block_copier.h"
#include "worker/core/model_runner.h"

namespace palimpsest {

class HostBlockCopier final : public BlockCopier {
 public:
  explicit HostBlockCopier(const ModelMemory& memory) : memory_(memory) {}

  void Copy(absl::Span<const BlockMove> moves) override {
    for (const BlockMove& move : moves) {
      std::memcpy(At(move.to), At(move.from), memory_.kv_block_bytes.count());
    }
  }

 private:
  std::byte* At(BlockId block) const {
    return memory_.kv + (memory_.kv_block_bytes * block.value()).count();
  }

  const ModelMemory memory_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_COMPUTE_CPU_HOST_BLOCK_COPIER_H_
