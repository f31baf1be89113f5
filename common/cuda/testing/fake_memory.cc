// Memory of the driver's double: memory files.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <utility>

#include "common/cuda/testing/fake_state.h"

namespace palimpsest::fake_cuda {
namespace {

// A memory file sealed like this is "GPU memory"; others cannot be imported. Its name ends with the
// number of the device.
constexpr int kSeals = F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL;
const std::string kMemoryName = "fake-gpu-memory-";

CUresult MemCreate(CUmemGenericAllocationHandle* handle, size_t size,
                   const CUmemAllocationProp* properties, unsigned long long) {
  const auto granularity = static_cast<size_t>(FakeCuda::kGranularity.count());
  if (size == 0 || size % granularity != 0 ||
      properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
      !IsDevice(properties->location.id)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  auto memory = std::make_shared<Memory>();
  memory->device = properties->location.id;
  const std::string name = kMemoryName + std::to_string(memory->device);
  memory->file = UniqueFd(::memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memory->file.valid() || ::ftruncate(memory->file.get(), static_cast<off_t>(size)) != 0 ||
      ::fcntl(memory->file.get(), F_ADD_SEALS, kSeals) != 0) {
    return CUDA_ERROR_OPERATING_SYSTEM;
  }
  struct stat file = {};
  ::fstat(memory->file.get(), &file);
  memory->size = size;
  memory->inode = file.st_ino;
  State& state = TheState();
  MutexLock lock(&state.mu);
  const Bytes total = state.total[static_cast<size_t>(memory->device)];
  if (InUse(state, memory->device) + size > static_cast<size_t>(total.count())) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *handle = state.next_handle++;
  state.created.insert(memory->inode);
  state.handles[*handle] = std::move(memory);
  return CUDA_SUCCESS;
}

CUresult MemRelease(CUmemGenericAllocationHandle handle) {
  MemoryPtr memory;  // closed after the lock
  MutexLock lock(&TheState().mu);
  const auto found = TheState().handles.find(handle);
  if (found == TheState().handles.end()) return CUDA_ERROR_INVALID_VALUE;
  memory = std::move(found->second);
  TheState().handles.erase(found);
  return CUDA_SUCCESS;
}

// Another number for it, where a driver counts those who have the first.
CUresult MemRetain(CUmemGenericAllocationHandle* handle, void* address) {
  State& state = TheState();
  MutexLock lock(&state.mu);
  const auto at = reinterpret_cast<CUdeviceptr>(address);
  auto mapping = state.mappings.upper_bound(at);
  if (mapping == state.mappings.begin()) return CUDA_ERROR_INVALID_VALUE;
  --mapping;
  const MemoryPtr& memory = mapping->second.memory;
  if (at >= mapping->first + memory->size) return CUDA_ERROR_INVALID_VALUE;
  *handle = state.next_handle++;
  state.handles[*handle] = memory;
  return CUDA_SUCCESS;
}

CUresult MemExport(void* descriptor, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType,
                   unsigned long long) {
  MutexLock lock(&TheState().mu);
  const auto found = TheState().handles.find(handle);
  if (found == TheState().handles.end() || found->second->imported) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const int copy = ::fcntl(found->second->file.get(), F_DUPFD, 0);
  if (copy < 0) return CUDA_ERROR_OPERATING_SYSTEM;
  *static_cast<int*>(descriptor) = copy;
  return CUDA_SUCCESS;
}

// Of a memory file, from its name.
int DeviceOf(int fd) {
  char target[256] = "";
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  if (::readlink(link.c_str(), target, sizeof target - 1) < 0) return -1;
  const std::string name(target);
  const size_t found = name.find(kMemoryName);
  return found == std::string::npos ? -1 : std::atoi(name.c_str() + found + kMemoryName.size());
}

CUresult MemImport(CUmemGenericAllocationHandle* handle, void* descriptor,
                   CUmemAllocationHandleType) {
  const int fd = static_cast<int>(reinterpret_cast<intptr_t>(descriptor));
  struct stat file = {};
  if (::fstat(fd, &file) != 0 || ::fcntl(fd, F_GET_SEALS) != kSeals) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  auto memory = std::make_shared<Memory>();
  memory->file = UniqueFd(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  memory->size = static_cast<size_t>(file.st_size);
  memory->inode = file.st_ino;
  memory->device = DeviceOf(fd);
  if (!IsDevice(memory->device)) return CUDA_ERROR_INVALID_VALUE;
  memory->imported = true;
  MutexLock lock(&TheState().mu);
  *handle = TheState().next_handle++;
  TheState().handles[*handle] = std::move(memory);
  return CUDA_SUCCESS;
}

CUresult MemGetProperties(CUmemAllocationProp* properties, CUmemGenericAllocationHandle handle) {
  MutexLock lock(&TheState().mu);
  const auto found = TheState().handles.find(handle);
  if (found == TheState().handles.end()) return CUDA_ERROR_INVALID_VALUE;
  *properties = {};
  properties->type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties->requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties->location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = found->second->device};
  return CUDA_SUCCESS;
}

CUresult MemGetGranularity(size_t* granularity, const CUmemAllocationProp*,
                           CUmemAllocationGranularity_flags) {
  *granularity = static_cast<size_t>(FakeCuda::kGranularity.count());
  return CUDA_SUCCESS;
}

CUresult AddressReserve(CUdeviceptr* address, size_t size, size_t, CUdeviceptr,
                        unsigned long long) {
  void* const range =
      ::mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *address = reinterpret_cast<CUdeviceptr>(range);
  MutexLock lock(&TheState().mu);
  TheState().ranges[*address] = size;
  return CUDA_SUCCESS;
}

CUresult AddressFree(CUdeviceptr address, size_t size) {
  State& state = TheState();
  MutexLock lock(&state.mu);
  const auto mapped = state.mappings.lower_bound(address);
  if (state.ranges.count(address) == 0 || state.ranges[address] != size ||
      (mapped != state.mappings.end() && mapped->first < address + size)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  state.ranges.erase(address);
  ::munmap(Pointer(address), size);
  return CUDA_SUCCESS;
}

// Whether [address, address + size) is inside one reserved range.
bool Reserved(State& state, CUdeviceptr address, size_t size)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(state.mu) {
  auto range = state.ranges.upper_bound(address);
  if (range == state.ranges.begin()) return false;
  --range;
  return address + size <= range->first + range->second;
}

// The mappings that cover exactly [address, address + size); empty if they do not.
std::map<CUdeviceptr, Mapped> Covering(State& state, CUdeviceptr address, size_t size)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(state.mu) {
  std::map<CUdeviceptr, Mapped> covering;
  CUdeviceptr at = address;
  while (at < address + size) {
    const auto mapping = state.mappings.find(at);
    if (mapping == state.mappings.end()) return {};
    covering.insert(*mapping);
    at += mapping->second.memory->size;
  }
  if (at != address + size) covering.clear();
  return covering;
}

CUresult MemMap(CUdeviceptr address, size_t size, size_t offset,
                CUmemGenericAllocationHandle handle, unsigned long long) {
  State& state = TheState();
  MutexLock lock(&state.mu);
  const auto found = state.handles.find(handle);
  if (found == state.handles.end() || offset != 0 || size != found->second->size ||
      !Reserved(state, address, size)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const auto after = state.mappings.lower_bound(address);
  if (after != state.mappings.end() && after->first < address + size) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (after != state.mappings.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second.memory->size > address) return CUDA_ERROR_INVALID_VALUE;
  }
  state.mappings[address] = Mapped{found->second};
  return CUDA_SUCCESS;
}

CUresult MemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc* access,
                      size_t count) {
  if (count != 1 || access->location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
      !IsDevice(access->location.id)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  State& state = TheState();
  MutexLock lock(&state.mu);
  const auto covering = Covering(state, address, size);
  if (covering.empty()) return CUDA_ERROR_INVALID_VALUE;
  for (const auto& [at, mapped] : covering) {
    if (mapped.memory->device != access->location.id && !state.peer_access) {
      return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
    }
  }
  for (const auto& [at, mapped] : covering) {
    if (::mmap(Pointer(at), mapped.memory->size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
               mapped.memory->file.get(), 0) == MAP_FAILED) {
      return CUDA_ERROR_OPERATING_SYSTEM;
    }
    state.mappings[at].open_to = access->location.id;
  }
  return CUDA_SUCCESS;
}

CUresult MemUnmap(CUdeviceptr address, size_t size) {
  std::map<CUdeviceptr, Mapped> covering;  // closed after the lock
  State& state = TheState();
  MutexLock lock(&state.mu);
  covering = Covering(state, address, size);
  if (covering.empty()) return CUDA_ERROR_INVALID_VALUE;
  for (const auto& [at, mapped] : covering) state.mappings.erase(at);
  const void* const reserved =
      ::mmap(Pointer(address), size, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return reserved != MAP_FAILED ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

// Host memory.

// Of the mapping that contains the address.
bool Writable(const void* address) {
  std::ifstream maps("/proc/self/maps");
  const auto wanted = reinterpret_cast<uintptr_t>(address);
  for (std::string line; std::getline(maps, line);) {
    std::istringstream fields(line);
    uintptr_t begin = 0, end = 0;
    char dash = 0;
    std::string access;
    fields >> std::hex >> begin >> dash >> end >> access;
    if (begin <= wanted && wanted < end) return access.size() > 1 && access[1] == 'w';
  }
  return false;
}

CUresult MemHostRegister(void* address, size_t size, unsigned flags) {
  if (NoContext()) return CUDA_ERROR_INVALID_CONTEXT;
  // A read-only mapping of a sealed file registers only as such.
  if ((flags & CU_MEMHOSTREGISTER_READ_ONLY) == 0 && !Writable(address)) {
    return CUDA_ERROR_NOT_PERMITTED;
  }
  MutexLock lock(&TheState().mu);
  if (TheState().refuse_registrations) return CUDA_ERROR_OUT_OF_MEMORY;
  if (!TheState().registered.emplace(address, size).second) {
    return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  }
  return CUDA_SUCCESS;
}
CUresult MemHostUnregister(void* address) {
  MutexLock lock(&TheState().mu);
  return TheState().registered.erase(address) == 1 ? CUDA_SUCCESS
                                                   : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}
CUresult MemHostAlloc(void** address, size_t size, unsigned) {
  if (NoContext()) return CUDA_ERROR_INVALID_CONTEXT;
  *address = std::calloc(1, size);
  return *address == nullptr ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}
CUresult MemFreeHost(void* address) {
  std::free(address);
  return CUDA_SUCCESS;
}

}  // namespace

bool RangeAround(const std::map<const void*, size_t>& ranges, const void* address) {
  auto range = ranges.upper_bound(address);
  if (range == ranges.begin()) return false;
  --range;
  return address < static_cast<const std::byte*>(range->first) + range->second;
}

void AddMemory(CudaDriver& t) {
  t.cuMemCreate = MemCreate;
  t.cuMemRelease = MemRelease;
  t.cuMemRetainAllocationHandle = MemRetain;
  t.cuMemExportToShareableHandle = MemExport;
  t.cuMemImportFromShareableHandle = MemImport;
  t.cuMemGetAllocationPropertiesFromHandle = MemGetProperties;
  t.cuMemGetAllocationGranularity = MemGetGranularity;
  t.cuMemAddressReserve = AddressReserve;
  t.cuMemAddressFree = AddressFree;
  t.cuMemMap = MemMap;
  t.cuMemUnmap = MemUnmap;
  t.cuMemSetAccess = MemSetAccess;
  t.cuMemHostRegister = MemHostRegister;
  t.cuMemHostUnregister = MemHostUnregister;
  t.cuMemHostAlloc = MemHostAlloc;
  t.cuMemFreeHost = MemFreeHost;
}

}  // namespace palimpsest::fake_cuda
