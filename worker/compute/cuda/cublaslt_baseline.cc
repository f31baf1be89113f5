#include "worker/compute/cuda/cublaslt_baseline.h"

#include <cublasLt.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <utility>

#include "worker/compute/cuda/bench_device.h"

namespace palimpsest::bench {
namespace {

constexpr size_t kWorkspaceBytes = size_t{64} << 20;
constexpr int kAlgorithms = 16;

}  // namespace

struct CublasLtBaseline::Library {
  void* dl = nullptr;
  decltype(&cublasLtCreate) create = nullptr;
  decltype(&cublasLtDestroy) destroy = nullptr;
  decltype(&cublasLtMatmul) matmul = nullptr;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic = nullptr;
  decltype(&cublasLtMatmulDescCreate) desc_create = nullptr;
  decltype(&cublasLtMatmulDescDestroy) desc_destroy = nullptr;
  decltype(&cublasLtMatmulDescSetAttribute) desc_set = nullptr;
  decltype(&cublasLtMatrixLayoutCreate) layout_create = nullptr;
  decltype(&cublasLtMatrixLayoutDestroy) layout_destroy = nullptr;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create = nullptr;
  decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy = nullptr;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set = nullptr;
  cublasLtHandle_t handle = nullptr;
  Buffer<char> workspace{kWorkspaceBytes};
};

std::unique_ptr<CublasLtBaseline> CublasLtBaseline::Open() {
  auto lib = std::make_unique<Library>();
  lib->dl = dlopen("libcublasLt.so.13", RTLD_NOW | RTLD_LOCAL);
  if (lib->dl == nullptr) {
    std::fprintf(stderr, "no cuBLASLt to compare with: %s\n", dlerror());
    return nullptr;
  }
  bool complete = true;
  auto find = [&](const char* name, auto& function) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(lib->dl, name));
    complete = complete && function != nullptr;
  };
  find("cublasLtCreate", lib->create);
  find("cublasLtDestroy", lib->destroy);
  find("cublasLtMatmul", lib->matmul);
  find("cublasLtMatmulAlgoGetHeuristic", lib->heuristic);
  find("cublasLtMatmulDescCreate", lib->desc_create);
  find("cublasLtMatmulDescDestroy", lib->desc_destroy);
  find("cublasLtMatmulDescSetAttribute", lib->desc_set);
  find("cublasLtMatrixLayoutCreate", lib->layout_create);
  find("cublasLtMatrixLayoutDestroy", lib->layout_destroy);
  find("cublasLtMatmulPreferenceCreate", lib->preference_create);
  find("cublasLtMatmulPreferenceDestroy", lib->preference_destroy);
  find("cublasLtMatmulPreferenceSetAttribute", lib->preference_set);
  if (!complete || lib->create(&lib->handle) != CUBLAS_STATUS_SUCCESS) {
    std::fprintf(stderr, "no cuBLASLt to compare with: libcublasLt.so.13 does not start\n");
    return nullptr;
  }
  return std::unique_ptr<CublasLtBaseline>(new CublasLtBaseline(std::move(lib)));
}

CublasLtBaseline::CublasLtBaseline(std::unique_ptr<Library> library)
    : library_(std::move(library)) {}

CublasLtBaseline::~CublasLtBaseline() { library_->destroy(library_->handle); }

double CublasLtBaseline::Time(int m, int n, int k, const void* x,
                              const std::function<const void*(int)>& weights, void* y,
                              int count) const {
  const Library& lib = *library_;
  // Column-major: y^T[n, m] = w[k, n]^T x^T[k, m].
  cublasLtMatmulDesc_t product;
  cublasLtMatrixLayout_t a;
  cublasLtMatrixLayout_t b;
  cublasLtMatrixLayout_t c;
  cublasLtMatmulPreference_t preference;
  lib.desc_create(&product, CUBLAS_COMPUTE_32F, CUDA_R_32F);
  const cublasOperation_t transpose = CUBLAS_OP_T;
  lib.desc_set(product, CUBLASLT_MATMUL_DESC_TRANSA, &transpose, sizeof(transpose));
  lib.layout_create(&a, CUDA_R_16BF, k, n, k);
  lib.layout_create(&b, CUDA_R_16BF, k, m, k);
  lib.layout_create(&c, CUDA_R_16BF, n, m, n);
  lib.preference_create(&preference);
  lib.preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &kWorkspaceBytes,
                     sizeof(kWorkspaceBytes));
  std::array<cublasLtMatmulHeuristicResult_t, kAlgorithms> found;
  int algorithms = 0;
  lib.heuristic(lib.handle, product, a, b, c, c, preference, kAlgorithms, found.data(),
                &algorithms);
  const float one = 1;
  const float zero = 0;
  double best = 0;
  for (int i = 0; i < algorithms; ++i) {
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    const double us = TimeGraph(count, 3, [&](int at, cudaStream_t stream) {
      const cublasStatus_t launched =
          lib.matmul(lib.handle, product, &one, weights(at), a, x, b, &zero, y, c, y, c,
                     &found[i].algo, lib.workspace.data(), kWorkspaceBytes, stream);
      if (launched != CUBLAS_STATUS_SUCCESS) status = launched;
    });
    if (status == CUBLAS_STATUS_SUCCESS && (best == 0 || us < best)) best = us;
  }
  lib.preference_destroy(preference);
  lib.layout_destroy(a);
  lib.layout_destroy(b);
  lib.layout_destroy(c);
  lib.desc_destroy(product);
  return best;
}

}  // namespace palimpsest::bench
