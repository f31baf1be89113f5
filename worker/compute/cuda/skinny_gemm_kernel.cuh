// The kernel behind skinny_gemm.h, as a template of its tile shape.
//
// A block owns a contiguous range of tiles, 16 rows of W each (8 of the gate and 8 of up, if
// gated), and takes up to kTiles of them at a time through the whole of K. One thread requests
// chunks of kChunk columns of these rows, of the tokens and of the norm weight into a ring of
// kStages, by tensor copies: a bulk copy costs its SM about 50 ns however small it is, so a row at
// a time would be too slow. kWarps warps share the 32-column steps of each chunk in turn, with W as
// the 16-row operand of mma.m16n8k16 and tokens as its 8-column operand, and their sums meet in
// shared memory in the order of the warps. So the order of every sum depends on K and kWarps alone.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_SKINNY_GEMM_KERNEL_CUH_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_SKINNY_GEMM_KERNEL_CUH_

#include <cuda.h>
#include <cuda_bf16.h>

#include "worker/compute/cuda/ptx.cuh"
#include "worker/compute/cuda/skinny_gemm.h"

namespace palimpsest::skinny {

inline constexpr int kTileRows = 16;
inline constexpr int kStep = 32;  // columns of K between two fragment loads
inline constexpr int kBlockColumns = 64;

// `sums`: accumulators of each output in a thread, 1 or 2.
template <int tiles, int chunk, int stages, int warps, int token_tiles, int sums = 2>
struct Shape {
  static constexpr int kTiles = tiles;
  static constexpr int kChunk = chunk;
  static constexpr int kStages = stages;
  static constexpr int kWarps = warps;
  static constexpr int kTokenTiles = token_tiles;
  static constexpr int kSums = sums;

  static constexpr int kRows = kTiles * kTileRows;
  static constexpr int kTokens = kTokenTiles * 8;
  static constexpr int kConsumers = kWarps * 32;
  static constexpr int kThreads = kConsumers + 32;
  static constexpr int kStepsPerWarp = kChunk / kStep / kWarps;
  static_assert(kChunk % (kStep * kWarps) == 0);

  // A stage: for each tile [kBlocks][16 rows][64 columns] of W (gated: gate [kBlocks][8][64], then
  // up); [kBlocks][kTokens][64] of the tokens. Each 64 columns are 128 bytes whose eight 16-byte
  // pieces are permuted by the row (the 128-byte swizzle): the rows of a fragment use all banks.
  static constexpr int kBlocks = kChunk / kBlockColumns;
  static constexpr int kTileBytes = kTileRows * kChunk * 2;
  static constexpr int kTokenOffset = kTiles * kTileBytes;
  static constexpr int kTokenBytes = kTokens * kChunk * 2;
  static constexpr int kStageBytes = kTokenOffset + kTokenBytes;

  static constexpr int kNormBytes = kChunk * 2;
  static constexpr int kNormOffset = kStages * kStageBytes;
  static constexpr int kSumPitch = kRows + 4;
  static constexpr int kSumsOffset = kNormOffset + kStages * kNormBytes;
  static constexpr int kSquaresOffset = kSumsOffset + kWarps * kTokens * kSumPitch * 4;
  static constexpr int kBarrierOffset = kSquaresOffset + kWarps * kTokens * 4;
  static constexpr int kSharedBytes = kBarrierOffset + kStages * 2 * 8;
  static constexpr int kBlocksPerMultiprocessor = kSharedBytes <= 113 * 1024 ? 2 : 1;

