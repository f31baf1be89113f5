#include "common/cuda/testing/fake_driver.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "common/fd.h"
#include "common/mutex.h"

namespace palimpsest {
namespace {

// A memory file sealed like this is "GPU memory"; others cannot be imported. Its name ends with the
// number of the device.
constexpr int kSeals = F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL;
const std::string kMemoryName = "fake-gpu-memory-";

// Counts as used while anything of this process refers to it.
struct Memory {
  UniqueFd file;
  size_t size = 0;
  ino_t inode = 0;
  int device = 0;
  bool imported = false;
};
using MemoryPtr = std::shared_ptr<Memory>;

struct Event {
  explicit Event(int device) : device(device) {}
  const int device;
  // Of the last record: done when the stream has come that far.
  std::shared_ptr<Notification> done;
};

}  // namespace

// In order, on a thread of its own.
class FakeStream {
 public:
  explicit FakeStream(int device);
  ~FakeStream();
  int device() const { return device_; }
  void Submit(std::function<void()> work);
  void Synchronize();

 private:
  void Run();

  const int device_;
  Mutex mu_;
  CondVar changed_;
  std::deque<std::function<void()>> work_ ABSL_GUARDED_BY(mu_);
  bool busy_ ABSL_GUARDED_BY(mu_) = false;
  bool ending_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

namespace {

struct Mapped {
  MemoryPtr memory;
  int open_to = -1;  // device that has access
};

struct State {
  Mutex mu;
  CondVar changed;
  std::array<Bytes, FakeCuda::kDevices> total ABSL_GUARDED_BY(mu);
  std::map<CUmemGenericAllocationHandle, MemoryPtr> handles ABSL_GUARDED_BY(mu);
  CUmemGenericAllocationHandle next_handle ABSL_GUARDED_BY(mu) = 1;
  std::set<ino_t> created ABSL_GUARDED_BY(mu);  // by this process
  std::map<CUdeviceptr, size_t> ranges ABSL_GUARDED_BY(mu);
  std::map<CUdeviceptr, Mapped> mappings ABSL_GUARDED_BY(mu);
  std::map<void*, size_t> registered ABSL_GUARDED_BY(mu);
  bool paused ABSL_GUARDED_BY(mu) = false;
  int corrupt ABSL_GUARDED_BY(mu) = 0;
  std::map<std::string, FakeCuda::Kernel> kernels ABSL_GUARDED_BY(mu);
};

State& TheState() {
  static State* const state = [] {
    auto* const made = new State;
    MutexLock lock(&made->mu);
    made->total.fill(GiB(64));
    return made;
  }();
  return *state;
}

// A context is a pointer to its device's place here.
char contexts[FakeCuda::kDevices];
thread_local CUcontext current_context = nullptr;
bool NoContext() { return current_context == nullptr; }
int CurrentDevice() {
  return static_cast<int>(reinterpret_cast<const char*>(current_context) - contexts);
}
bool IsDevice(int device) { return device >= 0 && device < FakeCuda::kDevices; }

size_t InUseLocked(State& state, int device) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state.mu) {
  std::map<ino_t, size_t> all;  // an allocation may have been imported again
  const auto count = [&all, device](const Memory& memory) {
    if (memory.device == device) all[memory.inode] = memory.size;
  };
  for (const auto& [handle, memory] : state.handles) count(*memory);
  for (const auto& [address, mapped] : state.mappings) count(*mapped.memory);
  size_t total = 0;
  for (const auto& [inode, size] : all) total += state.created.contains(inode) ? size : 0;
  return total;
}

// Devices and contexts.

CUresult Init(unsigned) { return CUDA_SUCCESS; }
CUresult GetErrorName(CUresult, const char** name) {
  *name = "CUDA_ERROR_OF_THE_FAKE";
  return CUDA_SUCCESS;
}
CUresult GetErrorString(CUresult, const char** text) {
  *text = "raised by the test double of the driver";
  return CUDA_SUCCESS;
}
CUresult DriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}
CUresult DeviceGetCount(int* count) {
  *count = FakeCuda::kDevices;
  return CUDA_SUCCESS;
}
CUresult DeviceGet(CUdevice* device, int ordinal) {
  if (!IsDevice(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult DeviceGetName(char* name, int size, CUdevice) {
  std::strncpy(name, "Fake GPU", static_cast<size_t>(size));
  return CUDA_SUCCESS;
}
CUresult DeviceGetAttribute(int* value, CUdevice_attribute, CUdevice) {
  *value = 1;
  return CUDA_SUCCESS;
}
CUresult DeviceGetUuid(CUuuid* uuid, CUdevice device) {
  std::memset(uuid, 0xfa + device, sizeof *uuid);
  return CUDA_SUCCESS;
}
CUresult DeviceTotalMem(size_t* bytes, CUdevice device) {
  MutexLock lock(&TheState().mu);
  *bytes = static_cast<size_t>(TheState().total[static_cast<size_t>(device)].count());
  return CUDA_SUCCESS;
}
CUresult PrimaryCtxRetain(CUcontext* context, CUdevice device) {
  *context = reinterpret_cast<CUcontext>(&contexts[device]);
  return CUDA_SUCCESS;
}
CUresult PrimaryCtxRelease(CUdevice) { return CUDA_SUCCESS; }
CUresult CtxSetCurrent(CUcontext context) {
  current_context = context;
  return CUDA_SUCCESS;
}
CUresult CtxGetCurrent(CUcontext* context) {
  *context = current_context;
  return CUDA_SUCCESS;
}
CUresult MemGetInfo(size_t* free, size_t* total) {
  if (NoContext()) return CUDA_ERROR_INVALID_CONTEXT;
  State& state = TheState();
  MutexLock lock(&state.mu);
  const int device = CurrentDevice();
  *total = static_cast<size_t>(state.total[static_cast<size_t>(device)].count());
  *free = *total - std::min(*total, InUseLocked(state, device));
  return CUDA_SUCCESS;
}

// Virtual memory management.

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
  if (InUseLocked(state, memory->device) + size > static_cast<size_t>(total.count())) {
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

void* Pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

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

CUresult MemHostRegister(void* address, size_t size, unsigned flags) {
  if (NoContext()) return CUDA_ERROR_INVALID_CONTEXT;
  // A read-only mapping of a sealed file registers only as such.
  if ((flags & CU_MEMHOSTREGISTER_READ_ONLY) == 0) return CUDA_ERROR_NOT_PERMITTED;
  MutexLock lock(&TheState().mu);
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

// Streams and events.

FakeStream* StreamOf(CUstream stream) { return reinterpret_cast<FakeStream*>(stream); }
Event* EventOf(CUevent event) { return reinterpret_cast<Event*>(event); }

CUresult Submit(CUstream stream, std::function<void()> work) {
  if (NoContext()) return CUDA_ERROR_INVALID_CONTEXT;
  if (stream == nullptr || StreamOf(stream)->device() != CurrentDevice()) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  StreamOf(stream)->Submit(std::move(work));
  return CUDA_SUCCESS;
}

CUresult StreamCreate(CUstream* stream, unsigned, int) {
  if (NoContext()) return CUDA_ERROR_INVALID_CONTEXT;
  *stream = reinterpret_cast<CUstream>(new FakeStream(CurrentDevice()));
  return CUDA_SUCCESS;
}
CUresult StreamDestroy(CUstream stream) {
  delete StreamOf(stream);
  return CUDA_SUCCESS;
}
CUresult StreamSynchronize(CUstream stream) {
  if (NoContext()) return CUDA_ERROR_INVALID_CONTEXT;
  StreamOf(stream)->Synchronize();
  return CUDA_SUCCESS;
}
CUresult StreamWaitEvent(CUstream stream, CUevent event, unsigned) {
  const std::shared_ptr<Notification> done = EventOf(event)->done;
  if (done == nullptr) return CUDA_SUCCESS;
  return Submit(stream, [done] { done->WaitForNotification(); });
}
CUresult EventCreate(CUevent* event, unsigned) {
  if (NoContext()) return CUDA_ERROR_INVALID_CONTEXT;
  *event = reinterpret_cast<CUevent>(new Event(CurrentDevice()));
  return CUDA_SUCCESS;
}
CUresult EventDestroy(CUevent event) {
  delete EventOf(event);
  return CUDA_SUCCESS;
}
CUresult EventRecord(CUevent event, CUstream stream) {
  if (stream == nullptr || EventOf(event)->device != StreamOf(stream)->device()) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  auto done = std::make_shared<Notification>();
  EventOf(event)->done = done;
  return Submit(stream, [done] { done->Notify(); });
}
CUresult EventQuery(CUevent event) {
  const std::shared_ptr<Notification> done = EventOf(event)->done;
  return done == nullptr || done->HasBeenNotified() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
CUresult EventSynchronize(CUevent event) {
  if (const std::shared_ptr<Notification> done = EventOf(event)->done; done != nullptr) {
    done->WaitForNotification();
  }
  return CUDA_SUCCESS;
}

// Whether an address that lies in mapped memory is open to the current device; of others nothing is
// known.
bool Open(CUdeviceptr address) {
  State& state = TheState();
  MutexLock lock(&state.mu);
  auto mapping = state.mappings.upper_bound(address);
  if (mapping == state.mappings.begin()) return true;
  --mapping;
  const bool inside = address < mapping->first + mapping->second.memory->size;
  return !inside || NoContext() || mapping->second.open_to == CurrentDevice();
}

CUresult MemcpyHtoD(CUdeviceptr to, const void* from, size_t size, CUstream stream) {
  if (!Open(to)) return CUDA_ERROR_ILLEGAL_ADDRESS;
  return Submit(stream, [to, from, size] {
    std::memcpy(Pointer(to), from, size);
    MutexLock lock(&TheState().mu);
    if (TheState().corrupt > 0 && --TheState().corrupt == 0) {
      auto* const first = static_cast<unsigned char*>(Pointer(to));
      *first = static_cast<unsigned char>(~*first);
    }
  });
}
CUresult MemcpyDtoH(void* to, CUdeviceptr from, size_t size, CUstream stream) {
  if (!Open(from)) return CUDA_ERROR_ILLEGAL_ADDRESS;
  return Submit(stream, [to, from, size] { std::memcpy(to, Pointer(from), size); });
}
CUresult MemcpyDtoD(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
  if (!Open(to) || !Open(from)) return CUDA_ERROR_ILLEGAL_ADDRESS;
  return Submit(stream, [to, from, size] { std::memmove(Pointer(to), Pointer(from), size); });
}
// Host to device alone.
CUresult Memcpy2D(const CUDA_MEMCPY2D* copy, CUstream stream) {
  if (copy->srcMemoryType != CU_MEMORYTYPE_HOST || copy->dstMemoryType != CU_MEMORYTYPE_DEVICE ||
      copy->srcPitch < copy->WidthInBytes || copy->dstPitch < copy->WidthInBytes) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  for (size_t row = 0; row < copy->Height; ++row) {
    const CUresult result =
        MemcpyHtoD(copy->dstDevice + row * copy->dstPitch,
                   static_cast<const std::byte*>(copy->srcHost) + row * copy->srcPitch,
                   copy->WidthInBytes, stream);
    if (result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}
CUresult MemsetD32(CUdeviceptr to, unsigned value, size_t count, CUstream stream) {
  if (!Open(to)) return CUDA_ERROR_ILLEGAL_ADDRESS;
  return Submit(stream, [to, value, count] {
    auto* const words = static_cast<unsigned*>(Pointer(to));
    std::fill(words, words + count, value);
  });
}

// Kernels.

CUresult ModuleLoad(CUmodule* module, const void*) {
  if (NoContext()) return CUDA_ERROR_INVALID_CONTEXT;
  *module = reinterpret_cast<CUmodule>(&TheState());
  return CUDA_SUCCESS;
}
CUresult ModuleUnload(CUmodule) { return CUDA_SUCCESS; }
CUresult ModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  MutexLock lock(&TheState().mu);
  const auto kernel = TheState().kernels.find(name);
  if (kernel == TheState().kernels.end()) return CUDA_ERROR_NOT_FOUND;
  *function = reinterpret_cast<CUfunction>(&kernel->second);
  return CUDA_SUCCESS;
}
CUresult LaunchKernel(CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned,
                      unsigned, unsigned, CUstream stream, void** parameters, void**) {
  return Submit(stream, (*reinterpret_cast<FakeCuda::Kernel*>(function))(parameters));
}

void AwaitRunning() {
  State& state = TheState();
  MutexLock lock(&state.mu);
  while (state.paused) state.changed.Wait(&state.mu);
}

CudaDriver MakeTable() {
  CudaDriver t;
  t.cuInit = Init;
  t.cuGetErrorName = GetErrorName;
  t.cuGetErrorString = GetErrorString;
  t.cuDriverGetVersion = DriverGetVersion;
  t.cuDeviceGetCount = DeviceGetCount;
  t.cuDeviceGet = DeviceGet;
  t.cuDeviceGetName = DeviceGetName;
  t.cuDeviceGetAttribute = DeviceGetAttribute;
  t.cuDeviceGetUuid = DeviceGetUuid;
  t.cuDeviceTotalMem = DeviceTotalMem;
  t.cuDevicePrimaryCtxRetain = PrimaryCtxRetain;
  t.cuDevicePrimaryCtxRelease = PrimaryCtxRelease;
  t.cuCtxSetCurrent = CtxSetCurrent;
  t.cuCtxGetCurrent = CtxGetCurrent;
  t.cuMemGetInfo = MemGetInfo;
  t.cuMemCreate = MemCreate;
  t.cuMemRelease = MemRelease;
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
  t.cuMemcpyHtoDAsync = MemcpyHtoD;
  t.cuMemcpyDtoHAsync = MemcpyDtoH;
  t.cuMemcpyDtoDAsync = MemcpyDtoD;
  t.cuMemcpy2DAsync = Memcpy2D;
  t.cuMemsetD32Async = MemsetD32;
  t.cuStreamCreateWithPriority = StreamCreate;
  t.cuStreamDestroy = StreamDestroy;
  t.cuStreamSynchronize = StreamSynchronize;
  t.cuStreamWaitEvent = StreamWaitEvent;
  t.cuEventCreate = EventCreate;
  t.cuEventDestroy = EventDestroy;
  t.cuEventRecord = EventRecord;
  t.cuEventQuery = EventQuery;
  t.cuEventSynchronize = EventSynchronize;
  t.cuModuleLoadData = ModuleLoad;
  t.cuModuleUnload = ModuleUnload;
  t.cuModuleGetFunction = ModuleGetFunction;
  t.cuLaunchKernel = LaunchKernel;
  return t;
}

}  // namespace

FakeStream::FakeStream(int device) : device_(device), thread_([this] { Run(); }) {}

FakeStream::~FakeStream() {
  {
    MutexLock lock(&mu_);
    ending_ = true;
    changed_.SignalAll();
  }
  thread_.join();
}

void FakeStream::Submit(std::function<void()> work) {
  MutexLock lock(&mu_);
  work_.push_back(std::move(work));
  changed_.SignalAll();
}

void FakeStream::Synchronize() {
  MutexLock lock(&mu_);
  while (busy_ || !work_.empty()) changed_.Wait(&mu_);
}

void FakeStream::Run() {
  while (true) {
    std::function<void()> work;
    {
      MutexLock lock(&mu_);
      busy_ = false;
      changed_.SignalAll();
      while (work_.empty() && !ending_) changed_.Wait(&mu_);
      if (work_.empty()) return;
      work = std::move(work_.front());
      work_.pop_front();
      busy_ = true;
    }
    AwaitRunning();
    work();
  }
}

const CudaDriver& FakeCudaDriver() {
  static const CudaDriver table = MakeTable();
  return table;
}

void FakeCuda::Reset() {
  SetMemory(GiB(64));
  CorruptCopy(0);
  Resume();
}

void FakeCuda::SetMemory(Bytes total) {
  MutexLock lock(&TheState().mu);
  TheState().total.fill(total);
}

void FakeCuda::SetMemory(int device, Bytes total) {
  MutexLock lock(&TheState().mu);
  TheState().total[static_cast<size_t>(device)] = total;
}

Bytes FakeCuda::InUse(int device) {
  State& state = TheState();
  MutexLock lock(&state.mu);
  return Bytes(static_cast<int64_t>(InUseLocked(state, device)));
}

size_t FakeCuda::Handles() {
  MutexLock lock(&TheState().mu);
  return TheState().handles.size();
}

size_t FakeCuda::Mappings() {
  MutexLock lock(&TheState().mu);
  return TheState().mappings.size();
}

size_t FakeCuda::Registered() {
  MutexLock lock(&TheState().mu);
  return TheState().registered.size();
}

void FakeCuda::Pause() {
  MutexLock lock(&TheState().mu);
  TheState().paused = true;
}

void FakeCuda::Resume() {
  MutexLock lock(&TheState().mu);
  TheState().paused = false;
  TheState().changed.SignalAll();
}

void FakeCuda::CorruptCopy(int count) {
  MutexLock lock(&TheState().mu);
  TheState().corrupt = count;
}

void FakeCuda::RegisterKernel(const std::string& name, Kernel kernel) {
  MutexLock lock(&TheState().mu);
  TheState().kernels[name] = std::move(kernel);
}

}  // namespace palimpsest
