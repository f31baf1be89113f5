// Slabs in host memory: one memfd each (host_memory.h), made of huge pages where possible. Pages,
// in order of preference: from the hugetlb pool, if vm.nr_hugepages has room for all slabs;
// transparent huge pages; small pages.
#ifndef PALIMPSEST_BROKER_DEVICE_HOST_SLAB_DEVICE_H_
#define PALIMPSEST_BROKER_DEVICE_HOST_SLAB_DEVICE_H_

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "broker/device/host_memory.h"
#include "broker/device/slab_device.h"
#include "common/bytes.h"
#include "common/mutex.h"

namespace palimpsest {

class HostSlabDevice : public SlabDevice {
 public:
  using Pages = HostPages;

  struct Options {
    uint32_t slabs = 0;
    // A multiple of 2 MiB.
    Bytes slab_bytes = MiB(2);
    // The best kind of pages to try.
    Pages pages = Pages::kHugetlb;
    // Descriptors that this process needs besides those of the pool.
    uint32_t other_descriptors = 4096;
  };

  // Creates no memory yet. Raises this process's limit of descriptors; FailedPrecondition when the
  // hard limit is too low for the pool.
  static absl::StatusOr<std::unique_ptr<HostSlabDevice>> Open(const Options& options);

  std::string name() const override { return "host"; }
  absl::Status Create(SlabId slab) override;
  absl::Status CheckMemory(const SlabDescriptors& memory, const Identity& granted) const override;
  absl::Status Adopt(SlabId slab, SlabDescriptors memory, const Identity& granted) override;
  absl::Status Scrub(absl::Span<const SlabId> slabs) override;
  absl::Status Retire(SlabId slab) override;
  std::shared_ptr<const SlabDescriptors> Descriptors(SlabId slab) override;
  Identity IdentityOf(SlabId slab) override;

  // Best kind of pages that new slabs get.
  Pages best_pages() const { return best_pages_; }
  // Slabs created so far with pages of that kind.
  uint64_t created(Pages pages) const;

 private:
  struct Slab {
    std::shared_ptr<const SlabDescriptors> memory;  // one
    Identity identity;
  };

  HostSlabDevice(const Options& options, Pages best_pages)
      : options_(options), best_pages_(best_pages), slabs_(options.slabs) {}

  absl::Status CheckId(SlabId slab) const;
  absl::StatusOr<UniqueFd> NewMemory();
  absl::StatusOr<UniqueFd> NewMemoryOf(Pages pages);
  void Install(SlabId slab, UniqueFd memory);

  const Options options_;
  const Pages best_pages_;

  mutable Mutex mu_;
  std::vector<Slab> slabs_ ABSL_GUARDED_BY(mu_);
  std::array<uint64_t, 3> created_ ABSL_GUARDED_BY(mu_) = {};
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_DEVICE_HOST_SLAB_DEVICE_H_