  // Outputs of a group that one consumer thread finishes.
  static constexpr int kOutputs = (kTokens * kRows + kConsumers - 1) / kConsumers;
};

// How the rows of a weight matrix are shared out.
struct Tiling {
  int k;
  int tile_rows;  // rows of a tile in one half of W (gate, up), or in all of it
  int tiles;
  int blocks;  // of the grid
};

struct Params {
  SkinnyGemm gemm;
  Tiling tiling;
  CUtensorMap w;     // [halves][k / 64][rows of a half][64]
  CUtensorMap x;     // [k / 64][m][64]
  CUtensorMap norm;  // [k / 64][64]; undefined without norm_weight
};

__host__ __device__ __forceinline__ bool IsGated(const SkinnyGemm& gemm) {
  return gemm.activation == SkinnyActivation::kSiluAndMul ||
         gemm.activation == SkinnyActivation::kGeluTanhAndMul;
}

// A place in the sequence of chunks that a block works through.
template <class S>
struct Cursor {
  int tile;
  int end_tile;
  int k;
  int column = 0;

  __device__ static Cursor Begin(const Tiling& tiling) {
    const int64_t tiles = tiling.tiles;
    return {static_cast<int>(tiles * blockIdx.x / tiling.blocks),
            static_cast<int>(tiles * (blockIdx.x + 1) / tiling.blocks), tiling.k};
  }
  __device__ bool done() const { return tile >= end_tile; }
  __device__ int tiles() const { return min(S::kTiles, end_tile - tile); }
  __device__ void Next() {
    column += S::kChunk;
    if (column >= k) {
      column = 0;
      tile += S::kTiles;
    }
  }
};

template <class S>
struct Ring {
  uint32_t base;
  int stage = 0;
  uint32_t parity = 0;

  __device__ uint32_t data() const { return base + stage * S::kStageBytes; }
  __device__ uint32_t norm() const { return base + S::kNormOffset + stage * S::kNormBytes; }
  __device__ uint32_t full() const { return base + S::kBarrierOffset + stage * 16; }
  __device__ uint32_t empty() const { return full() + 8; }
  __device__ void Next() {
    if (++stage == S::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// The thread that keeps the ring full.
template <class S>
class Producer {
 public:
  __device__ Producer(const Params& params, uint32_t shared)
      : params_(params), ring_{shared}, normed_(params.gemm.norm_weight != nullptr) {}

  __device__ void Run() {
    const bool prefetch = params_.gemm.prefetch_weights;
    Cursor<S> tokens = Cursor<S>::Begin(params_.tiling);
    Cursor<S> weights = tokens;
    Ring<S> ring = ring_;
    if (!prefetch) ptx::GridDependencyWait();
    for (int i = 0; i < S::kStages && !weights.done(); ++i, weights.Next(), ring.Next()) {
      ptx::BarrierExpect(ring.full(), weights.tiles() * S::kTileBytes);
      RequestWeights(weights, ring);
    }
    if (prefetch) ptx::GridDependencyWait();
    for (int i = 0; i < S::kStages && !tokens.done(); ++i, tokens.Next(), ring_.Next()) {
      ptx::BarrierArriveExpect(ring_.full(), token_bytes());
      RequestTokens(tokens, ring_);
    }
    ring_.parity = 0;  // a stage is free when its consumers' first phase has ended
    for (; !weights.done(); weights.Next(), ring_.Next()) {
      ptx::BarrierWait(ring_.empty(), ring_.parity);
      ptx::BarrierArriveExpect(ring_.full(), weights.tiles() * S::kTileBytes + token_bytes());
      RequestWeights(weights, ring_);
      RequestTokens(weights, ring_);
    }
  }

 private:
  __device__ int token_bytes() const { return S::kTokenBytes + (normed_ ? S::kNormBytes : 0); }

  __device__ void RequestWeights(const Cursor<S>& at, const Ring<S>& ring) {
    const int tiles = at.tiles();
    for (int t = 0; t < tiles; ++t) {
      ptx::BulkCopyTensor4(ring.data() + t * S::kTileBytes, &params_.w, 0,
                           (at.tile + t) * params_.tiling.tile_rows, at.column / kBlockColumns, 0,
                           ring.full(), policy_);
    }
  }

  __device__ void RequestTokens(const Cursor<S>& at, const Ring<S>& ring) {
    const int block = at.column / kBlockColumns;
    ptx::BulkCopyTensor3(ring.data() + S::kTokenOffset, &params_.x, 0, 0, block, ring.full());
    if (normed_) ptx::BulkCopyTensor2(ring.norm(), &params_.norm, 0, block, ring.full());
  }

  const Params& params_;
  Ring<S> ring_;
  const bool normed_;
  const uint64_t policy_ = ptx::EvictFirstPolicy();
};

__device__ __forceinline__ float LoadBf16(const void* p, int64_t i) {
  return __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]);
}

__device__ __forceinline__ float GeluTanh(float v) {
  const float inner = 0.7978845608028654f * (v + 0.044715f * v * v * v);
  return 0.5f * v * (1.0f + tanhf(inner));
}

// The warps that multiply, and finish the outputs of each group of tiles.
template <class S>
class Consumer {
 public:
  __device__ Consumer(const SkinnyGemm& gemm, char* shared)
      : gemm_(gemm),
        ring_{ptx::SharedAddress(shared)},
        sums_(reinterpret_cast<float*>(shared + S::kSumsOffset)),
        squares_(reinterpret_cast<float*>(shared + S::kSquaresOffset)),
        gated_(IsGated(gemm)),
        warp_(threadIdx.x / 32),
        lane_(threadIdx.x % 32) {
    // ldmatrix takes the row address of matrix lane/8 from lane; see the fragment layouts of mma.
    const int row = lane_ & 7;
    const int second = (lane_ >> 3) & 1;  // the lower eight rows of a tile
    weight_lane_ = row * 128 + (((lane_ >> 4) ^ row) << 4) +
                   second * (gated_ ? 8 * S::kBlocks * 128 : 8 * 128);
    block_pitch_ = gated_ ? 8 * 128 : kTileRows * 128;
    token_lane_ = S::kTokenOffset + row * 128 + (((lane_ >> 3) ^ row) << 4);
  }

