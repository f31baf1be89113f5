#include <cooperative_groups.h>

#include <cfloat>
#include <utility>

#include "worker/compute/cuda/device_util.cuh"
#include "worker/compute/cuda/sampler.h"

namespace palimpsest::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kBins = 2048;
// Blocks that look for the largest logit of a row, where rows are few; one cluster.
constexpr int kParts = 8;
constexpr int32_t kMaxSharedRows = 32;
__device__ constexpr int kDigitShifts[] = {21, 10, 0};
__device__ constexpr int kDigitBits[] = {11, 11, 10};
// Weights are multiples of 2^-40; e^-27.7 is about one.
constexpr float kWeightScale = 0x1p40f;
constexpr float kRange = 32.0f;

// The next three functions follow worker/core/{sampling.cc,philox.h} step by step, without fused
// multiply-adds, so that both round alike.
__device__ float Sanitized(float logit) {
  if (isnan(logit)) return -INFINITY;
  return fminf(logit, FLT_MAX);
}

__device__ float ExpOfNegative(float x) {
  if (!(x > -87.0f)) return 0.0f;
  constexpr float kRound = 12582912.0f;
  const float shifted = __fadd_rn(__fmul_rn(x, 1.44269504f), kRound);
  const float n = __fsub_rn(shifted, kRound);
  const float r = __fadd_rn(__fsub_rn(x, __fmul_rn(n, 0.693359375f)), __fmul_rn(n, 2.12194440e-4f));
  float p = 1.0f / 5040;
  const float coefficients[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
#pragma unroll
  for (const float c : coefficients) p = __fadd_rn(__fmul_rn(p, r), c);
  return __int_as_float(__float_as_int(p) +
                        ((__float_as_int(shifted) - __float_as_int(kRound)) << 23));
}

__device__ uint64_t PhiloxWord(uint64_t key, uint64_t index) {
  uint32_t counter[4] = {static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32), 0, 0};
  auto low = static_cast<uint32_t>(key);
  auto high = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * counter[0];
    const uint64_t b = uint64_t{0xCD9E8D57} * counter[2];
    counter[0] = static_cast<uint32_t>(b >> 32) ^ counter[1] ^ low;
    counter[1] = static_cast<uint32_t>(b);
    counter[2] = static_cast<uint32_t>(a >> 32) ^ counter[3] ^ high;
    counter[3] = static_cast<uint32_t>(a);
    low += 0x9E3779B9;
    high += 0xBB67AE85;
  }
  return (uint64_t{counter[1]} << 32) | counter[0];
}

struct Best {
  float value;
  int32_t id;
};

// Larger values first, smaller ids among equals.
__device__ bool Better(const Best& a, const Best& b) {
  return a.value != b.value ? a.value > b.value : a.id < b.id;
}

struct Shared {
  uint32_t counts[kBins];
  unsigned long long masses[kBins];
  uint64_t scan[kWarps];
  Best best[kWarps];
  Best parts[kParts];
  uint64_t found_before;
  int32_t found;
};

// The sum of the values of all threads before this one; *total gets that of all threads.
__device__ uint64_t BlockScan(uint64_t value, Shared& shared, uint64_t* total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint64_t sum = value;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint64_t other = __shfl_up_sync(0xffffffff, sum, offset);
    if (lane >= offset) sum += other;
  }
  __syncthreads();
  if (lane == 31) shared.scan[warp] = sum;
  __syncthreads();
  uint64_t before = 0, all = 0;
  for (int w = 0; w < kWarps; ++w) {
    if (w == warp) before = all;
    all += shared.scan[w];
  }
  *total = all;
  return before + sum - value;
}

__device__ Best BlockBest(Best best, Shared& shared) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const Best other = {__shfl_xor_sync(0xffffffff, best.value, offset),
                        __shfl_xor_sync(0xffffffff, best.id, offset)};
    if (Better(other, best)) best = other;
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared.best[threadIdx.x / 32] = best;
  __syncthreads();
  best = shared.best[0];
  for (int w = 1; w < kWarps; ++w) {
    if (Better(shared.best[w], best)) best = shared.best[w];
  }
  return best;
}

