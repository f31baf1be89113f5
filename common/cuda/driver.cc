#include "common/cuda/driver.h"

#include <dlfcn.h>

#include <string>

#include "absl/strings/str_cat.h"

namespace palimpsest {
namespace {

constexpr char kLibrary[] = "libcuda.so.1";

absl::StatusOr<CudaDriver> Open() {
  // Never closed: the driver has threads of its own.
  void* const library = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat(
        "there is no NVIDIA driver here (", ::dlerror(),
        "): install it, run the container with its devices and libraries (--gpus), or use the "
        "host back-end"));
  }
  CudaDriver driver;
  std::string missing;
#define PALIMPSEST_CUDA_STRING_(name) #name
#define PALIMPSEST_CUDA_STRING(name) PALIMPSEST_CUDA_STRING_(name)
#define PALIMPSEST_CUDA_FIND(name) \
  driver.name =                    \
      reinterpret_cast<decltype(driver.name)>(::dlsym(library, PALIMPSEST_CUDA_STRING(name)));
#define PALIMPSEST_CUDA_LOAD(name) \
  PALIMPSEST_CUDA_FIND(name)       \
  if (driver.name == nullptr) absl::StrAppend(&missing, " ", PALIMPSEST_CUDA_STRING(name));
  PALIMPSEST_CUDA_FUNCTIONS(PALIMPSEST_CUDA_LOAD)
  PALIMPSEST_CUDA_LATE_FUNCTIONS(PALIMPSEST_CUDA_FIND)
#undef PALIMPSEST_CUDA_FIND
#undef PALIMPSEST_CUDA_LOAD
#undef PALIMPSEST_CUDA_STRING
#undef PALIMPSEST_CUDA_STRING_
  if (!missing.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat(kLibrary, " lacks", missing, ": the NVIDIA driver is too old, update it"));
  }
  if (absl::Status status = driver.Check(driver.cuInit(0), "starting the NVIDIA driver");
      !status.ok()) {
    return status;
  }
  int devices = 0;
  absl::Status status = driver.Check(driver.cuDeviceGetCount(&devices), "counting GPUs");
  if (!status.ok()) return status;
  if (devices == 0) {
    return absl::FailedPreconditionError(
        "the NVIDIA driver sees no GPU: see nvidia-smi and CUDA_VISIBLE_DEVICES");
  }
  return driver;
}

struct Meaning {
  absl::StatusCode code;
  absl::string_view advice;
};

Meaning MeaningOf(CUresult result) {
  switch (result) {
    case CUDA_ERROR_OUT_OF_MEMORY:
      return {absl::StatusCode::kResourceExhausted,
              "other processes hold the GPU's memory (see nvidia-smi), or the pool is too large"};
    case CUDA_ERROR_NO_DEVICE:
    case CUDA_ERROR_INVALID_DEVICE:
      return {absl::StatusCode::kFailedPrecondition,
              "compare with nvidia-smi -L and CUDA_VISIBLE_DEVICES"};
    case CUDA_ERROR_INVALID_CONTEXT:
    case CUDA_ERROR_NOT_INITIALIZED:
    case CUDA_ERROR_DEINITIALIZED:
      return {absl::StatusCode::kFailedPrecondition, "no context of the GPU is current"};
    case CUDA_ERROR_NOT_SUPPORTED:
    case CUDA_ERROR_NOT_PERMITTED:
    case CUDA_ERROR_SYSTEM_DRIVER_MISMATCH:
    case CUDA_ERROR_DEVICE_UNAVAILABLE:
    case CUDA_ERROR_NO_BINARY_FOR_GPU:
      return {absl::StatusCode::kFailedPrecondition,
              "this GPU, its mode or the driver's version does not allow it"};
    case CUDA_ERROR_INVALID_VALUE:
    case CUDA_ERROR_INVALID_HANDLE:
    case CUDA_ERROR_NOT_FOUND:
      return {absl::StatusCode::kInvalidArgument, "the argument or handle is not a valid one"};
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_FAILED:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
      return {absl::StatusCode::kInternal, "the context is lost: the process must end"};
    default:
      return {absl::StatusCode::kUnknown, "see the driver's documentation of that error"};
  }
}

}  // namespace

absl::StatusOr<const CudaDriver*> CudaDriver::Load() {
  static const absl::StatusOr<CudaDriver>* const driver = new absl::StatusOr<CudaDriver>(Open());
  if (!driver->ok()) return driver->status();
  return &**driver;
}

absl::Status CudaDriver::Check(CUresult result, absl::string_view what) const {
  if (result == CUDA_SUCCESS) return absl::OkStatus();
  const char* name = nullptr;
  const char* description = nullptr;
  cuGetErrorName(result, &name);
  cuGetErrorString(result, &description);
  const Meaning meaning = MeaningOf(result);
  return absl::Status(
      meaning.code, absl::StrCat(what, " failed: ", name == nullptr ? "CUDA_ERROR" : name, " (",
                                 static_cast<int>(result), description == nullptr ? "" : ", ",
                                 description == nullptr ? "" : description, "); ", meaning.advice));
}

}  // namespace palimpsest
