// The KV blocks that one launch of palimpsest_hash_blocks (slab_checksum.cu) hashes: a parameter of
// the kernel, by value.
#ifndef PALIMPSEST_WORKER_MEMORY_CUDA_HASHED_BLOCKS_H_
#define PALIMPSEST_WORKER_MEMORY_CUDA_HASHED_BLOCKS_H_

namespace palimpsest {

struct HashedBlocks {
  static constexpr unsigned kMost = 512;

  unsigned count;
  unsigned numbers[kMost];
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MEMORY_CUDA_HASHED_BLOCKS_H_