// A row's logits after the penalty, with what is derived from them.
class Row {
 public:
  __device__ Row(const float* logits, int32_t size, float penalty, const uint32_t* penalized)
      : logits_(logits), size_(size), penalty_(penalty), penalized_(penalized) {}

  __device__ int32_t size() const { return size_; }
  __device__ float Raw(int32_t id) const { return Sanitized(logits_[id]); }

  __device__ float Value(int32_t id) const { return Penalized(id, Raw(id)); }

  // Calls visit(id, value) for this thread's share of one of `parts` parts of the row, with several
  // loads in flight.
  template <int parts = 1, typename Visit>
  __device__ void ForEach(Visit visit, int part = 0) const {
    constexpr int kLoads = 8;
    constexpr int kLanes = parts * kThreads;
    const int32_t begin = part * kThreads + static_cast<int32_t>(threadIdx.x);
    for (int32_t first = begin; first < size_; first += kLoads * kLanes) {
      float raw[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int32_t id = first + i * kLanes;
        raw[i] = id < size_ ? logits_[id] : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int32_t id = first + i * kLanes;
        if (id < size_) visit(id, Penalized(id, Sanitized(raw[i])));
      }
    }
  }

  __device__ float Penalized(int32_t id, float value) const {
    if (penalty_ != 1.0f && (penalized_[id / 32] >> (id % 32) & 1) != 0) {
      value = Sanitized(value > 0 ? __fdiv_rn(value, penalty_) : __fmul_rn(value, penalty_));
    }
    return value;
  }

  __device__ void SetScale(float largest, float temperature) {
    largest_ = largest;
    temperature_ = temperature;
    rank_scale_ = 0x1p32f / (kRange * temperature);
  }
  // Of the most likely token: 1.
  __device__ float WeightOf(float value) const {
    return ExpOfNegative(__fdiv_rn(value - largest_, temperature_));
  }
  __device__ uint64_t Mass(float weight) const { return __float2ull_rz(weight * kWeightScale); }
  // Grows as the value falls; equal ranks differ by less than temperature * 2^-27.
  __device__ uint32_t Rank(float value) const {
    return static_cast<uint32_t>(fminf((largest_ - value) * rank_scale_, 4294967040.0f));
  }

 private:
  const float* logits_;
  const int32_t size_;
  const float penalty_;
  const uint32_t* penalized_;
  float largest_ = 0;
  float temperature_ = 1;
  float rank_scale_ = 0;
};

// The tokens kept: ranks below `rank`, and of those at `rank` the ids up to `last_id`.
struct Cut {
  uint32_t rank = 0xffffffff;
  int32_t last_id = 0x7fffffff;
  uint64_t mass = 0;  // of all that are kept

  __device__ bool Keeps(uint32_t r, int32_t id) const {
    return r < rank || (r == rank && id <= last_id);
  }
};

// Finds the bin at which the running sum of `of(bin)` reaches `target` (at least 1, at most the
// sum of all). Returns it; *before gets the sum of the bins before.
template <typename Of>
__device__ int32_t FindBin(Of of, uint64_t target, Shared& shared, uint64_t* before) {
  const int first = threadIdx.x * 2;
  const uint64_t one = of(first), two = of(first + 1);
  uint64_t total;
  const uint64_t start = BlockScan(one + two, shared, &total);
  if (start < target && start + one + two >= target) {
    const bool second = start + one < target;
    shared.found = first + second;
    shared.found_before = second ? start + one : start;
  }
  __syncthreads();
  *before = shared.found_before;
  return shared.found;
}

