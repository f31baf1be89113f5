#include <algorithm>

#include "worker/compute/cuda/device_util.cuh"
#include "worker/compute/cuda/special_kernels.h"

namespace palimpsest::cuda {
namespace {

constexpr int kVector = 8;
constexpr int kMaxThreads = 1024;
constexpr int kNormVectors = 4;  // of each thread, at most

int ThreadsFor(int vectors, int most) { return std::clamp((vectors + 31) / 32 * 32, 32, most); }

__global__ void FinishEmbeddingKernel(FinishEmbeddingArgs args) {
  AwaitPrevious();
  LetNextLaunch();
  const int64_t row = blockIdx.x;
  const int vectors = args.hidden / kVector;
  auto* hidden = static_cast<Vector8*>(args.hidden_states) + row * vectors;
  const Vector8* place = nullptr;
  if (args.table != nullptr) {
    place = static_cast<const Vector8*>(args.table) +
            static_cast<int64_t>(args.positions[row] + args.table_offset) * vectors;
  }
  for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
    float values[8], added[8] = {};
    hidden[i].Unpack(values);
    if (place != nullptr) place[i].Unpack(added);
#pragma unroll
    for (int j = 0; j < 8; ++j) values[j] = values[j] * args.scale + added[j];
    hidden[i] = Vector8::Pack(values);
  }
  for (int i = threadIdx.x; i < args.half_dim; i += blockDim.x) {
    float2& rotation = args.rotations[row * args.half_dim + i];
    rotation.x *= args.magnitude;
    rotation.y *= args.magnitude;
  }
}

// The sum over the block, for every thread.
__device__ float BlockSum(float value, float* sums) {
  value = WarpSum(value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
  __syncthreads();
  const int warps = blockDim.x / 32;
  return WarpSum(threadIdx.x % 32 < warps ? sums[threadIdx.x % 32] : 0.0f);
}

template <NormForm kForm>
__global__ void __launch_bounds__(kMaxThreads) NormKernel(NormArgs args) {
  __shared__ float sums[32];
  const int vectors = args.size / kVector;
  const auto size = static_cast<float>(args.size);
  AwaitPrevious();
  LetNextLaunch();
  const int64_t row = args.row_indexes == nullptr ? blockIdx.x : args.row_indexes[blockIdx.x];
  const auto* input = static_cast<const Vector8*>(args.input) + row * vectors;
  float held[kNormVectors][8];
  float sum = 0, squares = 0;
#pragma unroll
  for (int i = 0; i < kNormVectors; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at >= vectors) break;
    input[at].Unpack(held[i]);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum += held[i][j];
  }
  const float mean = kForm == NormForm::kLayer ? BlockSum(sum, sums) / size : 0.0f;
#pragma unroll
  for (int i = 0; i < kNormVectors; ++i) {
    if (threadIdx.x + i * blockDim.x >= vectors) break;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      held[i][j] -= mean;
      squares += held[i][j] * held[i][j];
    }
  }
  const float scale = rsqrtf(BlockSum(squares, sums) / size + args.epsilon);
  auto* output = static_cast<Vector8*>(args.output) + static_cast<int64_t>(blockIdx.x) * vectors;
#pragma unroll
  for (int i = 0; i < kNormVectors; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at >= vectors) break;
    float weights[8], base[8] = {};
    static_cast<const Vector8*>(args.weight)[at].Unpack(weights);
    if (kForm == NormForm::kLayer) static_cast<const Vector8*>(args.bias)[at].Unpack(base);
    if (args.add) output[at].Unpack(base);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      base[j] +=
          held[i][j] * scale * (kForm == NormForm::kRms ? args.offset + weights[j] : weights[j]);
    }
    output[at] = Vector8::Pack(base);
  }
}

// tanh(x) = 1 - 2 / (1 + e^2x).
__device__ float Tanh(float x) { return 1.0f - 2.0f / (1.0f + __expf(2.0f * x)); }

// One thread takes eight numbers of a row.
template <typename Function>
__global__ void ActivationKernel(const Vector8* input, Vector8* output, int vectors, Function f) {
  AwaitPrevious();
  LetNextLaunch();
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= vectors) return;
  const int64_t row = blockIdx.y;
  float values[8];
  f(input, row, at, vectors, values);
  output[row * vectors + at] = Vector8::Pack(values);
}

struct GeluMultiplyRow {
  __device__ void operator()(const Vector8* input, int64_t row, int at, int vectors,
                             float (&out)[8]) const {
    float up[8];
    input[row * 2 * vectors + at].Unpack(out);
    input[row * 2 * vectors + vectors + at].Unpack(up);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float x = out[j];
      out[j] = 0.5f * x * (1.0f + Tanh(0.7978845608f * (x + 0.044715f * x * x * x))) * up[j];
    }
  }
};

struct ReluRow {
  __device__ void operator()(const Vector8* input, int64_t row, int at, int vectors,
                             float (&out)[8]) const {
    input[row * vectors + at].Unpack(out);
#pragma unroll
    for (int j = 0; j < 8; ++j) out[j] = fmaxf(out[j], 0.0f);
  }
};

template <typename Function>
cudaError_t Activate(Function f, const void* input, void* output, int32_t rows, int32_t size,
                     cudaStream_t stream) {
  const int vectors = size / kVector;
  const int threads = ThreadsFor(vectors, 256);
  return LaunchOverlapped(ActivationKernel<Function>, dim3((vectors + threads - 1) / threads, rows),
                          threads, 0, stream, static_cast<const Vector8*>(input),
                          static_cast<Vector8*>(output), vectors, f);
}

__global__ void SoftCapKernel(float* values, int64_t count, float cap) {
  AwaitPrevious();
  LetNextLaunch();
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += stride) {
    values[i] = cap * tanhf(values[i] / cap);
  }
}

}  // namespace

cudaError_t FinishEmbedding(const FinishEmbeddingArgs& args, cudaStream_t stream) {
  return LaunchOverlapped(FinishEmbeddingKernel, args.rows,
                          ThreadsFor(args.hidden / kVector, kMaxThreads), 0, stream, args);
}

cudaError_t Normalize(const NormArgs& args, cudaStream_t stream) {
  const auto kernel =
      args.form == NormForm::kLayer ? NormKernel<NormForm::kLayer> : NormKernel<NormForm::kRms>;
  return LaunchOverlapped(kernel, args.rows, ThreadsFor(args.size / kVector, kMaxThreads), 0,
                          stream, args);
}

cudaError_t GeluMultiply(const void* input, void* output, int32_t rows, int32_t size,
                         cudaStream_t stream) {
  return Activate(GeluMultiplyRow(), input, output, rows, size, stream);
}

cudaError_t Relu(const void* input, void* output, int32_t rows, int32_t size, cudaStream_t stream) {
  return Activate(ReluRow(), input, output, rows, size, stream);
}

cudaError_t SoftCap(float* values, int64_t count, float cap, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(std::clamp<int64_t>(count / 1024, 1, 4096));
  return LaunchOverlapped(SoftCapKernel, dim3(blocks), dim3(256), 0, stream, values, count, cap);
}

}  // namespace palimpsest::cuda