  __device__ void Run(Cursor<S> cursor) {
    ptx::GridDependencyWait();
    while (!cursor.done()) {
      const int tile = cursor.tile;
      const int tiles = cursor.tiles();
      LoadAddends(tile, tiles);
      Clear();
      for (; !cursor.done() && cursor.tile == tile; cursor.Next()) {
        ptx::BarrierWait(ring_.full(), ring_.parity);
        Accumulate(tiles);
        ring_.Next();
      }
      PublishSums();
      ptx::NamedBarrier(1, S::kConsumers);
      Finish(tile, tiles);
      ptx::NamedBarrier(1, S::kConsumers);
    }
  }

 private:
  // The output that is the thread's i-th of the group.
  struct Output {
    int token;
    int row;     // of the group's sums; of the gate, if gated
    int column;  // of y
    bool valid;
  };

  __device__ Output Locate(int tile, int tiles, int i) const {
    const int index = threadIdx.x + i * S::kConsumers;
    Output out;
    out.token = index / S::kRows;
    const int r = index % S::kRows;
    if (gated_) {
      out.row = (r / 8) * kTileRows + r % 8;
      out.column = tile * 8 + r;
      out.valid = r < tiles * 8;
    } else {
      out.row = r;
      out.column = tile * kTileRows + r;
      out.valid = r < tiles * kTileRows;
    }
    out.valid = out.valid && out.token < gemm_.m && out.column < gemm_.n;
    return out;
  }

  __device__ void Clear() {
#pragma unroll
    for (int t = 0; t < S::kTiles; ++t) {
#pragma unroll
      for (int j = 0; j < S::kTokenTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int s = 0; s < S::kSums; ++s) sum_[s][t][j][i] = 0;
        }
      }
    }
#pragma unroll
    for (int j = 0; j < S::kTokenTiles; ++j) square_[j] = 0;
  }

