#include "broker/device/cuda_slab_device.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "broker/device/descriptor_limit.h"

namespace palimpsest {
namespace {

// Identity::device of all GPU memory: "CUDA".
constexpr uint64_t kCudaMemory = 0x43554441;

}  // namespace

absl::StatusOr<std::unique_ptr<CudaSlabDevice>> CudaSlabDevice::Open(const Options& options) {
  const CudaDriver& driver = *options.driver;
  absl::Status status = ReserveDescriptors(uint64_t{options.slabs} * 2 + options.other_descriptors);
  if (!status.ok()) return status;
  absl::StatusOr<CudaContextPtr> context = CudaContext::Open(driver, options.gpu);
  if (!context.ok()) return context.status();
  if (status = (*context)->MakeCurrent(); !status.ok()) return status;
  absl::StatusOr<Bytes> granularity = CudaAllocation::Granularity(driver, options.gpu);
  if (!granularity.ok()) return granularity.status();
  if (options.slabs == 0 || options.slab_bytes <= Bytes(0) ||
      options.slab_bytes.count() % granularity->count() != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("a pool of ", options.slabs, " slabs of ", options.slab_bytes.count(),
                     " bytes; expected at least one slab of a multiple of GPU ", options.gpu, "'s ",
                     granularity->ToString()));
  }
  absl::StatusOr<CudaContext::MemoryInfo> memory = (*context)->Memory();
  if (!memory.ok()) return memory.status();
  const Bytes pool = options.slab_bytes * options.slabs;
  if (pool > memory->total) {
    return absl::FailedPreconditionError(
        absl::StrCat("a pool of ", pool.ToString(), " on GPU ", options.gpu, " (",
                     (*context)->name(), "), which has ", memory->total.ToString(),
                     ": make pool.bytes smaller, and leave room for the workers' contexts"));
  }
  absl::StatusOr<CudaAddressRange> range = CudaAddressRange::Reserve(driver, options.gpu, pool);
  if (!range.ok()) return range.status();
  absl::StatusOr<CudaStream> stream = CudaStream::Create(*context);
  if (!stream.ok()) return stream.status();
  return std::unique_ptr<CudaSlabDevice>(
      new CudaSlabDevice(options, *std::move(context), *std::move(range), *std::move(stream)));
}

CudaSlabDevice::~CudaSlabDevice() {
  for (uint32_t i = 0; i < options_.slabs; ++i) (void)Drop(SlabId(i));
}

absl::Status CudaSlabDevice::CheckId(SlabId slab) const {
  if (slab.value() < options_.slabs) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("slab ", slab.ToString(), " of a pool of ", options_.slabs));
}

bool CudaSlabDevice::HasMemory(SlabId slab) const {
  MutexLock lock(&mu_);
  return slabs_[slab.value()].handle.valid();
}

absl::Status CudaSlabDevice::Map(SlabId slab, const CudaAllocation& memory) {
  absl::Status status = range_.Map(Place(slab), options_.slab_bytes, memory);
  if (!status.ok()) return status;
  status = range_.Open(Place(slab), options_.slab_bytes);
  if (!status.ok()) (void)range_.Unmap(Place(slab), options_.slab_bytes);
  return status;
}

absl::Status CudaSlabDevice::Zero(SlabId first, uint32_t count) {
  const CUdeviceptr at = range_.base() + static_cast<CUdeviceptr>(Place(first).count());
  const auto words = static_cast<size_t>((options_.slab_bytes * count).count()) / 4;
  const CudaDriver& driver = context_->driver();
  return driver.Check(driver.cuMemsetD32Async(at, 0, words, stream_.get()), "scrubbing slabs");
}

void CudaSlabDevice::Install(SlabId slab, CudaAllocation handle, UniqueFd descriptor,
                             const Identity& identity) {
  auto shared = std::make_shared<const UniqueFd>(std::move(descriptor));
  MutexLock lock(&mu_);
  slabs_[slab.value()] = Slab{std::move(handle), std::move(shared), identity};
}