// The smallest set of the most likely tokens whose count (by_mass: mass) reaches `target`; all
// that have any mass if there are not enough.
__device__ Cut SelectBest(const Row& row, bool by_mass, uint64_t target, Shared& shared) {
  Cut cut;
  uint32_t prefix = 0;
  uint64_t mass_before = 0, count_at = 0, mass_at = 0;
  for (int level = 0; level < 3; ++level) {
    const int shift = kDigitShifts[level], bits = kDigitBits[level];
    __syncthreads();
    for (int bin = threadIdx.x; bin < kBins; bin += kThreads) {
      shared.counts[bin] = 0;
      shared.masses[bin] = 0;
    }
    __syncthreads();
    row.ForEach([&](int32_t, float value) {
      const uint32_t rank = row.Rank(value);
      if (level > 0 && (rank >> (shift + bits)) != prefix) return;
      const uint64_t mass = row.Mass(row.WeightOf(value));
      if (mass == 0) return;
      const uint32_t bin = (rank >> shift) & ((1u << bits) - 1);
      atomicAdd(&shared.counts[bin], 1u);
      atomicAdd(&shared.masses[bin], static_cast<unsigned long long>(mass));
    });
    __syncthreads();
    const auto count_of = [&](int bin) { return uint64_t{shared.counts[bin]}; };
    const auto mass_of = [&](int bin) { return uint64_t{shared.masses[bin]}; };
    if (level == 0) {
      uint64_t all_count, all_mass;
      BlockScan(count_of(2 * threadIdx.x) + count_of(2 * threadIdx.x + 1), shared, &all_count);
      BlockScan(mass_of(2 * threadIdx.x) + mass_of(2 * threadIdx.x + 1), shared, &all_mass);
      cut.mass = all_mass;
      if (target >= (by_mass ? all_mass : all_count)) return cut;
    }
    uint64_t before;
    const int32_t bin = by_mass ? FindBin(mass_of, target, shared, &before)
                                : FindBin(count_of, target, shared, &before);
    target -= before;
    uint64_t all;
    const int first = threadIdx.x * 2;
    BlockScan((first < bin ? mass_of(first) : 0) + (first + 1 < bin ? mass_of(first + 1) : 0),
              shared, &all);
    mass_before += all;
    count_at = count_of(bin);
    mass_at = mass_of(bin);
    prefix = prefix << bits | static_cast<uint32_t>(bin);
    __syncthreads();
  }
  cut.rank = prefix;
  const uint64_t each = mass_at / count_at;
  uint64_t needed = by_mass ? (target + each - 1) / each : target;
  if (needed > count_at) needed = count_at;
  cut.mass = mass_before + needed * each;
  if (needed == count_at) return cut;
  uint64_t seen = 0;
  for (int32_t start = 0; start < row.size(); start += kThreads) {
    const int32_t id = start + static_cast<int32_t>(threadIdx.x);
    const bool at = id < row.size() && row.Rank(row.Value(id)) == prefix;
    uint64_t total;
    const uint64_t before = seen + BlockScan(at ? 1 : 0, shared, &total);
    if (at && before + 1 == needed) shared.found = id;
    seen += total;
    if (seen >= needed) break;
  }
  __syncthreads();
  cut.last_id = shared.found;
  __syncthreads();
  return cut;
}

// The mass that token `id` has in the draw.
__device__ uint64_t DrawMass(const Row& row, const Cut& cut, float min_weight, int32_t id) {
  const float value = row.Value(id);
  const float weight = row.WeightOf(value);
  if (weight < min_weight || !cut.Keeps(row.Rank(value), id)) return 0;
  return row.Mass(weight);
}

