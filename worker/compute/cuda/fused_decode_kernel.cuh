// The kernel behind fused_decode.h.
//
// A thread block owns a stretch of the step's list of (sequence, KV head, block), of which each
// warp takes a part, and a ring of slots in shared memory for each warp, each of which takes keys
// and values of one head of one block by one tensor copy. A warp asks for the next block into a
// slot as soon as it has used the last one; warps wait for each other once, when all have done
// their parts. A head whose blocks several warps took is then put together in order, by the warp
// with its first ones; one that several thread blocks took, by the last of them to get there.
// Scores are K q^T with tokens as the 16 rows of mma.m16n8k16 and the query heads of
// the KV head as its 8 columns, outputs V^T p^T with dimensions as rows.
//
// A sequence's last block is copied so that its newest token is row 15; the rows before the
// block's first token lie outside the tensor and come as zeros. They are not read from memory, but
// Hopper's copy engine translates the tensor's own address for them: if block 0 is not mapped, the
// copy is an illegal access. Keys and values of the newest token are put into row 15 from
// registers.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_FUSED_DECODE_KERNEL_CUH_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_FUSED_DECODE_KERNEL_CUH_

#include <cuda.h>
#include <cuda_bf16.h>

#include "worker/compute/cuda/fused_decode_shares.cuh"
#include "worker/compute/cuda/ptx.cuh"

namespace palimpsest::cuda::fused_decode {

struct Params {
  CUtensorMap map;
  const __nv_bfloat16* qkv;
  const float2* rotations;
  const int64_t* kv_slots;
  const int32_t* indices;
  const int32_t* indptr;
  const int32_t* last_block_len;
  __nv_bfloat16* keys;
  __nv_bfloat16* values;
  __nv_bfloat16* output;
  float4* partials;
  int32_t* arrivals;
  int32_t sequences;
  int32_t layer;
  int32_t heads;
  int32_t kv_heads;
  int32_t group;
  float scale_log2;
};

__device__ __forceinline__ uint32_t Transposed(uint32_t matrix) {
  uint32_t out;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(matrix));
  return out;
}

__device__ __forceinline__ void LoadMatrix4Transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

__device__ __forceinline__ uint32_t Pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ float2 Unpack(uint32_t pair) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pair));
}

// Rotates dimensions (low, high) of two neighbouring pairs; r holds both cosines and sines.
__device__ __forceinline__ void Rotate(uint32_t& low, uint32_t& high, const float4& r) {
  const float2 l = Unpack(low), h = Unpack(high);
  low = Pack(l.x * r.x - h.x * r.y, l.y * r.z - h.y * r.w);
  high = Pack(h.x * r.x + l.x * r.y, h.y * r.z + l.y * r.w);
}

// Of the lanes whose numbers differ in the bits above the lowest two: those of one pair of heads.
__device__ __forceinline__ float MaxOfTokens(float v) {
  v = fmaxf(v, __shfl_xor_sync(0xffffffff, v, 4));
  v = fmaxf(v, __shfl_xor_sync(0xffffffff, v, 8));
  return fmaxf(v, __shfl_xor_sync(0xffffffff, v, 16));
}

__device__ __forceinline__ float SumOfTokens(float v) {
  v += __shfl_xor_sync(0xffffffff, v, 4);
  v += __shfl_xor_sync(0xffffffff, v, 8);
  return v + __shfl_xor_sync(0xffffffff, v, 16);
}

template <class S>
class Warp {
 public:
  __device__ Warp(const Params& params, char* shared)
      : params_(params),
        indptr_(reinterpret_cast<const int32_t*>(shared + S::kIndptrOffset)),
        heads_(reinterpret_cast<float4*>(shared + S::kHeadOffset)),
        warp_(threadIdx.x / 32),
        lane_(threadIdx.x % 32),
        pair_(lane_ & 3),
        row_(lane_ / 4) {
    slots_ = ptx::SharedAddress(shared) + warp_ * S::kSlots * S::kSlotBytes;
    barriers_ = ptx::SharedAddress(shared) + S::kBarrierOffset + warp_ * S::kSlots * 8;
    units_ = reinterpret_cast<Unit*>(shared + S::kUnitOffset) + warp_ * S::kSlots;
    // ldmatrix takes the row address of matrix lane / 8 from lane.
    const int in_matrix = lane_ & 7;
    key_lane_ = (((lane_ >> 3) & 1) * 8 + in_matrix) * kRowBytes;
    value_lane_ = ((lane_ >> 4) * 8 + in_matrix) * kRowBytes;
    key_chunk_ = (lane_ >> 4) ^ in_matrix;
    value_chunk_ = ((lane_ >> 3) & 1) ^ in_matrix;
  }

