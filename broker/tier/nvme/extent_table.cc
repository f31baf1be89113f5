#include "broker/tier/nvme/extent_table.h"

#include <cstdio>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"

namespace palimpsest {
namespace {

// What a record costs in a snapshot beside its bytes: its share of headers and padding.
constexpr Bytes kRecordOverhead(8);

bool IsLegal(ExtentState from, ExtentState to) {
  using S = ExtentState;
  switch (from) {
    case S::kWriting:
      return to == S::kQueued || to == S::kTransient;
    case S::kQueued:
      return to == S::kLogging || to == S::kRemoving || to == S::kTransient;
    case S::kLogging:
      return to == S::kDurable || to == S::kRemoving || to == S::kQueued;
    case S::kDurable:
      return to == S::kRemoving;
    case S::kRemoving:
    case S::kTransient:
      return false;
  }
  return false;
}

bool MayEnd(ExtentState state) {
  return state == ExtentState::kWriting || state == ExtentState::kRemoving ||
         state == ExtentState::kTransient;
}

[[noreturn]] void Die(const char* what, uint64_t place, ExtentState state) {
  std::fprintf(stderr, "%s of the extent at %llu in state %d\n", what,
               static_cast<unsigned long long>(place), static_cast<int>(state));
  std::abort();
}

Bytes MetadataOf(const std::string& encoded) {
  return Bytes(static_cast<int64_t>(encoded.size())) + kRecordOverhead;
}

}  // namespace

ExtentTable::ExtentTable(uint64_t data_units, Bytes metadata_limit)
    : data_units_(data_units), metadata_limit_(metadata_limit), allocator_(data_units) {}

uint32_t ExtentTable::TenantNumber(const std::string& tenant) {
  return tenants_.emplace(tenant, static_cast<uint32_t>(tenants_.size())).first->second;
}

void ExtentTable::Insert(const BlockRecord& record, Extent extent, ExtentState state,
                         std::string encoded) {
  metadata_ += MetadataOf(encoded);
  used_units_ += extent.count;
  entries_.emplace(extent.first, Entry{std::move(encoded), record.id.key, extent.count,
                                       TenantNumber(record.id.tenant), state, false});
}

bool ExtentTable::Restore(const BlockRecord& record, uint64_t place) {
  std::string encoded = EncodePut(record, place);
  if (metadata_ + MetadataOf(encoded) > metadata_limit_) return false;
  const Extent extent{place, static_cast<uint64_t>(CeilDiv(record.length, kIoUnit))};
  if (!allocator_.Claim(extent)) return false;
  Insert(record, extent, ExtentState::kDurable, std::move(encoded));
  return true;
}

absl::StatusOr<uint64_t> ExtentTable::Begin(const BlockRecord& record) {
  std::string encoded = EncodePut(record, 0);
  if (metadata_ + MetadataOf(encoded) > metadata_limit_) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "the records of ", entries_.size(), " blocks fill the metadata of the NVMe tier (",
        metadata_limit_.ToString(), "): remove blocks, or use larger ones"));
  }
  const uint64_t units = CeilDiv(record.length, kIoUnit);
  const std::optional<Extent> extent = allocator_.Allocate(units);
  if (!extent) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "no room for ", (kIoUnit * units).ToString(), " in one piece on the NVMe tier: ",
        (kIoUnit * allocator_.free_units()).ToString(), " are free, ",
        (kIoUnit * allocator_.largest_free()).ToString(), " of them together: remove blocks"));
  }
  Insert(record, *extent, ExtentState::kWriting, EncodePut(record, extent->first));
  return extent->first;
}

std::optional<ExtentState> ExtentTable::StateOf(uint64_t place) const {
  const auto it = entries_.find(place);
  if (it == entries_.end()) return std::nullopt;
  return it->second.state;
}

void ExtentTable::Move(uint64_t place, ExtentState to) {
  Entry& entry = entries_.at(place);
  if (!IsLegal(entry.state, to)) Die("illegal transition", place, entry.state);
  entry.state = to;
}

void ExtentTable::End(uint64_t place, bool quarantine) {
  const auto it = entries_.find(place);
  if (it == entries_.end()) Die("end of no block", place, ExtentState::kWriting);
  const Entry& entry = it->second;
  if (!MayEnd(entry.state)) Die("early end", place, entry.state);
  metadata_ -= MetadataOf(entry.encoded);
  used_units_ -= entry.units;
  if (quarantine) {
    quarantined_units_ += entry.units;
  } else {
    allocator_.Free({place, entry.units});
  }
  entries_.erase(it);
}

void ExtentTable::Purge(const std::string& tenant) {
  const auto number = tenants_.find(tenant);
  if (number == tenants_.end()) return;
  for (auto& [place, entry] : entries_) {
    if (entry.tenant == number->second) entry.purged = true;
  }
}

bool ExtentTable::AddToSnapshot(uint64_t* next, Bytes limit, FrameWriter& writer) const {
  auto it = entries_.lower_bound(*next);
  for (; it != entries_.end() && writer.size() < limit.count(); ++it) {
    const Entry& entry = it->second;
    if (entry.state == ExtentState::kDurable && !entry.purged) writer.Add(entry.encoded);
  }
  if (it == entries_.end()) return false;
  *next = it->first;
  return true;
}

ExtentUsage ExtentTable::usage() const {
  return {used_units_, quarantined_units_, allocator_.free_units(), entries_.size()};
}

absl::Status ExtentTable::CheckConsistency() const {
  uint64_t units = 0, end = 0;
  Bytes metadata;
  for (const auto& [place, entry] : entries_) {
    if (place < end) return absl::InternalError(absl::StrCat("extents overlap at ", place));
    end = place + entry.units;
    units += entry.units;
    metadata += MetadataOf(entry.encoded);
  }
  if (units != used_units_ || metadata != metadata_ || end > data_units_ ||
      units + quarantined_units_ + allocator_.free_units() != data_units_) {
    return absl::InternalError(absl::StrCat(units, " units are in use by entries, ", used_units_,
                                            " by the count, ", quarantined_units_, " quarantined, ",
                                            allocator_.free_units(), " free, of ", data_units_));
  }
  return absl::OkStatus();
}

}  // namespace palimpsest
