// The chunks of common/slab_checksum.h on a GPU: eight threads for each, one for each accumulator
// of XXH3. Their hashes go to the host, which hashes those.
#include "worker/memory/cuda/xxh3_lane.h"

namespace {

using namespace palimpsest::xxh3;

__constant__ const uint64_t kSecret[24] = PALIMPSEST_XXH3_SECRET;

// Called by all eight threads of a group; the hash is valid on its first.
__device__ uint64_t Hash(const unsigned char* data, size_t size) {
  const int lane = threadIdx.x % kLanes;
  const uint64_t accumulator = Accumulate(kSecret, data, size, lane);
  const uint64_t odd = __shfl_xor_sync(0xffffffff, accumulator, 1);
  uint64_t pairs = lane % 2 == 0 ? MergePair(kSecret, accumulator, odd, lane / 2) : 0;
  for (int distance = 2; distance < kLanes; distance *= 2) {
    pairs += __shfl_xor_sync(0xffffffff, pairs, distance);
  }
  return Finish(pairs, size);
}

}  // namespace

// hashes[i] = XXH3-64 of bytes i * chunk .. (i + 1) * chunk of `data`, for i below `chunks`.
// Threads: eight for each chunk, a multiple of 32.
extern "C" __global__ void __launch_bounds__(128)
    palimpsest_hash_chunks(const unsigned char* data, unsigned chunk, unsigned chunks,
                           unsigned long long* hashes) {
  const unsigned index = (blockIdx.x * blockDim.x + threadIdx.x) / kLanes;
  // Threads beyond the last chunk hash it once more, so that whole warps shuffle.
  const unsigned mine = index < chunks ? index : chunks - 1;
  const uint64_t hash = Hash(data + static_cast<size_t>(mine) * chunk, chunk);
  if (threadIdx.x % kLanes == 0 && index < chunks) hashes[index] = hash;
}
