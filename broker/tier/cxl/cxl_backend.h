// Tier 2: blocks in memory behind CXL, which no worker maps. Nothing outlives the process.
//
// An emulated one takes, for each operation, the time that its stated latency and bandwidth ask
// for, operations at once sharing the bandwidth, and says so in its name. A medium for
// ThreadedBackend.
#ifndef PALIMPSEST_BROKER_TIER_CXL_CXL_BACKEND_H_
#define PALIMPSEST_BROKER_TIER_CXL_CXL_BACKEND_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "broker/tier/cxl/cxl_memory.h"
#include "broker/tier/extent_allocator.h"
#include "broker/tier/threaded_backend.h"
#include "common/clock.h"
#include "common/mutex.h"

namespace palimpsest {

class CxlBackend : public BlockingBackend {
 public:
  // Waits that long; an emulated tier's alone.
  using Sleep = std::function<void(absl::Duration)>;

  // `clock` outlives it.
  CxlBackend(const CxlOptions& options, const Clock& clock, Sleep sleep = nullptr);

  // "cxl" or "cxl (emulated)".
  std::string name() const override;
  Bytes Footprint(Bytes length) const override { return RoundUp(length, kUnit); }
  // Errors are those of CxlMemory::Map.
  absl::StatusOr<std::vector<StoredBlock>> Open() override;
  absl::StatusOr<TierPlace> Write(const BlockRecord& record,
                                  absl::Span<const std::byte> from) override;
  absl::Status Read(const BlockRecord& record, TierPlace place, absl::Span<std::byte> to) override;
  absl::Status Remove(const BlockRecord& record, TierPlace place,
                      TierBackend::RemoveReason reason) override;
  absl::Status Purge(const std::string& tenant) override;

 private:
  static constexpr Bytes kUnit = KiB(4);

  absl::Span<std::byte> At(TierPlace place, size_t size) const;
  // When an emulated operation that begins now ends.
  absl::Time EndOf(size_t size);
  void WaitFor(absl::Time end) const;

  const CxlOptions options_;
  const Clock& clock_;
  const Sleep sleep_;
  std::optional<CxlMemory> memory_;  // set by Open

  Mutex mu_;
  std::optional<ExtentAllocator> room_ ABSL_GUARDED_BY(mu_);
  absl::Time link_free_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_TIER_CXL_CXL_BACKEND_H_
