#include "worker/compute/cuda/gemm.h"

#include <cublasLt.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/cuda/status.h"
#include "worker/compute/cuda/kernels.h"

namespace palimpsest::cuda {
namespace {

constexpr int kMaxCandidates = 16;
// A candidate is launched this often to be measured; products of many rows, which take long, less.
constexpr int kRepeats = 24;
constexpr int kRepeatsOfMany = 4;
constexpr int32_t kManyRows = 512;

absl::Status BlasStatus(cublasStatus_t status, absl::string_view what) {
  if (status == CUBLAS_STATUS_SUCCESS) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(what, ": cuBLASLt status ", static_cast<int>(status)));
}

cublasLtMatmulAlgo_t AlgorithmOf(const GemmChoice& choice) {
  cublasLtMatmulAlgo_t algorithm;
  static_assert(sizeof(algorithm) == sizeof(choice.algorithm));
  std::memcpy(&algorithm, choice.algorithm.data(), sizeof(algorithm));
  return algorithm;
}

}  // namespace

struct GemmLibrary::Functions {
  void* library = nullptr;
#define PALIMPSEST_CUBLASLT(F)            \
  F(cublasLtCreate)                       \
  F(cublasLtDestroy)                      \
  F(cublasLtGetVersion)                   \
  F(cublasLtMatmul)                       \
  F(cublasLtMatmulAlgoConfigGetAttribute) \
  F(cublasLtMatmulAlgoGetHeuristic)       \
  F(cublasLtMatmulDescCreate)             \
  F(cublasLtMatmulDescDestroy)            \
  F(cublasLtMatmulDescSetAttribute)       \
  F(cublasLtMatmulPreferenceCreate)       \
  F(cublasLtMatmulPreferenceDestroy)      \
  F(cublasLtMatmulPreferenceSetAttribute) \
  F(cublasLtMatrixLayoutCreate)           \
  F(cublasLtMatrixLayoutDestroy)          \
  F(cublasLtMatrixLayoutSetAttribute)
#define PALIMPSEST_DECLARE(name) std::add_pointer<decltype(::name)>::type name = nullptr;
  PALIMPSEST_CUBLASLT(PALIMPSEST_DECLARE)
#undef PALIMPSEST_DECLARE

