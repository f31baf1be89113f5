// Tier 2's memory: what the broker maps of a CXL device, in whatever way the system shows it. All
// of it is faulted in at once, so that what is missing is an error here and not a SIGBUS later.
#ifndef PALIMPSEST_BROKER_TIER_CXL_CXL_MEMORY_H_
#define PALIMPSEST_BROKER_TIER_CXL_CXL_MEMORY_H_

#include <cstddef>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "common/bytes.h"

namespace palimpsest {

// Exactly one of node, path and emulated is given.
struct CxlOptions {
  // A multiple of 2 MiB.
  Bytes size;
  // A NUMA node, of memory alone as a rule: pages come from there or not at all.
  std::optional<int> node;
  // A DAX device (/dev/dax0.0), or a folder of a tmpfs or of a file system mounted with DAX.
  std::string path;
  // Ordinary memory that is used as slowly as this says.
  struct Emulated {
    double bytes_per_second = 0;
    absl::Duration latency;
  };
  std::optional<Emulated> emulated;
  // Before the paths of /proc and /sys, where limits of memory are read.
  std::string system_root;

  absl::Status Validate() const;
};

// A mapping. Move-only.
class CxlMemory {
 public:
  // InvalidArgument; FailedPrecondition if there is no such node or path, or it is of another kind;
  // ResourceExhausted if it, the machine or a control group has not enough memory.
  static absl::StatusOr<CxlMemory> Map(const CxlOptions& options);

  CxlMemory(CxlMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  CxlMemory& operator=(CxlMemory&&) = delete;
  ~CxlMemory();

  absl::Span<std::byte> bytes() const { return {data_, size_}; }

 private:
  CxlMemory(std::byte* data, size_t size) : data_(data), size_(size) {}

  absl::Status BindTo(int node) const;
  absl::Status Populate() const;

  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_TIER_CXL_CXL_MEMORY_H_
