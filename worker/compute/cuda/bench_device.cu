#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "worker/compute/cuda/bench_device.h"
#include "worker/compute/cuda/ptx.cuh"

namespace palimpsest::bench {
namespace {

__device__ uint64_t Mix(uint64_t v) {  // the finalizer of SplitMix64
  v = (v ^ (v >> 30)) * 0xbf58476d1ce4e5b9ull;
  v = (v ^ (v >> 27)) * 0x94d049bb133111ebull;
  return v ^ (v >> 31);
}

__global__ void FillKernel(__nv_bfloat16* data, size_t count, float scale, float offset,
                           uint64_t seed) {
  const size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < count;
       i += step) {
    const auto bits = static_cast<int32_t>(Mix(seed * 0x9e3779b97f4a7c15ull + i) >> 32);
    data[i] = __float2bfloat16_rn(static_cast<float>(bits) * 0x1p-31f * scale + offset);
  }
}

// Each thread keeps `unroll` 16-byte loads in flight.
template <int unroll>
__global__ void ReadByThreads(const uint4* data, size_t count, uint4* sink) {
  uint4 sum = {0, 0, 0, 0};
  const size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
  size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x;
  for (; i + (unroll - 1) * step < count; i += unroll * step) {
    uint4 values[unroll];
#pragma unroll
    for (int u = 0; u < unroll; ++u) values[u] = __ldcs(data + i + u * step);
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      sum.x ^= values[u].x;
      sum.y ^= values[u].y;
      sum.z ^= values[u].z;
      sum.w ^= values[u].w;
    }
  }
  if (sum.x == 1 && sum.y == 2 && sum.z == 3 && sum.w == 4) *sink = sum;
}

// One thread a block keeps `stages` bulk copies of `piece` bytes in flight.
template <int piece, int stages>
__global__ void ReadByBulkCopies(const char* data, size_t bytes) {
  extern __shared__ __align__(128) char shared[];
  __shared__ uint64_t barriers[stages];
  if (threadIdx.x != 0) return;
  const uint32_t barrier = ptx::SharedAddress(barriers);
  const uint32_t to = ptx::SharedAddress(shared);
  const uint64_t policy = ptx::EvictFirstPolicy();
  for (int s = 0; s < stages; ++s) ptx::BarrierInit(barrier + s * 8, 1);
  ptx::BarrierInitFence();
  const int64_t pieces = static_cast<int64_t>(bytes / piece);
  int64_t next = blockIdx.x;
  int64_t oldest = next;
  int stage = 0;
  uint32_t parity = 0;
  auto request = [&](int s) {
    if (next >= pieces) return;
    ptx::BarrierArriveExpect(barrier + s * 8, piece);
    ptx::BulkCopy(to + s * piece, data + next * piece, piece, barrier + s * 8, policy);
    next += gridDim.x;
  };
  for (int s = 0; s < stages; ++s) request(s);
  for (; oldest < pieces; oldest += gridDim.x) {
    ptx::BarrierWait(barrier + stage * 8, parity);
    request(stage);
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace

void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

void Fill(__nv_bfloat16* data, size_t count, float scale, float offset, uint64_t seed) {
  FillKernel<<<1024, 256>>>(data, count, scale, offset, seed);
  Check(cudaGetLastError(), "Fill");
}

double TimeGraph(int count, int repeats, const std::function<void(int, cudaStream_t)>& launch) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  cudaEvent_t begin;
  cudaEvent_t end;
  Check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "begin capture");
  for (int i = 0; i < count; ++i) launch(i, stream);
  Check(cudaStreamEndCapture(stream, &graph), "end capture");
  Check(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
  Check(cudaEventCreate(&begin), "cudaEventCreate");
  Check(cudaEventCreate(&end), "cudaEventCreate");
  std::vector<double> times;
  for (int i = 0; i < repeats + 1; ++i) {
    Check(cudaEventRecord(begin, stream), "cudaEventRecord");
    Check(cudaGraphLaunch(exec, stream), "cudaGraphLaunch");
    Check(cudaEventRecord(end, stream), "cudaEventRecord");
    Check(cudaStreamSynchronize(stream), "graph replay");
    float ms = 0;
    Check(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
    if (i > 0) times.push_back(ms * 1e3 / count);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  return Median(times);
}

double MeasureReadBandwidth(const void* data, size_t bytes) {
  int multiprocessors = 0;
  Check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0), "attribute");
  Buffer<uint4> sink(1);
  double best_us = 1e30;
  auto time = [&](const char* name, const std::function<void(cudaStream_t)>& launch) {
    const double us = TimeGraph(1, 7, [&](int, cudaStream_t stream) { launch(stream); });
    Check(cudaGetLastError(), name);
    std::printf("read, %-24s %7.1f GB/s\n", name, static_cast<double>(bytes) / us * 1e-3);
    best_us = std::min(best_us, us);
  };
  const auto* vectors = static_cast<const uint4*>(data);
  for (int blocks : {2, 4}) {
    time(blocks == 2 ? "threads, 2 x 8 loads" : "threads, 4 x 8 loads", [&](cudaStream_t stream) {
      ReadByThreads<8><<<multiprocessors * blocks, 512, 0, stream>>>(vectors, bytes / sizeof(uint4),
                                                                     sink.data());
    });
  }
  auto bulk = [&]<int piece, int stages>(const char* name, int blocks) {
    Check(cudaFuncSetAttribute(ReadByBulkCopies<piece, stages>,
                               cudaFuncAttributeMaxDynamicSharedMemorySize, piece * stages),
          "shared memory");
    time(name, [&](cudaStream_t stream) {
      ReadByBulkCopies<piece, stages><<<multiprocessors * blocks, 32, piece * stages, stream>>>(
          static_cast<const char*>(data), bytes);
    });
  };
  bulk.operator()<8192, 6>("bulk copies, 1 x 48 KiB", 1);
  bulk.operator()<8192, 12>("bulk copies, 1 x 96 KiB", 1);
  bulk.operator()<8192, 12>("bulk copies, 2 x 96 KiB", 2);
  bulk.operator()<512, 192>("512-byte copies, 1 x 96 KiB", 1);
  return static_cast<double>(bytes) / best_us * 1e6;
}

}  // namespace palimpsest::bench