  absl::Status Resolve() {
    for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12"}) {
      if (library == nullptr) library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    }
    if (library == nullptr) {
      return absl::NotFoundError(absl::StrCat("cannot load cuBLASLt: ", dlerror(),
                                              "; install CUDA's libcublas, or name its folder in "
                                              "LD_LIBRARY_PATH"));
    }
#define PALIMPSEST_RESOLVE(name)                                  \
  name = reinterpret_cast<decltype(name)>(dlsym(library, #name)); \
  if ((name) == nullptr) return absl::NotFoundError("cuBLASLt lacks " #name);
    PALIMPSEST_CUBLASLT(PALIMPSEST_RESOLVE)
#undef PALIMPSEST_RESOLVE
    return absl::OkStatus();
  }
};

GemmLibrary::GemmLibrary() : functions_(std::make_unique<Functions>()) {}

// The library stays loaded: unloading CUDA libraries before the process ends is not supported.
GemmLibrary::~GemmLibrary() {
  if (handle_ != nullptr) functions_->cublasLtDestroy(static_cast<cublasLtHandle_t>(handle_));
}

absl::StatusOr<std::unique_ptr<GemmLibrary>> GemmLibrary::Load(const Options& options) {
  std::unique_ptr<GemmLibrary> library(new GemmLibrary());
  library->options_ = options;
  if (absl::Status status = library->functions_->Resolve(); !status.ok()) return status;
  cublasLtHandle_t handle = nullptr;
  absl::Status status = BlasStatus(library->functions_->cublasLtCreate(&handle), "create");
  if (!status.ok()) return status;
  library->handle_ = handle;
  int device = 0;
  cudaDeviceProp properties;
  status = CudaStatus(cudaGetDevice(&device), "current device");
  status.Update(CudaStatus(cudaGetDeviceProperties(&properties, device), "device properties"));
  if (!status.ok()) return status;
  library->gpu_ = properties.name;
  if (!options.cache_file.empty()) {
    auto cache = GemmCache::Load(options.cache_file);
    if (!cache.ok()) return cache.status();
    library->cache_ = *std::move(cache);
  }
  return library;
}

int GemmLibrary::version() const { return static_cast<int>(functions_->cublasLtGetVersion()); }

absl::Status GemmLibrary::StoreCache() {
  if (measured_ == 0 || options_.cache_file.empty()) return absl::OkStatus();
  return cache_.Store(options_.cache_file);
}

struct Gemm::Descriptors {
  cublasLtMatmulDesc_t product = nullptr;
  cublasLtMatrixLayout_t weights = nullptr;  // inputs x outputs, column-major, transposed
  cublasLtMatrixLayout_t input = nullptr;    // inputs x rows, column-major
  cublasLtMatrixLayout_t output = nullptr;   // outputs x rows, column-major
};

Gemm::Gemm(GemmLibrary& library, const GemmShape& shape)
    : library_(library), shape_(shape), descriptors_(std::make_unique<Descriptors>()) {}

Gemm::~Gemm() {
  const GemmLibrary::Functions& lt = *library_.functions_;
  if (descriptors_->product != nullptr) lt.cublasLtMatmulDescDestroy(descriptors_->product);
  for (cublasLtMatrixLayout_t layout :
       {descriptors_->weights, descriptors_->input, descriptors_->output}) {
    if (layout != nullptr) lt.cublasLtMatrixLayoutDestroy(layout);
  }
}

absl::StatusOr<std::unique_ptr<Gemm>> Gemm::Create(GemmLibrary& library, const GemmShape& shape,
                                                   absl::Span<const int32_t> row_steps) {
  std::unique_ptr<Gemm> gemm(new Gemm(library, shape));
  if (absl::Status status = gemm->MakeDescriptors(); !status.ok()) return status;
  for (const int32_t rows : row_steps) {
    GemmChoice choice;
    const std::string key = gemm->Key(rows);
    if (const GemmChoice* known = library.cache_.Find(key); known != nullptr) {
      choice = *known;
      // Once now, so that its kernel is loaded and is seen to work.
      if (auto time = gemm->Measure(choice, rows, 1); !time.ok()) return time.status();
    } else {
      if (absl::Status status = gemm->Choose(rows, choice); !status.ok()) return status;
      library.cache_.Put(key, choice);
      ++library.measured_;
    }
    gemm->steps_.push_back(rows);
    gemm->choices_.push_back(choice);
  }
  return gemm;
}

int64_t Gemm::OutputBytes(int32_t rows) const {
  return rows * shape_.output_row() * (shape_.float_output ? 4 : 2);
}

std::string Gemm::Key(int32_t rows) const {
  std::string key =
      absl::StrCat(library_.gpu_, "|", library_.version(), "|", shape_.outputs, "x", shape_.inputs,
                   "|", rows, shape_.bias ? "|bias" : "", shape_.accumulate ? "|accumulate" : "",
                   shape_.float_output ? "|float" : "");
  if (shape_.input_stride > 0 || shape_.output_stride > 0) {
    absl::StrAppend(&key, "|rows ", shape_.input_row(), " ", shape_.output_row());
  }
  if (shape_.batch > 1) {
    absl::StrAppend(&key, "|batch ", shape_.batch, " ", shape_.input_step, " ", shape_.output_step);
  }
  return key;
}

absl::Status Gemm::MakeDescriptors() {
  const GemmLibrary::Functions& lt = *library_.functions_;
  Descriptors& d = *descriptors_;
  absl::Status status = BlasStatus(
      lt.cublasLtMatmulDescCreate(&d.product, CUBLAS_COMPUTE_32F, CUDA_R_32F), "describe");
  const auto set = [&](cublasLtMatmulDescAttributes_t attribute, auto value) {
    status.Update(BlasStatus(
        lt.cublasLtMatmulDescSetAttribute(d.product, attribute, &value, sizeof(value)), "set"));
  };
  set(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
  if (shape_.bias) {
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, static_cast<int32_t>(CUDA_R_16BF));
    // The heuristics look at its alignment; each call sets its own.
    set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<const void*>(library_.options_.scratch));
  }
  const auto layout = [&](cublasLtMatrixLayout_t& made, cudaDataType type, int32_t rows,
                          int32_t columns, int64_t stride, int64_t step) {
    status.Update(
        BlasStatus(lt.cublasLtMatrixLayoutCreate(&made, type, rows, columns, stride), "layout"));
    if (!status.ok() || shape_.batch == 1) return;
    status =
        BlasStatus(lt.cublasLtMatrixLayoutSetAttribute(made, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT,
                                                       &shape_.batch, sizeof(shape_.batch)),
                   "batch");
    status.Update(
        BlasStatus(lt.cublasLtMatrixLayoutSetAttribute(
                       made, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &step, sizeof(step)),
                   "batch"));
  };
  layout(d.weights, CUDA_R_16BF, shape_.inputs, shape_.outputs, shape_.inputs,
         int64_t{shape_.outputs} * shape_.inputs);
  layout(d.input, CUDA_R_16BF, shape_.inputs, 1, shape_.input_row(), shape_.input_step);
  layout(d.output, shape_.float_output ? CUDA_R_32F : CUDA_R_16BF, shape_.outputs, 1,
         shape_.output_row(), shape_.output_step);
  return status;
}

absl::StatusOr<std::vector<GemmChoice>> Gemm::Candidates(int32_t rows) {
  const GemmLibrary::Functions& lt = *library_.functions_;
  Descriptors& d = *descriptors_;
  cublasLtMatmulPreference_t preference = nullptr;
  absl::Status status = BlasStatus(lt.cublasLtMatmulPreferenceCreate(&preference), "preference");
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    status.Update(BlasStatus(
        lt.cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)),
        "preference"));
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
         static_cast<uint64_t>(library_.options_.workspace_bytes.count()));
  // Partial sums only in float32 and in a fixed order.
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
         static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  const auto columns = static_cast<uint64_t>(rows);
  for (cublasLtMatrixLayout_t layout : {d.input, d.output}) {
    status.Update(BlasStatus(lt.cublasLtMatrixLayoutSetAttribute(
                                 layout, CUBLASLT_MATRIX_LAYOUT_COLS, &columns, sizeof(columns)),
                             "rows"));
  }
  cublasLtMatmulHeuristicResult_t results[kMaxCandidates];
  int found = 0;
  if (status.ok()) {
    status =
        BlasStatus(lt.cublasLtMatmulAlgoGetHeuristic(
                       static_cast<cublasLtHandle_t>(library_.handle_), d.product, d.weights,
                       d.input, d.output, d.output, preference, kMaxCandidates, results, &found),
                   absl::StrCat("algorithms for ", Key(rows)));
  }
  if (preference != nullptr) lt.cublasLtMatmulPreferenceDestroy(preference);
  if (!status.ok()) return status;
  std::vector<GemmChoice> candidates;
  for (int i = 0; i < found; ++i) {
    if (results[i].state != CUBLAS_STATUS_SUCCESS) continue;
    uint32_t scheme = 0;
    size_t written = 0;
    lt.cublasLtMatmulAlgoConfigGetAttribute(&results[i].algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME,
                                            &scheme, sizeof(scheme), &written);
    if ((scheme & ~static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE)) != 0) continue;
    GemmChoice choice;
    choice.workspace_bytes = results[i].workspaceSize;
    std::memcpy(choice.algorithm.data(), &results[i].algo, sizeof(results[i].algo));
    candidates.push_back(choice);
  }
  return candidates;
}