  // Adds the products of the warp's steps of the chunk, and frees the stage as soon as all of it is
  // in registers. What lies beyond K is zero.
  __device__ void Accumulate(int tiles) {
    const bool normed = gemm_.norm_weight != nullptr;
    uint32_t b[S::kStepsPerWarp][S::kTokenTiles][4];
    uint32_t norm[S::kStepsPerWarp][4];
    uint32_t a[S::kStepsPerWarp][S::kTiles][2][4];
#pragma unroll
    for (int i = 0; i < S::kStepsPerWarp; ++i) {
      const int step = warp_ + i * S::kWarps;
      const uint32_t half = (step & 1) << 6;  // of the 128 bytes
      const uint32_t tokens = (ring_.data() + step / 2 * (S::kTokens * 128) + token_lane_) ^ half;
      const uint32_t weights = (ring_.data() + step / 2 * block_pitch_ + weight_lane_) ^ half;
#pragma unroll
      for (int j = 0; j < S::kTokenTiles; ++j) ptx::LoadMatrix4(b[i][j], tokens + j * 8 * 128);
      if (normed) LoadNorm(norm[i], ring_.norm() + step * (kStep * 2) + (lane_ & 3) * 4);
#pragma unroll
      for (int t = 0; t < S::kTiles; ++t) {
        if (S::kTiles > 2 && t >= tiles) break;
        ptx::LoadMatrix4(a[i][t][0], weights + t * S::kTileBytes);
        ptx::LoadMatrix4(a[i][t][1], (weights ^ 32) + t * S::kTileBytes);
      }
    }
    __syncwarp();
    if (lane_ == 0) ptx::BarrierArrive(ring_.empty());
#pragma unroll
    for (int i = 0; i < S::kStepsPerWarp; ++i) {
      if (normed) ApplyNorm(norm[i], b[i]);
#pragma unroll
      for (int t = 0; t < S::kTiles; ++t) {
        if (S::kTiles > 2 && t >= tiles) break;
#pragma unroll
        for (int j = 0; j < S::kTokenTiles; ++j) {
          ptx::MultiplyAccumulate(sum_[0][t][j], a[i][t][0], b[i][j][0], b[i][j][1]);
          ptx::MultiplyAccumulate(sum_[S::kSums - 1][t][j], a[i][t][1], b[i][j][2], b[i][j][3]);
        }
      }
    }
  }