// The first token, in order of ids, at which the running mass exceeds `uniform` (a fraction of
// 2^64) of all mass. Each warp sums a stretch of ids; the stretch with the token is then searched.
__device__ int32_t DrawToken(const Row& row, const Cut& cut, float min_weight, uint64_t uniform,
                             Shared& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int32_t stretch = (row.size() + kWarps - 1) / kWarps;
  const int32_t begin = warp * stretch;
  const int32_t end = min(begin + stretch, row.size());
  uint64_t sum = 0;
#pragma unroll 8
  for (int32_t id = begin + lane; id < end; id += 32) sum += DrawMass(row, cut, min_weight, id);
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffff, sum, offset);
  __syncthreads();
  if (lane == 0) shared.scan[warp] = sum;
  __syncthreads();
  uint64_t total = 0;
  for (int w = 0; w < kWarps; ++w) total += shared.scan[w];
  uint64_t target = __umul64hi(uniform, total);
  int holder = 0;
  while (holder < kWarps - 1 && shared.scan[holder] <= target) target -= shared.scan[holder++];
  const int32_t first = holder * stretch;
  const int32_t last = min(first + stretch, row.size());
  const int32_t each = (stretch + kThreads - 1) / kThreads;
  const int32_t mine = first + static_cast<int32_t>(threadIdx.x) * each;
  sum = 0;
  for (int32_t id = mine; id < min(mine + each, last); ++id) {
    sum += DrawMass(row, cut, min_weight, id);
  }
  uint64_t ignored;
  uint64_t running = BlockScan(sum, shared, &ignored);
  if (running <= target && target < running + sum) {
    for (int32_t id = mine; id < min(mine + each, last); ++id) {
      running += DrawMass(row, cut, min_weight, id);
      if (running > target) {
        shared.found = id;
        break;
      }
    }
  }
  __syncthreads();
  return shared.found;
}

template <int parts = 1>
__device__ Best LargestValue(const Row& row, Shared& shared, int part = 0) {
  Best best = {-INFINITY, row.size()};
  row.ForEach<parts>(
      [&](int32_t id, float value) {
        if (value > best.value || best.id == row.size()) best = {value, id};
      },
      part);
  return BlockBest(best, shared);
}

__device__ int32_t Choose(Row& row, const Best& best, const SamplingRow& request, Shared& shared) {
  if (request.temperature == 0 || best.value == -INFINITY) return best.id;
  row.SetScale(best.value, request.temperature);
  Cut cut;
  const bool limited = request.top_k > 0 && request.top_k < row.size();
  if (limited) cut = SelectBest(row, false, request.top_k, shared);
  if (request.top_p < 1.0f) {
    if (!limited) cut = SelectBest(row, false, 0xffffffffull, shared);
    const auto mass =
        static_cast<uint64_t>(static_cast<double>(cut.mass) * static_cast<double>(request.top_p));
    cut = SelectBest(row, true, mass > 0 ? mass : 1, shared);
  }
  // 53 random bits, as the upper ones of a fraction.
  const uint64_t uniform = PhiloxWord(request.seed, request.output_index) & ~uint64_t{2047};
  return DrawToken(row, cut, request.min_p, uniform, shared);
}

// Natural logarithms of the softmax of the raw logits, as results of row `out`.
__device__ void ReportLogprobs(Row& row, const SampleArgs& args, int32_t out, int32_t token,
                               int32_t wanted, Shared& shared) {
  const Best best = LargestValue(row, shared);
  const bool none = best.value == -INFINITY;
  const float base = none ? 0.0f : best.value;
  row.SetScale(base, 1.0f);
  uint64_t sum = 0;
  row.ForEach([&](int32_t, float value) { sum += row.Mass(row.WeightOf(none ? 0.0f : value)); });
  uint64_t total;
  BlockScan(sum, shared, &total);
  const double log_sum = log(static_cast<double>(total) * 0x1p-40);
  const auto logprob = [&](float value) {
    return static_cast<float>(static_cast<double>(none ? 0.0f : value) - base - log_sum);
  };
  if (threadIdx.x == 0) args.logprobs[out] = logprob(row.Raw(token));
  Best last = {INFINITY, -1};
  for (int32_t i = 0; i < min(min(wanted, kMaxTop), row.size()); ++i) {
    Best next = {-INFINITY, row.size()};
    row.ForEach([&](int32_t id, float value) {
      const Best candidate = {value, id};
      if (Better(last, candidate) && Better(candidate, next)) next = candidate;
    });
    last = BlockBest(next, shared);
    if (threadIdx.x != 0) continue;
    args.top_tokens[out * kMaxTop + i] = last.id;
    args.top_logprobs[out * kMaxTop + i] = logprob(last.value);
  }
}