// Weights are taken from places one after another, so that they come from memory and not from a
// cache, as in a model. Input and output may overlap, which matters to nobody.
absl::StatusOr<double> Gemm::Measure(const GemmChoice& choice, int32_t rows, int repeats) {
  const GemmLibrary::Options& options = library_.options_;
  const int64_t matrix = shape_.weight_bytes();
  const int64_t places = std::max<int64_t>(1, options.weights_bytes.count() / matrix);
  const auto* weights = static_cast<const std::byte*>(options.weights);
  auto* scratch = static_cast<std::byte*>(options.scratch);
  const auto call_at = [&](int64_t i) {
    GemmCall call;
    call.rows = rows;
    call.weights = weights + i % places * matrix;
    call.bias = scratch;
    call.input = scratch;
    call.output = scratch + (options.scratch_bytes.count() - OutputBytes(rows)) / 256 * 256;
    return call;
  };
  cudaEvent_t begin = nullptr, end = nullptr;
  absl::Status status = CudaStatus(cudaEventCreate(&begin), "event");
  status.Update(CudaStatus(cudaEventCreate(&end), "event"));
  for (int i = -2; status.ok() && i < repeats; ++i) {
    if (i == 0) status.Update(CudaStatus(cudaEventRecord(begin, options.stream), "event"));
    status.Update(RunChoice(choice, call_at(i + 2), options.stream));
  }
  float milliseconds = 0;
  if (status.ok()) status = CudaStatus(cudaEventRecord(end, options.stream), "event");
  status.Update(CudaStatus(cudaStreamSynchronize(options.stream), "measure a product"));
  if (status.ok()) status = CudaStatus(cudaEventElapsedTime(&milliseconds, begin, end), "event");
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  if (!status.ok()) return status;
  return milliseconds * 1e3 / repeats;
}

