#include "broker/device/host_slab_device.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/descriptor_limit.h"
#include "common/file.h"
#include "common/mapping.h"
#include "common/memory_file.h"

namespace palimpsest {
namespace {

// Pages of the hugetlb pool, in use or not: a restarted broker's slabs are still in use.
int64_t HugetlbPages() {
  absl::StatusOr<std::string> text =
      ReadFile("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", KiB(4));
  int64_t pages;
  return text.ok() && absl::SimpleAtoi(*text, &pages) ? pages : 0;
}

}  // namespace

absl::StatusOr<std::unique_ptr<HostSlabDevice>> HostSlabDevice::Open(const Options& options) {
  if (options.slabs == 0 || options.slab_bytes <= Bytes(0) ||
      options.slab_bytes.count() % kHugePage.count() != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("a pool of ", options.slabs, " slabs of ", options.slab_bytes.count(),
                     " bytes; expected at least one slab of a multiple of ", kHugePage.ToString()));
  }
  // Twice: a slab's old descriptor may still be on its way to a worker when it is retired.
  const absl::Status limit =
      ReserveDescriptors(uint64_t{options.slabs} * 2 + options.other_descriptors);
  if (!limit.ok()) return limit;

  Pages best = options.pages;
  const int64_t needed = int64_t{options.slabs} * (options.slab_bytes / kHugePage);
  if (best == Pages::kHugetlb && HugetlbPages() < needed) best = Pages::kTransparent;
  return std::unique_ptr<HostSlabDevice>(new HostSlabDevice(options, best));
}

absl::Status HostSlabDevice::CheckId(SlabId slab) const {
  if (slab.value() < options_.slabs) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("slab ", slab.ToString(), " of a pool of ", options_.slabs));
}

absl::StatusOr<UniqueFd> HostSlabDevice::NewMemoryOf(Pages pages) {
  absl::StatusOr<UniqueFd> memory = NewHostMemory("palimpsest-slab", options_.slab_bytes, pages);
  if (!memory.ok()) return memory;
  MutexLock lock(&mu_);
  ++created_[static_cast<size_t>(pages)];
  return memory;
}

absl::StatusOr<UniqueFd> HostSlabDevice::NewMemory() {
  if (best_pages_ == Pages::kHugetlb) {
    // Somebody else may have taken pages of the hugetlb pool.
    absl::StatusOr<UniqueFd> memory = NewMemoryOf(Pages::kHugetlb);
    if (memory.ok()) return memory;
    return NewMemoryOf(Pages::kTransparent);
  }
  return NewMemoryOf(best_pages_);
}

void HostSlabDevice::Install(SlabId slab, UniqueFd memory) {
  struct stat file = {};
  ::fstat(memory.get(), &file);
  auto shared = std::make_shared<const SlabDescriptors>(OneDescriptor(std::move(memory)));
  MutexLock lock(&mu_);
  // The old one is closed by whoever holds it last, at the latest when `shared` goes out of scope.
  std::swap(slabs_[slab.value()].memory, shared);
  slabs_[slab.value()].identity = {file.st_dev, file.st_ino};
}

absl::Status HostSlabDevice::Create(SlabId slab) {
  if (absl::Status status = CheckId(slab); !status.ok()) return status;
  if (Descriptors(slab) != nullptr) {
    return absl::AlreadyExistsError(absl::StrCat("slab ", slab.ToString(), " has memory"));
  }
  absl::StatusOr<UniqueFd> memory = NewMemory();
  if (!memory.ok()) return memory.status();
  Install(slab, *std::move(memory));
  return absl::OkStatus();
}

absl::Status HostSlabDevice::CheckMemory(const SlabDescriptors& memory,
                                         const Identity& granted) const {
  if (memory.size() != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat(memory.size(), " descriptors for a slab of host memory, expected one"));
  }
  struct stat file = {};
  if (::fstat(memory[0].get(), &file) != 0) return ErrnoStatus("fstat of a slab");
  if (Identity{file.st_dev, file.st_ino} == granted) return absl::OkStatus();
  return absl::InvalidArgumentError("the descriptor is of other memory than was granted");
}

absl::Status HostSlabDevice::Scrub(absl::Span<const SlabId>) {
  return absl::UnimplementedError("slabs of host memory are retired");
}

absl::Status HostSlabDevice::Adopt(SlabId slab, SlabDescriptors memory, const Identity& granted) {
  if (absl::Status status = CheckId(slab); !status.ok()) return status;
  if (absl::Status status = CheckMemory(memory, granted); !status.ok()) return status;
  if (Descriptors(slab) != nullptr) {
    return absl::AlreadyExistsError(absl::StrCat("slab ", slab.ToString(), " has memory"));
  }
  if (absl::Status status = CheckSlabFile(memory[0].get(), options_.slab_bytes); !status.ok()) {
    return status;
  }
  Install(slab, std::move(memory[0]));
  return absl::OkStatus();
}

absl::Status HostSlabDevice::Retire(SlabId slab) {
  if (absl::Status status = CheckId(slab); !status.ok()) return status;
  if (const auto old = Descriptors(slab); old != nullptr) {
    if (::ftruncate(old->front().get(), 0) != 0) return ErrnoStatus("cannot truncate a slab");
    MutexLock lock(&mu_);
    slabs_[slab.value()] = {};
  }
  absl::StatusOr<UniqueFd> memory = NewMemory();
  if (!memory.ok()) return memory.status();
  Install(slab, *std::move(memory));
  return absl::OkStatus();
}

std::shared_ptr<const SlabDescriptors> HostSlabDevice::Descriptors(SlabId slab) {
  MutexLock lock(&mu_);
  return slabs_[slab.value()].memory;
}

SlabDevice::Identity HostSlabDevice::IdentityOf(SlabId slab) {
  MutexLock lock(&mu_);
  return slabs_[slab.value()].identity;
}

uint64_t HostSlabDevice::created(Pages pages) const {
  MutexLock lock(&mu_);
  return created_[static_cast<size_t>(pages)];
}

}  // namespace palimpsest
