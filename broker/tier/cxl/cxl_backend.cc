#include "broker/tier/cxl/cxl_backend.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace palimpsest {

CxlBackend::CxlBackend(const CxlOptions& options, const Clock& clock, Sleep sleep)
    : options_(options),
      clock_(clock),
      sleep_(sleep != nullptr ? std::move(sleep)
                              : [](absl::Duration duration) { absl::SleepFor(duration); }) {}

std::string CxlBackend::name() const {
  return options_.emulated.has_value() ? "cxl (emulated)" : "cxl";
}

absl::StatusOr<std::vector<StoredBlock>> CxlBackend::Open() {
  absl::StatusOr<CxlMemory> memory = CxlMemory::Map(options_);
  if (!memory.ok()) return memory.status();
  memory_.emplace(*std::move(memory));
  MutexLock lock(&mu_);
  room_.emplace(options_.size / kUnit);
  return std::vector<StoredBlock>();
}

absl::Span<std::byte> CxlBackend::At(TierPlace place, size_t size) const {
  return memory_->bytes().subspan(place.value() * kUnit.count(), size);
}

absl::Time CxlBackend::EndOf(size_t size) {
  if (!options_.emulated.has_value()) return absl::InfinitePast();
  const absl::Duration transfer =
      absl::Seconds(static_cast<double>(size) / options_.emulated->bytes_per_second);
  const absl::Time now = clock_.Now();
  MutexLock lock(&mu_);
  link_free_ = std::max(link_free_, now) + transfer;
  return link_free_ + options_.emulated->latency;
}

void CxlBackend::WaitFor(absl::Time end) const {
  const absl::Duration left = end - clock_.Now();
  if (left > absl::ZeroDuration()) sleep_(left);
}

absl::StatusOr<TierPlace> CxlBackend::Write(const BlockRecord& record,
                                            absl::Span<const std::byte> from) {
  std::optional<Extent> extent;
  {
    MutexLock lock(&mu_);
    extent = room_->Allocate(Footprint(record.length) / kUnit);
  }
  if (!extent.has_value()) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no extent of ", record.length.ToString(), " is free in ", name()));
  }
  const absl::Time end = EndOf(from.size());
  const TierPlace place(extent->first);
  std::memcpy(At(place, from.size()).data(), from.data(), from.size());
  WaitFor(end);
  return place;
}

absl::Status CxlBackend::Read(const BlockRecord&, TierPlace place, absl::Span<std::byte> to) {
  const absl::Time end = EndOf(to.size());
  std::memcpy(to.data(), At(place, to.size()).data(), to.size());
  WaitFor(end);
  return absl::OkStatus();
}

absl::Status CxlBackend::Remove(const BlockRecord& record, TierPlace place,
                                TierBackend::RemoveReason reason) {
  // Memory that returned other bytes than were written keeps them for itself.
  if (reason == TierBackend::RemoveReason::kCorrupt) return absl::OkStatus();
  MutexLock lock(&mu_);
  room_->Free({place.value(), static_cast<uint64_t>(Footprint(record.length) / kUnit)});
  return absl::OkStatus();
}

absl::Status CxlBackend::Purge(const std::string&) { return absl::OkStatus(); }

}  // namespace palimpsest
