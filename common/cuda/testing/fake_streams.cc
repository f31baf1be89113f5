// Streams of the driver's double, threads, and what runs on them.
#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include "common/cuda/testing/fake_state.h"

namespace palimpsest::fake_cuda {
namespace {

struct Event {
  explicit Event(int device) : device(device) {}
  const int device;
  // Of the last record: done when the stream has come that far.
  std::shared_ptr<Notification> done;
};

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

void AwaitRunning() {
  State& state = TheState();
  MutexLock lock(&state.mu);
  while (state.paused) state.changed.Wait(&state.mu);
}

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

void CopyToDevice(CUdeviceptr to, const void* from, size_t size) {
  std::memcpy(Pointer(to), from, size);
  MutexLock lock(&TheState().mu);
  if (TheState().corrupt > 0 && --TheState().corrupt == 0) {
    auto* const first = static_cast<unsigned char*>(Pointer(to));
    *first = static_cast<unsigned char>(~*first);
  }
}

CUresult MemcpyHtoD(CUdeviceptr to, const void* from, size_t size, CUstream stream) {
  if (!Open(to)) return CUDA_ERROR_ILLEGAL_ADDRESS;
  return Submit(stream, [to, from, size] { CopyToDevice(to, from, size); });
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
// Bytes from the address to the end of the allocation that is mapped there; 0: none is.
size_t LeftOfAllocation(CUdeviceptr address) {
  State& state = TheState();
  MutexLock lock(&state.mu);
  auto mapping = state.mappings.upper_bound(address);
  if (mapping == state.mappings.begin()) return 0;
  --mapping;
  const CUdeviceptr end = mapping->first + mapping->second.memory->size;
  return address < end ? end - address : 0;
}

struct BatchedCopy {
  CUdeviceptr to;
  CUdeviceptr from;
  size_t size;
  bool to_device;
};

// Between host and device alone.
CUresult MemcpyBatch(CUdeviceptr* to, CUdeviceptr* from, size_t* sizes, size_t count,
                     CUmemcpyAttributes* attributes, size_t* first, size_t attribute_count,
                     CUstream stream) {
  {
    MutexLock lock(&TheState().mu);
    if (TheState().refuse_batches) return CUDA_ERROR_INVALID_VALUE;
  }
  if (count == 0 || attribute_count != 1 || first[0] != 0 ||
      attributes[0].srcAccessOrder != CU_MEMCPY_SRC_ACCESS_ORDER_STREAM) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  std::vector<BatchedCopy> copies;
  // Last first: whoever relies on an order finds out.
  for (size_t i = count; i-- > 0;) {
    const size_t left_to = LeftOfAllocation(to[i]);
    const size_t left_from = LeftOfAllocation(from[i]);
    if ((left_to > 0) == (left_from > 0) || std::max(left_to, left_from) < sizes[i]) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (!Open(left_to > 0 ? to[i] : from[i])) return CUDA_ERROR_ILLEGAL_ADDRESS;
    copies.push_back({to[i], from[i], sizes[i], left_to > 0});
  }
  const CUresult result = Submit(stream, [copies = std::move(copies)] {
    for (const BatchedCopy& copy : copies) {
      if (copy.to_device) {
        CopyToDevice(copy.to, Pointer(copy.from), copy.size);
      } else {
        std::memcpy(Pointer(copy.to), Pointer(copy.from), copy.size);
      }
    }
  });
  MutexLock lock(&TheState().mu);
  if (result == CUDA_SUCCESS) TheState().batched_copies += static_cast<int64_t>(count);
  return result;
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

}  // namespace

void AddStreams(CudaDriver& t) {
  t.cuMemcpyHtoDAsync = MemcpyHtoD;
  t.cuMemcpyDtoHAsync = MemcpyDtoH;
  t.cuMemcpyDtoDAsync = MemcpyDtoD;
  t.cuMemcpy2DAsync = Memcpy2D;
  t.cuMemcpyBatchAsync = MemcpyBatch;
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
}

}  // namespace palimpsest::fake_cuda
