#include "common/cuda/testing/fake_driver.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/cuda/testing/fake_state.h"

namespace palimpsest {
namespace fake_cuda {

State& TheState() {
  static State* const state = [] {
    auto* const made = new State;
    MutexLock lock(&made->mu);
    made->total.fill(GiB(64));
    return made;
  }();
  return *state;
}

namespace {

// A context is a pointer to its device's place here.
char contexts[FakeCuda::kDevices];

}  // namespace

CUcontext ContextOf(int device) { return reinterpret_cast<CUcontext>(&contexts[device]); }

CUcontext& CurrentContext() {
  thread_local CUcontext current = nullptr;
  return current;
}

int CurrentDevice() {
  return static_cast<int>(reinterpret_cast<const char*>(CurrentContext()) - contexts);
}

size_t InUse(State& state, int device) ABSL_EXCLUSIVE_LOCKS_REQUIRED(state.mu) {
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

namespace {

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
  *context = ContextOf(device);
  return CUDA_SUCCESS;
}
CUresult PrimaryCtxRelease(CUdevice) { return CUDA_SUCCESS; }
CUresult CtxSetCurrent(CUcontext context) {
  CurrentContext() = context;
  return CUDA_SUCCESS;
}
CUresult CtxGetCurrent(CUcontext* context) {
  *context = CurrentContext();
  return CUDA_SUCCESS;
}
CUresult MemGetInfo(size_t* free, size_t* total) {
  if (NoContext()) return CUDA_ERROR_INVALID_CONTEXT;
  State& state = TheState();
  MutexLock lock(&state.mu);
  const int device = CurrentDevice();
  *total = static_cast<size_t>(state.total[static_cast<size_t>(device)].count());
  *free = *total - std::min(*total, InUse(state, device));
  return CUDA_SUCCESS;
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
  AddMemory(t);
  AddStreams(t);
  return t;
}

}  // namespace
}  // namespace fake_cuda

using fake_cuda::TheState;

const CudaDriver& FakeCudaDriver() {
  static const CudaDriver table = fake_cuda::MakeTable();
  return table;
}

void FakeCuda::Reset() {
  SetMemory(GiB(64));
  CorruptCopy(0);
  SetPeerAccess(true);
  RefuseRegistrations(false);
  RefuseBatches(false);
  Resume();
  MutexLock lock(&TheState().mu);
  TheState().batched_copies = 0;
}

void FakeCuda::SetPeerAccess(bool possible) {
  MutexLock lock(&TheState().mu);
  TheState().peer_access = possible;
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
  fake_cuda::State& state = TheState();
  MutexLock lock(&state.mu);
  return Bytes(static_cast<int64_t>(fake_cuda::InUse(state, device)));
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

bool FakeCuda::IsRegistered(const void* address) {
  MutexLock lock(&TheState().mu);
  return fake_cuda::RangeAround(TheState().registered, address);
}

void FakeCuda::RefuseRegistrations(bool refuse) {
  MutexLock lock(&TheState().mu);
  TheState().refuse_registrations = refuse;
}

void FakeCuda::RefuseBatches(bool refuse) {
  MutexLock lock(&TheState().mu);
  TheState().refuse_batches = refuse;
}

int64_t FakeCuda::BatchedCopies() {
  MutexLock lock(&TheState().mu);
  return TheState().batched_copies;
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