// The largest value of the row, for the first block of its cluster; false for the others, which
// are done then.
__device__ bool ClusterBest(const Row& row, Shared& shared, Best* best) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  auto cluster = cooperative_groups::this_cluster();
  const int part = static_cast<int>(cluster.block_rank());
  auto started = cluster.barrier_arrive();
  const Best of_part = LargestValue<kParts>(row, shared, part);
  cluster.barrier_wait(std::move(started));
  if (threadIdx.x == 0) *cluster.map_shared_rank(&shared.parts[part], 0) = of_part;
  cluster.sync();
  *best = shared.parts[0];
  for (int i = 1; i < kParts; ++i) {
    if (Better(shared.parts[i], *best)) *best = shared.parts[i];
  }
  return part == 0;
#else
  return false;
#endif
}

// `shared_rows`: each row has a cluster of kParts blocks; else a block.
template <bool shared_rows>
__global__ void __launch_bounds__(kThreads) SampleKernel(SampleArgs args) {
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  auto* penalized = reinterpret_cast<uint32_t*>(memory + sizeof(Shared));
  const auto index = static_cast<int32_t>(shared_rows ? blockIdx.x / kParts : blockIdx.x);
  AwaitPrevious();
  const SamplingRow request = args.requests[index];
  const float* logits = args.logits + static_cast<int64_t>(index) * args.vocabulary;
  if (request.repetition_penalty != 1.0f) {
    const int words = (args.vocabulary + 31) / 32;
    for (int i = threadIdx.x; i < words; i += kThreads) penalized[i] = 0;
    __syncthreads();
    const int extra = request.input_row >= 0 ? 1 : 0;
    for (int i = threadIdx.x; i < request.history_count + extra; i += kThreads) {
      const int32_t token = i < request.history_count ? args.history[request.history_begin + i]
                                                      : args.input_tokens[request.input_row];
      atomicOr(&penalized[token / 32], 1u << (token % 32));
    }
    __syncthreads();
  }
  Row row(logits, args.vocabulary, request.repetition_penalty, penalized);
  Best best;
  if constexpr (shared_rows) {
    if (!ClusterBest(row, shared, &best)) return;
  } else {
    best = LargestValue(row, shared);
  }
  const int32_t token = Choose(row, best, request, shared);
  if (threadIdx.x == 0) args.tokens[index] = token;
  if (request.logprobs >= 0) {
    Row raw(logits, args.vocabulary, 1.0f, nullptr);
    ReportLogprobs(raw, args, index, token, request.logprobs, shared);
  }
}

size_t SharedBytes(int32_t vocabulary) {
  return sizeof(Shared) + static_cast<size_t>((vocabulary + 31) / 32) * sizeof(uint32_t);
}

}  // namespace

cudaError_t PrepareSampler(int32_t vocabulary) {
  const auto bytes = static_cast<int>(SharedBytes(vocabulary));
  const cudaError_t error =
      cudaFuncSetAttribute(SampleKernel<false>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  return cudaFuncSetAttribute(SampleKernel<true>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              bytes);
}

cudaError_t SampleRows(const SampleArgs& args, cudaStream_t stream) {
  if (args.clusters && args.rows <= kMaxSharedRows) {
    return LaunchClusters(SampleKernel<true>, kParts, args.rows * kParts, kThreads,
                          SharedBytes(args.vocabulary), stream, args);
  }
  return LaunchOverlapped(SampleKernel<false>, args.rows, kThreads, SharedBytes(args.vocabulary),
                          stream, args);
}

}  // namespace palimpsest::cuda
