// The yardstick: memcpy between two sets of slabs that are made, mapped and faulted in as the
// broker's are (huge pages where it gets them), slab by slab, each thread a contiguous share.
#ifndef PALIMPSEST_TESTS_BENCHMARK_MEMORY_COPY_H_
#define PALIMPSEST_TESTS_BENCHMARK_MEMORY_COPY_H_

#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "broker/device/host_slab_device.h"
#include "common/bytes.h"
#include "common/mapping.h"

namespace palimpsest {

class MemoryCopy {
 public:
  struct Time {
    absl::Duration wall;
    absl::Duration cpu;  // of all threads together
  };

  static absl::StatusOr<std::unique_ptr<MemoryCopy>> Create(int slabs);

  Time Run(int threads);
  Bytes bytes() const { return to_.size(); }
  // Whether every slab got huge pages.
  bool huge_pages() const { return device_->created(HostSlabDevice::Pages::kSmall) == 0; }

 private:
  MemoryCopy() = default;

  std::unique_ptr<HostSlabDevice> device_;
  AddressRange from_;
  AddressRange to_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_TESTS_BENCHMARK_MEMORY_COPY_H_
