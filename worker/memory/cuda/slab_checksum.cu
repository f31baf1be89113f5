// The chunks of common/slab_checksum.h on a GPU: eight threads for each, one for each accumulator
// of XXH3. Their hashes go to the host, which hashes those.
#include "worker/memory/cuda/hashed_blocks.h"
#include "worker/memory/cuda/xxh3_lane.h"

namespace {

using namespace palimpsest::xxh3;

__constant__ const uint64_t kSecret[24] = PALIMPSEST_XXH3_SECRET;

// Called by all eight threads of a group; the hash is valid on its first.
__device__ uint64_t Combine(uint64_t accumulator, size_t size) {
  const int lane = threadIdx.x % kLanes;
  const uint64_t odd = __shfl_xor_sync(0xffffffff, accumulator, 1);
  uint64_t pairs = lane % 2 == 0 ? MergePair(kSecret, accumulator, odd, lane / 2) : 0;
  for (int distance = 2; distance < kLanes; distance *= 2) {
    pairs += __shfl_xor_sync(0xffffffff, pairs, distance);
  }
  return Finish(pairs, size);
}

// Of this group; threads beyond the last piece of work do it once more, so that whole warps
// shuffle.
__device__ unsigned Index(unsigned count) {
  const unsigned index = (blockIdx.x * blockDim.x + threadIdx.x) / kLanes;
  return index < count ? index : count - 1;
}

}  // namespace

// hashes[i] = XXH3-64 of bytes i * chunk .. (i + 1) * chunk of `data`, for i below `chunks`.
// Threads: eight for each chunk, a multiple of 32.
extern "C" __global__ void __launch_bounds__(128)
    palimpsest_hash_chunks(const unsigned char* data, unsigned chunk, unsigned chunks,
                           unsigned long long* hashes) {
  const unsigned index = Index(chunks);
  const Whole bytes{data + static_cast<size_t>(index) * chunk};
  const uint64_t hash = Combine(Accumulate(kSecret, bytes, chunk, threadIdx.x % kLanes), chunk);
  if (threadIdx.x % kLanes == 0) hashes[index] = hash;
}

// hashes[i * chunks + c] = XXH3-64 of bytes c * chunk .. (c + 1) * chunk of block i of `blocks`,
// which begins at kv + number * block_bytes, with zero bytes behind its own; `chunks` cover it.
// Threads: eight for each chunk of each block, a multiple of 32.
extern "C" __global__ void __launch_bounds__(128)
    palimpsest_hash_blocks(const unsigned char* kv, unsigned long long block_bytes, unsigned chunk,
                           unsigned chunks, palimpsest::HashedBlocks blocks,
                           unsigned long long* hashes) {
  const unsigned index = Index(blocks.count * chunks);
  const size_t begin = static_cast<size_t>(index % chunks) * chunk;
  const unsigned char* const data = kv + blocks.numbers[index / chunks] * block_bytes + begin;
  const int lane = threadIdx.x % kLanes;
  const size_t own = block_bytes - begin;
  const uint64_t accumulator = own >= chunk ? Accumulate(kSecret, Whole{data}, chunk, lane)
                                            : Accumulate(kSecret, Padded{data, own}, chunk, lane);
  const uint64_t hash = Combine(accumulator, chunk);
  if (lane == 0) hashes[index] = hash;
}
