// The chunk hashes (common/slab_checksum.h) of KV blocks in one GPU's memory, computed there: of
// each block's part with zero bytes behind it (common/stored_block.h).
//
// Threads: one.
#ifndef PALIMPSEST_WORKER_MEMORY_CUDA_BLOCK_HASHER_H_
#define PALIMPSEST_WORKER_MEMORY_CUDA_BLOCK_HASHER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/bytes.h"
#include "common/cuda/context.h"
#include "common/ids.h"

namespace palimpsest {

class BlockHasher {
 public:
  // For blocks of `block_bytes`, a multiple of 16, in the region that begins at `kv`; the context
  // is current, as in every call.
  static absl::StatusOr<std::unique_ptr<BlockHasher>> Create(CudaContextPtr context,
                                                             const std::byte* kv,
                                                             Bytes block_bytes);
  // What was queued must have ended.
  ~BlockHasher();
  BlockHasher(const BlockHasher&) = delete;
  BlockHasher& operator=(const BlockHasher&) = delete;

  // Makes room for the hashes of so many blocks. What was queued must have ended.
  absl::Status Reserve(size_t blocks);

  // hashes(first + i) are those of blocks[i] when `stream` has come that far; all have room.
  absl::Status Queue(absl::Span<const BlockId> blocks, size_t first, CUstream stream) const;

  absl::Span<const uint64_t> hashes(size_t index) const {
    return {hashes_ + index * chunks_, chunks_};
  }

 private:
  BlockHasher(CudaContextPtr context, const std::byte* kv, Bytes block_bytes);

  void FreeHashes();

  const CudaContextPtr context_;
  const std::byte* const kv_;
  const Bytes block_bytes_;
  const unsigned chunks_;  // of a block
  CUmodule module_ = nullptr;
  CUfunction hash_blocks_ = nullptr;
  uint64_t* hashes_ = nullptr;  // written by the GPU
  size_t room_ = 0;             // in blocks
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MEMORY_CUDA_BLOCK_HASHER_H_