  __device__ void InitBarriers() const {
    if (lane_ == 0) {
      for (int i = 0; i < S::kSlots; ++i) ptx::BarrierInit(barriers_ + i * 8, 1);
      ptx::BarrierInitFence();
    }
    __syncwarp();
  }

  __device__ void Run(const Shares& shares) {
    begin_ = shares.BeginOfWarp(warp_);
    end_ = shares.BeginOfWarp(warp_ + 1);
    const bool append = params_.rotations != nullptr;
    if (!append) ptx::GridDependencyWait();
    next_ = begin_;
    for (int slot = 0; slot < S::kSlots; ++slot) Request(slot);
    if (append) ptx::GridDependencyWait();
    const bool first_of_block = begin_ == shares.Begin(shares.block);
    Unit at = {};
    bool started = false;  // the head that `at` is of, by this warp
    bool open = false;     // other warps may have more of it, and this one puts it together
    int slot = 0;
    uint32_t parity = 0;
    for (int64_t unit = begin_; unit < end_; ++unit) {
      at = units_[slot];
      if (unit == begin_ || at.block == 0) {
        started = at.block == 0;
        StartHead(at, append);
      }
      const bool last_block = at.block + 1 == at.blocks;
      ptx::BarrierWait(barriers_ + slot * 8, parity);
      if (append && last_block) Append(at, slot);
      Attend(slots_ + slot * S::kSlotBytes, at.absent);
      __syncwarp();
      Request(slot);
      if (last_block || unit + 1 == end_) {
        sum_[0] = SumOfTokens(sum_[0]);
        sum_[1] = SumOfTokens(sum_[1]);
        if (last_block && started) {
          Write(at);
        } else if (!started && !first_of_block) {
          Store(Head(warp_));
        } else if (last_block) {
          if (Join(shares, at, unit - at.block, false)) Write(at);
        } else {
          open = true;
        }
      }
      if (++slot == S::kSlots) {
        slot = 0;
        parity ^= 1;
      }
    }
    __syncthreads();
    if (open) Complete(shares, at, end_ - 1 - at.block, started);
  }

 private:
  // Finds what the next units are, one for each lane.
  __device__ void LookAhead() {
    const int64_t unit = next_ + lane_;
    if (unit >= end_) return;
    int low = 0, high = params_.sequences - 1;  // the last sequence that begins at or before
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (int64_t{indptr_[middle]} * params_.kv_heads <= unit) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    const int32_t first = indptr_[low];
    const int32_t blocks = indptr_[low + 1] - first;
    const auto within = static_cast<int32_t>(unit - int64_t{first} * params_.kv_heads);
    const int32_t block = within % blocks;
    ahead_ = {low, static_cast<int16_t>(within / blocks), 0, block, blocks};
    if (block + 1 == blocks) {
      ahead_.absent = static_cast<int16_t>(kTokens - params_.last_block_len[low]);
    }
    ahead_id_ = params_.indices[first + block];
  }

  // Asks for the next unit, if there is one, into a slot that nobody reads any more.
  __device__ void Request(int slot) {
    if (next_ == end_) return;
    const int from = static_cast<int>(next_ - begin_) % 32;
    if (from == 0) LookAhead();
    if (lane_ == from) {
      units_[slot] = ahead_;
      const uint32_t barrier = barriers_ + slot * 8;
      ptx::BarrierArriveExpect(barrier, S::kSlotBytes);
      ptx::BulkCopyTensor5(slots_ + slot * S::kSlotBytes, &params_.map, 0, -ahead_.absent,
                           ahead_.head * S::kHalves, 2 * params_.layer, ahead_id_, barrier);
    }
    __syncwarp();
    ++next_;
  }

