// Sums and matrices of few bytes, exchanged between GPUs that can write each other's memory: one
// kernel on each GPU, and one trip over the link. NCCL has more latency, of which a decode step
// would pay that of two all-reduces a layer; large messages are NCCL's.
//
// Each rank has an inbox, with a slot for each 16 bytes that each other rank may send it. An empty
// slot holds a pattern that no message has: every word that is not the pattern has arrived, so that
// messages need no flags and no fences. The receiver empties the slot again. A sender may be one
// exchange ahead of a receiver, never two, as it needs what that one sends: so slots are used in
// two turns. Sums are taken in the order of ranks, in float32, and rounded once.
//
// A kernel must not start before the one of the exchange before on the same GPU has ended: kernels
// in between that overlap their predecessor's end must wait for it.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_PEER_EXCHANGE_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_PEER_EXCHANGE_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "worker/compute/cuda/summed_norm.h"

namespace palimpsest::cuda {

inline constexpr int kMaxExchangeRanks = 8;

// One rank's view; all but the inboxes of others is its own. Device memory unless said otherwise.
struct PeerExchange {
  int rank = 0;
  int ranks = 0;
  void* inboxes[kMaxExchangeRanks] = {};  // of each rank: InboxBytes(ranks), all 0xff at first
  uint32_t* turns = nullptr;              // TurnBytes(), zeros at first
  // Pinned memory of the host, shared by all ranks: not 0 ends what waits, with undefined results.
  const volatile uint32_t* aborted = nullptr;
};

// Loads the kernels, so that none is loaded while another waits for a message; once for each
// device, with the device current.
cudaError_t PreparePeerExchange();

size_t InboxBytes(int ranks);
size_t TurnBytes();
// The largest message of one rank.
size_t MaxExchangeBytes(int ranks);

// data[i] becomes the sum of all ranks' data[i]: bfloat16, `bytes` a multiple of 16.
cudaError_t PeerAllReduce(const PeerExchange& exchange, void* data, size_t bytes,
                          cudaStream_t stream);

// The same for rows of a matrix, and the norms of the sums.
bool TakesNorm(int ranks, int32_t rows, int32_t size);
cudaError_t PeerAllReduceNorm(const PeerExchange& exchange, void* data, const SummedNorm& norm,
                              cudaStream_t stream);

// Of each rank a float matrix [rows, columns]; they come to stand side by side in `whole`, float
// [rows, width]. Columns beyond `width` are dropped. `part` is readable to a multiple of 16 bytes.
struct SideBySide {
  int32_t rows = 0;
  int32_t columns = 0;
  int32_t width = 0;
};
cudaError_t PeerAllGather(const PeerExchange& exchange, const float* part, float* whole,
                          const SideBySide& shape, cudaStream_t stream);

// The same from parts [ranks, rows, columns] that are here already.
cudaError_t Interleave(const float* parts, float* whole, const SideBySide& shape,
                       cudaStream_t stream);

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_PEER_EXCHANGE_H_
