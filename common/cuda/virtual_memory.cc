#include "common/cuda/virtual_memory.h"

#include "absl/strings/str_cat.h"

namespace palimpsest {
namespace {

CUmemAllocationProp PropertiesOn(int ordinal) {
  CUmemAllocationProp properties = {};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = ordinal};
  return properties;
}

size_t Size(Bytes bytes) { return static_cast<size_t>(bytes.count()); }

CUdeviceptr Behind(CUdeviceptr base, Bytes offset) {
  return base + static_cast<CUdeviceptr>(offset.count());
}

}  // namespace

absl::StatusOr<Bytes> CudaAllocation::Granularity(const CudaDriver& driver, int ordinal) {
  const CUmemAllocationProp properties = PropertiesOn(ordinal);
  size_t granularity = 0;
  absl::Status status =
      driver.Check(driver.cuMemGetAllocationGranularity(&granularity, &properties,
                                                        CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
                   absl::StrCat("asking GPU ", ordinal, " for its granularity of memory"));
  if (!status.ok()) return status;
  return Bytes(static_cast<int64_t>(granularity));
}

absl::StatusOr<CudaAllocation> CudaAllocation::Create(const CudaDriver& driver, int ordinal,
                                                      Bytes size) {
  const CUmemAllocationProp properties = PropertiesOn(ordinal);
  CudaAllocation memory;
  absl::Status status =
      driver.Check(driver.cuMemCreate(&memory.handle_, Size(size), &properties, 0),
                   absl::StrCat("allocating ", size.ToString(), " on GPU ", ordinal));
  if (!status.ok()) return status;
  memory.driver_ = &driver;
  return memory;
}

absl::StatusOr<CudaAllocation> CudaAllocation::Import(const CudaDriver& driver,
                                                      const UniqueFd& descriptor) {
  CudaAllocation memory;
  absl::Status status = driver.Check(
      driver.cuMemImportFromShareableHandle(
          &memory.handle_, reinterpret_cast<void*>(static_cast<intptr_t>(descriptor.get())),
          CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
      "importing GPU memory from a descriptor");
  if (!status.ok()) return status;
  memory.driver_ = &driver;
  return memory;
}

absl::StatusOr<CudaAllocation> CudaAllocation::Import(const CudaDriver& driver, int ordinal,
                                                      const UniqueFd& descriptor) {
  absl::StatusOr<CudaAllocation> memory = Import(driver, descriptor);
  if (!memory.ok()) return memory;
  CUmemAllocationProp properties = {};
  const absl::Status status =
      driver.Check(driver.cuMemGetAllocationPropertiesFromHandle(&properties, memory->handle_),
                   "asking for the properties of imported GPU memory");
  if (!status.ok()) return status;
  if (properties.location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
      properties.location.id != ordinal) {
    return absl::InvalidArgumentError(
        absl::StrCat("the memory lies at location ", properties.location.id, " of type ",
                     static_cast<int>(properties.location.type), ", expected GPU ", ordinal));
  }
  return memory;
}

absl::StatusOr<CudaAllocation> CudaAllocation::At(const CudaDriver& driver, CUdeviceptr address) {
  CudaAllocation memory;
  absl::Status status = driver.Check(
      driver.cuMemRetainAllocationHandle(&memory.handle_, reinterpret_cast<void*>(address)),
      "asking for the GPU memory that is mapped at an address");
  if (!status.ok()) return status;
  memory.driver_ = &driver;
  return memory;
}

void CudaAllocation::Reset() {
  if (driver_ != nullptr) driver_->cuMemRelease(handle_);
  driver_ = nullptr;
  handle_ = 0;
}

absl::StatusOr<UniqueFd> CudaAllocation::Export() const {
  int descriptor = -1;
  absl::Status status =
      driver_->Check(driver_->cuMemExportToShareableHandle(
                         &descriptor, handle_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
                     "exporting GPU memory as a descriptor");
  if (!status.ok()) return status;
  UniqueFd exported(descriptor);
  if (::fcntl(descriptor, F_SETFD, FD_CLOEXEC) != 0) return ErrnoStatus("FD_CLOEXEC");
  return exported;
}

absl::StatusOr<CudaAddressRange> CudaAddressRange::Reserve(const CudaDriver& driver, int ordinal,
                                                           Bytes size) {
  CudaAddressRange range;
  absl::Status status =
      driver.Check(driver.cuMemAddressReserve(&range.base_, Size(size), 0, 0, 0),
                   absl::StrCat("reserving ", size.ToString(), " of GPU addresses"));
  if (!status.ok()) return status;
  range.driver_ = &driver;
  range.ordinal_ = ordinal;
  range.size_ = size;
  return range;
}

CudaAddressRange::~CudaAddressRange() {
  if (driver_ != nullptr) driver_->cuMemAddressFree(base_, Size(size_));
}

absl::Status CudaAddressRange::Map(Bytes offset, Bytes size, const CudaAllocation& memory) const {
  return driver_->Check(driver_->cuMemMap(Behind(base_, offset), Size(size), 0, memory.get(), 0),
                        absl::StrCat("mapping ", size.ToString(), " of GPU memory"));
}

absl::Status CudaAddressRange::Open(Bytes offset, Bytes size) const {
  const CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = ordinal_},
                                  .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  return driver_->Check(driver_->cuMemSetAccess(Behind(base_, offset), Size(size), &access, 1),
                        absl::StrCat("giving GPU ", ordinal_, " access to ", size.ToString()));
}

absl::Status CudaAddressRange::Unmap(Bytes offset, Bytes size) const {
  return driver_->Check(driver_->cuMemUnmap(Behind(base_, offset), Size(size)),
                        absl::StrCat("unmapping ", size.ToString(), " of GPU memory"));
}

}  // namespace palimpsest
