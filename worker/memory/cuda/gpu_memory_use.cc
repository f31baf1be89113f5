#include "worker/memory/cuda/gpu_memory_use.h"

#include <dlfcn.h>

#include <string>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace palimpsest {
namespace {

// What is used of nvml.h, which a toolkit need not have.
struct NvmlMemory {
  unsigned long long total = 0, free = 0, used = 0;  // NOLINT: the library's types
};
struct Nvml {
  int (*init)() = nullptr;
  int (*find)(const char* uuid, void** device) = nullptr;
  int (*memory)(void* device, NvmlMemory* memory) = nullptr;
};

// Opened once and kept.
const Nvml* LoadNvml() {
  static const Nvml* const nvml = []() -> const Nvml* {
    void* const library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return nullptr;
    static Nvml table;
    table.init = reinterpret_cast<decltype(table.init)>(dlsym(library, "nvmlInit_v2"));
    table.find =
        reinterpret_cast<decltype(table.find)>(dlsym(library, "nvmlDeviceGetHandleByUUID"));
    table.memory =
        reinterpret_cast<decltype(table.memory)>(dlsym(library, "nvmlDeviceGetMemoryInfo"));
    const bool whole = table.init != nullptr && table.find != nullptr && table.memory != nullptr;
    return whole && table.init() == 0 ? &table : nullptr;
  }();
  return nvml;
}

// "GPU-8b1f...": 8, 4, 4, 4 and 12 digits.
std::string UuidText(const CUuuid& uuid) {
  const std::string hex = absl::BytesToHexString(absl::string_view(uuid.bytes, sizeof uuid.bytes));
  return absl::StrCat("GPU-", hex.substr(0, 8), "-", hex.substr(8, 4), "-", hex.substr(12, 4), "-",
                      hex.substr(16, 4), "-", hex.substr(20));
}

}  // namespace

absl::StatusOr<Bytes> GpuMemoryUse(const CudaDriver& driver, int ordinal) {
  const Nvml* const nvml = LoadNvml();
  if (nvml == nullptr) return absl::FailedPreconditionError("libnvidia-ml.so.1 cannot be used");
  CUdevice device = 0;
  CUuuid uuid = {};
  absl::Status status = driver.Check(driver.cuDeviceGet(&device, ordinal), "finding the GPU");
  if (status.ok()) {
    status = driver.Check(driver.cuDeviceGetUuid(&uuid, device), "asking for the GPU's name");
  }
  if (!status.ok()) return status;
  void* handle = nullptr;
  NvmlMemory memory;
  if (nvml->find(UuidText(uuid).c_str(), &handle) != 0 || nvml->memory(handle, &memory) != 0) {
    return absl::FailedPreconditionError("NVML does not know the GPU");
  }
  return Bytes(static_cast<int64_t>(memory.used));
}

}  // namespace palimpsest