absl::Status CudaSlabDevice::NewMemory(SlabId slab) {
  absl::StatusOr<CudaAllocation> handle =
      CudaAllocation::Create(context_->driver(), options_.gpu, options_.slab_bytes);
  if (!handle.ok()) return handle.status();
  absl::StatusOr<UniqueFd> descriptor = handle->Export();
  if (!descriptor.ok()) return descriptor.status();
  absl::Status status = Map(slab, *handle);
  if (!status.ok()) return status;
  // What the driver hands out may hold what others left in it.
  status = Zero(slab, 1);
  if (status.ok()) status = stream_.Synchronize();
  if (!status.ok()) {
    (void)range_.Unmap(Place(slab), options_.slab_bytes);
    return status;
  }
  uint64_t number;
  {
    MutexLock lock(&mu_);
    number = ++created_;
  }
  Install(slab, *std::move(handle), *std::move(descriptor),
          {kCudaMemory, uint64_t{options_.generation} << 32 | number});
  return absl::OkStatus();
}

absl::Status CudaSlabDevice::Drop(SlabId slab) {
  Slab old;
  {
    MutexLock lock(&mu_);
    if (!slabs_[slab.value()].handle.valid()) return absl::OkStatus();
    old = std::exchange(slabs_[slab.value()], Slab{});
  }
  return range_.Unmap(Place(slab), options_.slab_bytes);
}

absl::Status CudaSlabDevice::Create(SlabId slab) {
  absl::Status status = CheckId(slab);
  if (status.ok()) status = context_->MakeCurrent();
  if (!status.ok()) return status;
  if (HasMemory(slab)) {
    return absl::AlreadyExistsError(absl::StrCat("slab ", slab.ToString(), " has memory"));
  }
  return NewMemory(slab);
}

absl::Status CudaSlabDevice::CheckMemory(const UniqueFd&, const Identity& granted) const {
  if (granted.device == kCudaMemory) return absl::OkStatus();
  return absl::InvalidArgumentError("the slab was not GPU memory when it was granted");
}

absl::Status CudaSlabDevice::Adopt(SlabId slab, UniqueFd memory, const Identity& granted) {
  absl::Status status = CheckId(slab);
  if (status.ok()) status = CheckMemory(memory, granted);
  if (status.ok()) status = context_->MakeCurrent();
  if (!status.ok()) return status;
  if (HasMemory(slab)) {
    return absl::AlreadyExistsError(absl::StrCat("slab ", slab.ToString(), " has memory"));
  }
  absl::StatusOr<CudaAllocation> handle =
      CudaAllocation::Import(context_->driver(), options_.gpu, memory);
  if (!handle.ok()) return handle.status();
  // Refused unless the allocation has exactly the size of a slab.
  if (status = Map(slab, *handle); !status.ok()) return status;
  Install(slab, *std::move(handle), std::move(memory), granted);
  return absl::OkStatus();
}

absl::Status CudaSlabDevice::Scrub(absl::Span<const SlabId> slabs) {
  if (absl::Status status = context_->MakeCurrent(); !status.ok()) return status;
  std::vector<SlabId> sorted(slabs.begin(), slabs.end());
  std::sort(sorted.begin(), sorted.end());
  for (const SlabId slab : sorted) {
    absl::Status status = CheckId(slab);
    // Without memory, it never came back from an earlier broker's worker.
    if (status.ok() && !HasMemory(slab)) status = NewMemory(slab);
    if (!status.ok()) return status;
  }
  for (size_t begin = 0; begin < sorted.size();) {
    size_t end = begin + 1;
    while (end < sorted.size() && sorted[end].value() == sorted[end - 1].value() + 1) ++end;
    absl::Status status = Zero(sorted[begin], static_cast<uint32_t>(end - begin));
    if (!status.ok()) return status;
    begin = end;
  }
  return stream_.Synchronize();
}

absl::Status CudaSlabDevice::Retire(SlabId slab) {
  absl::Status status = CheckId(slab);
  if (status.ok()) status = context_->MakeCurrent();
  if (status.ok()) status = Drop(slab);
  if (!status.ok()) return status;
  return NewMemory(slab);
}

std::shared_ptr<const UniqueFd> CudaSlabDevice::Descriptor(SlabId slab) {
  MutexLock lock(&mu_);
  return slabs_[slab.value()].descriptor;
}

SlabDevice::Identity CudaSlabDevice::IdentityOf(SlabId slab) {
  MutexLock lock(&mu_);
  return slabs_[slab.value()].identity;
}

}  // namespace palimpsest
