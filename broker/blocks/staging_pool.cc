#include "broker/blocks/staging_pool.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "broker/device/host_memory.h"
#include "broker/device/memory_limit.h"
#include "broker/tier/extent_allocator.h"
#include "common/mapping.h"
#include "common/monotonic_time.h"
#include "common/mutex.h"

namespace palimpsest {
namespace {

constexpr Bytes kUnit = KiB(4);

}  // namespace

class StagingPool::Memory {
 public:
  Memory(Mapping mapping, Bytes size)
      : mapping_(std::move(mapping)), room_(static_cast<uint64_t>(size / kUnit)) {}

  absl::StatusOr<Extent> Allocate(uint64_t units, absl::Duration patience) {
    const absl::Time deadline = MonotonicNow() + patience;
    MutexLock lock(&mu_);
    while (!closed_) {
      if (const auto extent = room_.Allocate(units); extent.has_value()) return *extent;
      if (MonotonicNow() >= deadline) {
        return absl::DeadlineExceededError("no staging memory got free in time");
      }
      changed_.WaitWithDeadline(&mu_, deadline);
    }
    return absl::CancelledError("the block store is shutting down");
  }
  void Free(Extent extent) {
    MutexLock lock(&mu_);
    room_.Free(extent);
    changed_.SignalAll();
  }
  void Close() {
    MutexLock lock(&mu_);
    closed_ = true;
    changed_.SignalAll();
  }
  uint64_t free_units() const {
    MutexLock lock(&mu_);
    return room_.free_units();
  }
  std::byte* At(Extent extent) const {
    return mapping_.data() + (kUnit * static_cast<int64_t>(extent.first)).count();
  }

 private:
  const Mapping mapping_;
  mutable Mutex mu_;
  CondVar changed_;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  ExtentAllocator room_ ABSL_GUARDED_BY(mu_);
};

absl::StatusOr<std::unique_ptr<StagingPool>> StagingPool::Make(Bytes size) {
  if (size < kHugePage || size.count() % kHugePage.count() != 0) {
    return absl::InvalidArgumentError(absl::StrCat("a staging pool of ", size.count(),
                                                   " bytes, expected a multiple of ",
                                                   kHugePage.ToString()));
  }
  if (absl::Status limit = CheckMemoryLimit(size); !limit.ok()) return limit;
  absl::StatusOr<UniqueFd> file =
      NewHostMemory("palimpsest-staging", size, HostPages::kTransparent);
  if (!file.ok()) return file.status();
  absl::StatusOr<Mapping> mapping =
      Mapping::Map(file->get(), size, MapAccess::kReadWrite, MapPopulate::kYes);
  if (!mapping.ok()) return mapping.status();
  return std::unique_ptr<StagingPool>(
      new StagingPool(size, std::make_shared<Memory>(*std::move(mapping), size)));
}

absl::StatusOr<PinnedBytes<std::byte>> StagingPool::Await(Bytes length, absl::Duration patience) {
  if (length < Bytes(1) || length > size_) {
    return absl::ResourceExhaustedError(absl::StrCat("a block of ", length.count(),
                                                     " bytes does not fit the ", size_.ToString(),
                                                     " of staging memory (tiers.staging)"));
  }
  const absl::StatusOr<Extent> extent =
      memory_->Allocate(static_cast<uint64_t>(CeilDiv(length, kUnit)), patience);
  if (!extent.ok()) return extent.status();
  std::byte* const data = memory_->At(*extent);
  return PinnedBytes<std::byte>{
      {data, static_cast<size_t>(length.count())},
      std::shared_ptr<const void>(
          data, [memory = memory_, extent = *extent](const void*) { memory->Free(extent); })};
}

void StagingPool::Close() { memory_->Close(); }

Bytes StagingPool::free() const { return kUnit * static_cast<int64_t>(memory_->free_units()); }

}  // namespace palimpsest
