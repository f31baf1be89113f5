// One client of a GPU for mps_faults.sh: `work SECONDS` runs kernels and checks them for so long;
// `fault` writes where nothing is mapped. Status 0: the GPU answered well to the end; 3: it did
// not.
#include <cuda_runtime.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

__global__ void Add(int* at) { atomicAdd(at, 1); }

__global__ void Stray(volatile int* at) { at[1ll << 40] = 1; }

static bool Ok(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return true;
  std::printf("%s: %s\n", what, cudaGetErrorString(error));
  return false;
}

int main(int argc, char** argv) {
  int* counter = nullptr;
  if (!Ok(cudaMalloc(&counter, sizeof(int)), "malloc") ||
      !Ok(cudaMemset(counter, 0, sizeof(int)), "memset")) {
    return 3;
  }
  if (argc > 1 && std::strcmp(argv[1], "fault") == 0) {
    Stray<<<1, 1>>>(counter);
    return Ok(cudaDeviceSynchronize(), "stray write") ? 0 : 3;
  }
  const double seconds = argc > 2 ? std::atof(argv[2]) : 5;
  const auto begin = std::chrono::steady_clock::now();
  std::printf("ready\n");
  std::fflush(stdout);
  int rounds = 0;
  while (std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() <
         seconds) {
    int value = 0;
    Add<<<1, 1>>>(counter);
    if (!Ok(cudaMemcpy(&value, counter, sizeof(value), cudaMemcpyDeviceToHost), "work")) return 3;
    if (value != ++rounds) {
      std::printf("counted %d of %d\n", value, rounds);
      return 3;
    }
  }
  std::printf("%d rounds\n", rounds);
  return 0;
}