absl::Status Gemm::Choose(int32_t rows, GemmChoice& best) {
  auto candidates = Candidates(rows);
  if (!candidates.ok()) return candidates.status();
  if (candidates->empty()) {
    return absl::NotFoundError(absl::StrCat("cuBLASLt has no algorithm for ", Key(rows)));
  }
  best = candidates->front();
  const GemmLibrary::Options& options = library_.options_;
  const int64_t input = rows * shape_.input_row() * 2;
  if (shape_.weight_bytes() > options.weights_bytes.count() ||
      std::max(input, OutputBytes(rows)) > options.scratch_bytes.count()) {
    return absl::OkStatus();
  }
  // The power that a product draws depends on its numbers, so they are random.
  absl::Status status = CudaStatus(FillUniform(options.scratch, options.scratch_bytes.count() / 2,
                                               0.0f, 0.1f, 1, options.stream),
                                   "fill the scratch memory");
  if (!status.ok()) return status;
  for (GemmChoice& candidate : *candidates) {
    const auto time = Measure(candidate, rows, rows < kManyRows ? kRepeats : kRepeatsOfMany);
    if (!time.ok()) return time.status();
    candidate.microseconds = *time;
    if (best.microseconds == 0 || *time < best.microseconds) best = candidate;
  }
  return absl::OkStatus();
}

const GemmChoice& Gemm::choice(int32_t rows) const {
  const auto step = std::lower_bound(steps_.begin(), steps_.end(), rows);
  return choices_[std::min<size_t>(step - steps_.begin(), choices_.size() - 1)];
}

absl::Status Gemm::Run(const GemmCall& call, cudaStream_t stream) {
  return RunChoice(choice(call.rows), call, stream);
}

absl::Status Gemm::RunChoice(const GemmChoice& choice, const GemmCall& call, cudaStream_t stream) {
  const GemmLibrary::Functions& lt = *library_.functions_;
  const Descriptors& d = *descriptors_;
  // What differs from call to call is set in copies: another thread may be here.
  std::remove_pointer_t<cublasLtMatrixLayout_t> input = *d.input, output = *d.output;
  std::remove_pointer_t<cublasLtMatmulDesc_t> product = *d.product;
  const auto columns = static_cast<uint64_t>(call.rows);
  for (cublasLtMatrixLayout_t layout : {&input, &output}) {
    lt.cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_COLS, &columns,
                                        sizeof(columns));
  }
  if (shape_.bias) {
    lt.cublasLtMatmulDescSetAttribute(&product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &call.bias,
                                      sizeof(call.bias));
  }
  const float alpha = 1.0f;
  const float beta = shape_.accumulate ? 1.0f : 0.0f;
  const cublasLtMatmulAlgo_t algorithm = AlgorithmOf(choice);
  return BlasStatus(
      lt.cublasLtMatmul(static_cast<cublasLtHandle_t>(library_.handle_), &product, &alpha,
                        call.weights, d.weights, call.input, &input, &beta, call.output, &output,
                        call.output, &output, &algorithm, library_.options_.workspace,
                        static_cast<size_t>(library_.options_.workspace_bytes.count()), stream),
      absl::StrCat("matrix product ", shape_.outputs, "x", shape_.inputs, " of ", call.rows,
                   " rows"));
}

}  // namespace palimpsest::cuda