  // Loads and rotates the head's queries, and what the newest token adds.
  __device__ void StartHead(const Unit& at, bool append) {
    const int64_t row_elements = int64_t{params_.heads + 2 * params_.kv_heads} * S::kHeadDim;
    const auto* row = reinterpret_cast<const uint32_t*>(params_.qkv + at.sequence * row_elements);
    const auto* query = row + (at.head * params_.group + row_) * (S::kHeadDim / 2) + pair_;
    const bool valid = row_ < params_.group;
#pragma unroll
    for (int s = 0; s < S::kSteps; ++s) {
      query_[s][0] = valid ? query[s * 8] : 0;
      query_[s][1] = valid ? query[s * 8 + 4] : 0;
    }
    if (append) {
      const auto* rotations = reinterpret_cast<const float4*>(
          params_.rotations + int64_t{at.sequence} * (S::kHeadDim / 2));
      constexpr int kQuarter = S::kHeadDim / 4;  // pairs of rotated dimensions
      const int word = lane_ % kQuarter;
      const auto* key = row + (params_.heads + at.head) * (S::kHeadDim / 2);
      const auto* value = key + params_.kv_heads * (S::kHeadDim / 2);
      new_key_[0] = key[word];
      new_key_[1] = key[word + kQuarter];
      new_value_[0] = value[word];
      new_value_[1] = value[word + kQuarter];
      new_slot_ = params_.kv_slots[at.sequence];
      const float4 rotation = rotations[word];
#pragma unroll
      for (int s = 0; s < S::kSteps / 2; ++s) {
        Rotate(query_[s][0], query_[s + S::kSteps / 2][0], rotations[s * 8 + pair_]);
        Rotate(query_[s][1], query_[s + S::kSteps / 2][1], rotations[s * 8 + 4 + pair_]);
      }
      Rotate(new_key_[0], new_key_[1], rotation);
    }
    largest_[0] = largest_[1] = -INFINITY;
    sum_[0] = sum_[1] = 0;
#pragma unroll
    for (int s = 0; s < S::kSteps; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) output_[s][i] = 0;
    }
  }

  // Puts the newest token into row 15 of the slot and into the cache.
  __device__ void Append(const Unit& at, int slot) {
    constexpr int kQuarter = S::kHeadDim / 4;
    if (lane_ < kQuarter) {
      const int64_t to = new_slot_ + at.head * S::kHeadDim;
      auto* keys = reinterpret_cast<uint32_t*>(params_.keys + to);
      auto* values = reinterpret_cast<uint32_t*>(params_.values + to);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int word = lane_ + i * kQuarter;
        keys[word] = new_key_[i];
        values[word] = new_value_[i];
        const int chunk = (word % 32 / 4) ^ ((kTokens - 1) & 7);
        const uint32_t address = slots_ + slot * S::kSlotBytes + word / 32 * (kTokens * kRowBytes) +
                                 (kTokens - 1) * kRowBytes + chunk * 16 + word % 4 * 4;
        ptx::StoreShared(address, new_key_[i]);
        ptx::StoreShared(address + S::kPlaneBytes, new_value_[i]);
      }
    }
    ptx::FenceAsyncProxy();
    __syncwarp();
  }

  // Adds a block; its first `absent` rows are none of the sequence.
  __device__ void Attend(uint32_t slot, int absent) {
    float even[4] = {0, 0, 0, 0}, odd[4] = {0, 0, 0, 0};
#pragma unroll
    for (int s = 0; s < S::kSteps; ++s) {
      uint32_t keys[4];
      ptx::LoadMatrix4(keys, slot + s / 4 * (kTokens * kRowBytes) + key_lane_ +
                                 ((key_chunk_ ^ (s % 4 * 2)) << 4));
      ptx::MultiplyAccumulate(s % 2 == 0 ? even : odd, keys, query_[s][0], query_[s][1]);
    }
    float score[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      score[i] = (even[i] + odd[i]) * params_.scale_log2;
      if (row_ + i / 2 * 8 < absent) score[i] = -INFINITY;
    }
    float shrink[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float largest = fmaxf(largest_[h], MaxOfTokens(fmaxf(score[h], score[h + 2])));
      shrink[h] = exp2f(largest_[h] - largest);
      largest_[h] = largest;
      score[h] = exp2f(score[h] - largest);
      score[h + 2] = exp2f(score[h + 2] - largest);
      sum_[h] = sum_[h] * shrink[h] + score[h] + score[h + 2];
    }
    const uint32_t weights0 = Transposed(Pack(score[0], score[1]));
    const uint32_t weights1 = Transposed(Pack(score[2], score[3]));
#pragma unroll
    for (int s = 0; s < S::kSteps; ++s) {
      uint32_t values[4];
      LoadMatrix4Transposed(values, slot + S::kPlaneBytes + s / 4 * (kTokens * kRowBytes) +
                                        value_lane_ + ((value_chunk_ ^ (s % 4 * 2)) << 4));
#pragma unroll
      for (int i = 0; i < 4; ++i) output_[s][i] *= shrink[i % 2];
      ptx::MultiplyAccumulate(output_[s], values, weights0, weights1);
    }
  }

  // Adds the parts of a head that the warps behind this one have, and those of other blocks.
  __device__ void Complete(const Shares& shares, const Unit& at, int64_t first_unit, bool started) {
    const int64_t end = first_unit + at.blocks;
    for (int warp = warp_ + 1; warp < kWarps; ++warp) {
      const int64_t begin = shares.BeginOfWarp(warp);
      if (begin >= end) break;
      if (begin < shares.BeginOfWarp(warp + 1)) Add(Head(warp));
    }
    const bool whole = started && end <= shares.Begin(shares.block + 1);
    if (whole || Join(shares, at, first_unit, started)) Write(at);
  }

  // Publishes this block's part of a head. The last of the blocks that share it gathers all parts,
  // in their order; true for that one.
  __device__ bool Join(const Shares& shares, const Unit& at, int64_t first_unit, bool started) {
    float4* own = Partial(2 * shares.block + (started ? 1 : 0));
    Store(own);
    __threadfence();
    __syncwarp();
    const int32_t first = shares.BlockOf(first_unit);
    const int32_t last = shares.BlockOf(first_unit + at.blocks - 1);
    int32_t* arrivals = params_.arrivals + at.sequence * params_.kv_heads + at.head;
    int before = 0;
    if (lane_ == 0) before = atomicAdd(arrivals, 1);
    before = __shfl_sync(0xffffffff, before, 0);
    if (before != last - first) return false;
    if (lane_ == 0) *arrivals = 0;
    __threadfence();
    Gather(first, last);
    return true;
  }

  // Of lanes whose heads exist; the others' numbers are never used.
  __device__ bool valid() const { return pair_ * 2 < params_.group; }

  __device__ void Store(float4* part) const {
    if (!valid()) return;
#pragma unroll
    for (int s = 0; s < S::kSteps; ++s) {
      part[s * 32] = make_float4(output_[s][0], output_[s][1], output_[s][2], output_[s][3]);
    }
    part[S::kSteps * 32] = make_float4(largest_[0], largest_[1], sum_[0], sum_[1]);
  }

  // Adds a part that another warp of this block stored.
  __device__ void Add(const float4* part) {
    if (!valid()) return;
    const float4 of = part[S::kSteps * 32];
    const float largest[2] = {fmaxf(largest_[0], of.x), fmaxf(largest_[1], of.y)};
    const float own[2] = {exp2f(largest_[0] - largest[0]), exp2f(largest_[1] - largest[1])};
    const float other[2] = {exp2f(of.x - largest[0]), exp2f(of.y - largest[1])};
    sum_[0] = sum_[0] * own[0] + of.z * other[0];
    sum_[1] = sum_[1] * own[1] + of.w * other[1];
#pragma unroll
    for (int s = 0; s < S::kSteps; ++s) {
      const float4 o = part[s * 32];
      output_[s][0] = output_[s][0] * own[0] + o.x * other[0];
      output_[s][1] = output_[s][1] * own[1] + o.y * other[1];
      output_[s][2] = output_[s][2] * own[0] + o.z * other[0];
      output_[s][3] = output_[s][3] * own[1] + o.w * other[1];
    }
    largest_[0] = largest[0];
    largest_[1] = largest[1];
  }

  __device__ void Gather(int32_t first, int32_t last) {
    if (!valid()) return;
    const auto part_of = [&](int32_t b) { return Partial(2 * b + (b == first ? 1 : 0)); };
    float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll 8
    for (int32_t b = first; b <= last; ++b) {
      const float4 of = __ldcg(part_of(b) + S::kSteps * 32);
      largest[0] = fmaxf(largest[0], of.x);
      largest[1] = fmaxf(largest[1], of.y);
    }
    sum_[0] = sum_[1] = 0;
#pragma unroll
    for (int s = 0; s < S::kSteps; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) output_[s][i] = 0;
    }