  __device__ static void LoadNorm(uint32_t (&norm)[4], uint32_t address) {
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(norm[p]) : "r"(address + p * 16));
    }
  }

  __device__ void ApplyNorm(const uint32_t (&norm)[4], uint32_t (&b)[S::kTokenTiles][4]) {
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const auto weight = *reinterpret_cast<const __nv_bfloat162*>(&norm[p]);
#pragma unroll
      for (int j = 0; j < S::kTokenTiles; ++j) {
        auto& x = *reinterpret_cast<__nv_bfloat162*>(&b[j][p]);
        const float2 v = __bfloat1622float2(x);
        square_[j] = fmaf(v.x, v.x, square_[j]);
        square_[j] = fmaf(v.y, v.y, square_[j]);
        x = __hmul2(x, weight);
      }
    }
  }

  __device__ void PublishSums() {
    const int row = lane_ / 4;
    float* sums = sums_ + (warp_ * S::kTokens + (lane_ & 3) * 2) * S::kSumPitch + row;
#pragma unroll
    for (int j = 0; j < S::kTokenTiles; ++j) {
#pragma unroll
      for (int t = 0; t < S::kTiles; ++t) {
        float* at = sums + j * 8 * S::kSumPitch + t * kTileRows;
        at[0] = Sum(t, j, 0);
        at[S::kSumPitch] = Sum(t, j, 1);
        at[8] = Sum(t, j, 2);
        at[S::kSumPitch + 8] = Sum(t, j, 3);
      }
      float square = square_[j];
      square += __shfl_xor_sync(0xffffffff, square, 1);
      square += __shfl_xor_sync(0xffffffff, square, 2);
      if ((lane_ & 3) == 0) squares_[warp_ * S::kTokens + j * 8 + row] = square;
    }
  }

  __device__ float Sum(int t, int j, int i) const {
    return S::kSums == 1 ? sum_[0][t][j][i] : sum_[0][t][j][i] + sum_[S::kSums - 1][t][j][i];
  }

  // Reads what is added to the outputs early, so that its latency passes behind the products.
  __device__ void LoadAddends(int tile, int tiles) {
#pragma unroll
    for (int i = 0; i < S::kOutputs; ++i) {
      const Output out = Locate(tile, tiles, i);
      bias_[i] = 0;
      residual_[i] = 0;
      if (!out.valid) continue;
      if (gemm_.bias != nullptr) bias_[i] = LoadBf16(gemm_.bias, out.column);
      if (gemm_.residual != nullptr) {
        residual_[i] = LoadBf16(gemm_.residual, out.token * gemm_.residual_stride + out.column);
      }
    }
  }

  __device__ void Finish(int tile, int tiles) {
#pragma unroll
    for (int i = 0; i < S::kOutputs; ++i) {
      const Output out = Locate(tile, tiles, i);
      if (!out.valid) continue;
      const float scale = Scale(out.token);
      float v = SumOfWarps(out.token, out.row) * scale + bias_[i];
      if (gated_) {
        float up = SumOfWarps(out.token, out.row + 8) * scale;
        if (gemm_.bias != nullptr) up += LoadBf16(gemm_.bias, gemm_.n + out.column);
        v = gemm_.activation == SkinnyActivation::kSiluAndMul ? v / (1.0f + expf(-v)) : GeluTanh(v);
        v *= up;
      } else if (gemm_.activation == SkinnyActivation::kRelu) {
        v = fmaxf(v, 0.0f);
      }
      v += residual_[i];
      const int64_t at = out.token * gemm_.y_stride + out.column;
      if (gemm_.fp32_output) {
        static_cast<float*>(gemm_.y)[at] = v;
      } else {
        static_cast<__nv_bfloat16*>(gemm_.y)[at] = __float2bfloat16_rn(v);
      }
    }
  }

  __device__ float SumOfWarps(int token, int row) const {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < S::kWarps; ++w) {
      sum += sums_[(w * S::kTokens + token) * S::kSumPitch + row];
    }
    return sum;
  }

  __device__ float Scale(int token) const {
    if (gemm_.norm_weight == nullptr) return 1.0f;
    float square = 0;
#pragma unroll
    for (int w = 0; w < S::kWarps; ++w) square += squares_[w * S::kTokens + token];
    return rsqrtf(square / static_cast<float>(gemm_.k) + gemm_.norm_epsilon);
  }

  const SkinnyGemm& gemm_;
  Ring<S> ring_;
  float* const sums_;
  float* const squares_;
  const bool gated_;
  const int warp_;
  const int lane_;
  uint32_t weight_lane_;
  uint32_t block_pitch_;
  uint32_t token_lane_;

  float sum_[S::kSums][S::kTiles][S::kTokenTiles][4];
  float square_[S::kTokenTiles];
  float bias_[S::kOutputs];
  float residual_[S::kOutputs];
};

template <class S>
__global__ void __launch_bounds__(S::kThreads, S::kBlocksPerMultiprocessor)
    SkinnyGemmKernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) char shared[];
  ptx::LaunchDependents();
  if (threadIdx.x == 0) {
    Ring<S> ring{ptx::SharedAddress(shared)};
    for (int i = 0; i < S::kStages; ++i, ring.Next()) {
      ptx::BarrierInit(ring.full(), 1);
      ptx::BarrierInit(ring.empty(), S::kWarps);
    }
    ptx::BarrierInitFence();
  }
  __syncthreads();
  if (threadIdx.x == S::kConsumers) {
    Producer<S>(params, ptx::SharedAddress(shared)).Run();
  } else if (threadIdx.x < S::kConsumers) {
    Consumer<S>(params.gemm, shared).Run(Cursor<S>::Begin(params.tiling));
  }
}

}  // namespace palimpsest::skinny

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_SKINNY_GEMM_KERNEL_CUH_