#pragma unroll 4
    for (int32_t b = first; b <= last; ++b) {
      const float4* part = part_of(b);
      const float4 of = __ldcg(part + S::kSteps * 32);
      const float weight[2] = {exp2f(of.x - largest[0]), exp2f(of.y - largest[1])};
      sum_[0] += weight[0] * of.z;
      sum_[1] += weight[1] * of.w;
#pragma unroll
      for (int s = 0; s < S::kSteps; ++s) {
        const float4 o = __ldcg(part + s * 32);
        output_[s][0] += weight[0] * o.x;
        output_[s][1] += weight[1] * o.y;
        output_[s][2] += weight[0] * o.z;
        output_[s][3] += weight[1] * o.w;
      }
    }
  }

  // Of a warp other than the first.
  __device__ float4* Head(int warp) const {
    return heads_ + (warp - 1) * S::kPartialVectors + lane_;
  }
  __device__ float4* Partial(int32_t index) const {
    return params_.partials + int64_t{index} * S::kPartialVectors + lane_;
  }

  __device__ void Write(const Unit& at) const {
    const float inverse[2] = {1.0f / sum_[0], 1.0f / sum_[1]};
    auto* to = reinterpret_cast<uint32_t*>(params_.output) +
               (int64_t{at.sequence} * params_.heads + at.head * params_.group + row_) *
                   (S::kHeadDim / 2) +
               pair_;
#pragma unroll
    for (int s = 0; s < S::kSteps; ++s) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t words =
            Transposed(Pack(output_[s][2 * i] * inverse[0], output_[s][2 * i + 1] * inverse[1]));
        if (row_ < params_.group) to[s * 8 + i * 4] = words;
      }
    }
  }

  const Params& params_;
  const int32_t* const indptr_;
  float4* const heads_;
  const int warp_;
  const int lane_;
  const int pair_;  // of the heads in columns 2 pair_ and 2 pair_ + 1 of a fragment
  const int row_;   // of a fragment
  uint32_t slots_;
  uint32_t barriers_;
  Unit* units_;
  uint32_t key_lane_, value_lane_;
  uint32_t key_chunk_, value_chunk_;

  int64_t begin_ = 0, end_ = 0;
  int64_t next_ = 0;  // to be asked for
  // Of one of the next units, by lane; the id of its block.
  Unit ahead_ = {};
  int32_t ahead_id_ = 0;

  uint32_t query_[S::kSteps][2];
  uint32_t new_key_[2];
  uint32_t new_value_[2];
  int64_t new_slot_ = 0;
  float largest_[2];  // scores so far, of this lane's two heads
  float sum_[2];
  float output_[S::kSteps][4];
};

template <class S>
__global__ void __launch_bounds__(kThreads, 1)
    FusedDecodeKernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) char shared[];
  ptx::LaunchDependents();
  auto* indptr = reinterpret_cast<int32_t*>(shared + S::kIndptrOffset);
  for (int i = threadIdx.x; i <= params.sequences; i += kThreads) indptr[i] = params.indptr[i];
  __syncthreads();
  const int64_t units = int64_t{indptr[params.sequences]} * params.kv_heads;
  const int32_t blocks = BlocksFor(units, params.sequences * params.kv_heads);
  if (blockIdx.x >= blocks || units == 0) return;
  Warp<S> warp(params, shared);
  warp.InitBarriers();
  warp.Run({units, blocks, static_cast<int32_t>(blockIdx.x)});
}

}  // namespace palimpsest::cuda::fused_decode

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_FUSED_DECODE_KERNEL_CUH_
