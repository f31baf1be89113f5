#include "broker/tier/nvme/nvme_format.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "xxhash.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

namespace palimpsest {
namespace {

constexpr uint64_t kSuperblockMagic = 0x31'45'4d'56'4e'4c'41'50;  // "PALNVME1"
constexpr uint64_t kAreaMagic = 0x31'41'45'52'41'4c'41'50;        // "PALAREA1"
constexpr uint32_t kFrameMagic = 0x4d'52'46'50;                   // "PFRM"
constexpr size_t kUnit = static_cast<size_t>(kIoUnit.count());

struct SuperblockFields {
  uint64_t magic, volume;
  int64_t device, area;
};

struct AreaFields {
  uint64_t magic, generation, nonce, snapshot_units;
};

struct FrameFields {
  uint64_t checksum;  // of all bytes behind it, to the end of the last unit
  uint32_t magic, units;
  uint64_t position, batch;
  int64_t written;
  uint64_t record_bytes;
};
static_assert(sizeof(FrameFields) == 48);

template <typename T>
void Append(std::string& out, const T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

template <typename T>
bool Take(absl::string_view& in, T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  if (in.size() < sizeof value) return false;
  std::memcpy(&value, in.data(), sizeof value);
  in.remove_prefix(sizeof value);
  return true;
}

uint64_t Hash(absl::string_view bytes, uint64_t seed) {
  return XXH3_64bits_withSeed(bytes.data(), bytes.size(), seed);
}

// A unit that holds `fields`, and their checksum behind them.
template <typename T>
std::string SealedUnit(const T& fields, uint64_t seed) {
  std::string unit;
  unit.reserve(kUnit);
  Append(unit, fields);
  Append(unit, Hash(unit, seed));
  unit.resize(kUnit);
  return unit;
}

template <typename T>
std::optional<T> OpenUnit(absl::string_view unit, uint64_t seed) {
  if (unit.size() < kUnit) return std::nullopt;
  T fields;
  uint64_t checksum = 0;
  absl::string_view rest = unit;
  Take(rest, fields);
  Take(rest, checksum);
  if (Hash(unit.substr(0, sizeof fields), seed) != checksum) return std::nullopt;
  return fields;
}

int64_t ToMicros(absl::Time time) { return absl::ToUnixMicros(time); }

absl::Time FromMicros(int64_t micros) {
  if (micros == ToMicros(absl::InfiniteFuture())) return absl::InfiniteFuture();
  return absl::FromUnixMicros(micros);
}

void AppendTenant(std::string& out, absl::string_view tenant) {
  assert(tenant.size() <= kMaxTenantName);
  Append(out, static_cast<uint8_t>(tenant.size()));
  out.append(tenant.data(), tenant.size());
}

bool TakeTenant(absl::string_view& in, std::string& tenant) {
  uint8_t size = 0;
  if (!Take(in, size) || size == 0 || size > kMaxTenantName || in.size() < size) return false;
  tenant.assign(in.data(), size);
  in.remove_prefix(size);
  return true;
}

bool TakePut(absl::string_view& in, Change& change) {
  BlockRecord& record = change.record;
  int64_t length = 0, expiry = 0;
  uint16_t tokens = 0;
  if (!Take(in, change.place) || !Take(in, record.id.key) || !Take(in, record.id.parent) ||
      !Take(in, length) || !Take(in, record.checksum) || !Take(in, expiry) ||
      !TakeTenant(in, record.id.tenant) || !Take(in, tokens) || length <= 0 ||
      tokens > kMaxBlockTokens || in.size() < tokens * sizeof(TokenId)) {
    return false;
  }
  record.length = Bytes(length);
  record.expiry = FromMicros(expiry);
  record.id.tokens.resize(tokens);
  if (tokens > 0) std::memcpy(record.id.tokens.data(), in.data(), tokens * sizeof(TokenId));
  in.remove_prefix(tokens * sizeof(TokenId));
  return true;
}

}  // namespace

Bytes DefaultArea(Bytes device) {
  return std::clamp(Bytes(device.count() / 256 / kIoUnit.count() * kIoUnit.count()), kMinArea,
                    kMaxArea);
}

absl::Status ValidateLayout(const NvmeLayout& layout) {
  const auto whole = [](Bytes size) { return size.count() % kIoUnit.count() == 0; };
  if (!whole(layout.device) || !whole(layout.area) || layout.area < kMinArea ||
      layout.area > kMaxArea || layout.device < layout.data_offset() + kIoUnit) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a device of ", layout.device.ToString(), " with two metadata areas of ",
        layout.area.ToString(), " has no room for data; it needs a multiple of ",
        kIoUnit.ToString(), ", at least ", (layout.data_offset() + kIoUnit).ToString()));
  }
  return absl::OkStatus();
}

std::string EncodeSuperblock(const NvmeLayout& layout) {
  return SealedUnit(
      SuperblockFields{kSuperblockMagic, layout.volume, layout.device.count(), layout.area.count()},
      0);
}

std::optional<NvmeLayout> DecodeSuperblock(absl::string_view unit) {
  const auto fields = OpenUnit<SuperblockFields>(unit, 0);
  if (!fields || fields->magic != kSuperblockMagic) return std::nullopt;
  const NvmeLayout layout{fields->volume, Bytes(fields->device), Bytes(fields->area)};
  if (!ValidateLayout(layout).ok()) return std::nullopt;
  return layout;
}

std::string EncodeAreaHeader(uint64_t volume, const AreaHeader& header) {
  return SealedUnit(AreaFields{kAreaMagic, header.generation, header.nonce, header.snapshot_units},
                    volume);
}

std::optional<AreaHeader> DecodeAreaHeader(uint64_t volume, absl::string_view unit) {
  const auto fields = OpenUnit<AreaFields>(unit, volume);
  if (!fields || fields->magic != kAreaMagic) return std::nullopt;
  return AreaHeader{fields->generation, fields->nonce, fields->snapshot_units};
}

std::string EncodePut(const BlockRecord& record, uint64_t place) {
  assert(record.id.tokens.size() <= kMaxBlockTokens);
  std::string out;
  Append(out, Change::Kind::kPut);
  Append(out, place);
  Append(out, record.id.key);
  Append(out, record.id.parent);
  Append(out, record.length.count());
  Append(out, record.checksum);
  Append(out, ToMicros(record.expiry));
  AppendTenant(out, record.id.tenant);
  Append(out, static_cast<uint16_t>(record.id.tokens.size()));
  out.append(reinterpret_cast<const char*>(record.id.tokens.data()),
             record.id.tokens.size() * sizeof(TokenId));
  return out;
}

std::string EncodeRemove(const BlockKey& key, uint64_t place) {
  std::string out;
  Append(out, Change::Kind::kRemove);
  Append(out, place);
  Append(out, key);
  return out;
}

std::string EncodePurge(absl::string_view tenant) {
  std::string out;
  Append(out, Change::Kind::kPurge);
  AppendTenant(out, tenant);
  return out;
}

std::optional<Change> DecodeChange(absl::string_view& records) {
  Change change;
  if (!Take(records, change.kind)) return std::nullopt;
  bool good = false;
  switch (change.kind) {
    case Change::Kind::kPut:
      good = TakePut(records, change);
      break;
    case Change::Kind::kRemove:
      good = Take(records, change.place) && Take(records, change.record.id.key);
      break;
    case Change::Kind::kPurge:
      good = TakeTenant(records, change.tenant);
      break;
  }
  if (!good) return std::nullopt;
  return change;
}

FrameWriter::FrameWriter(uint64_t nonce, uint64_t position, absl::Time now)
    : nonce_(nonce), position_(position), now_(ToMicros(now)) {}

void FrameWriter::BeginFrame() {
  header_at_ = frames_.size();
  frames_.append(sizeof(FrameFields), '\0');
  open_ = true;
}

void FrameWriter::EndFrame() {
  const uint64_t record_bytes = frames_.size() - header_at_ - sizeof(FrameFields);
  frames_.resize((frames_.size() + kUnit - 1) / kUnit * kUnit);
  FrameFields fields{0,
                     kFrameMagic,
                     static_cast<uint32_t>((frames_.size() - header_at_) / kUnit),
                     position_ + header_at_ / kUnit,
                     position_,
                     now_,
                     record_bytes};
  std::memcpy(&frames_[header_at_], &fields, sizeof fields);
  fields.checksum =
      Hash(absl::string_view(frames_).substr(header_at_ + sizeof fields.checksum), nonce_);
  std::memcpy(&frames_[header_at_], &fields, sizeof fields);
  open_ = false;
}

void FrameWriter::Add(absl::string_view record) {
  assert(sizeof(FrameFields) + record.size() <= static_cast<size_t>(kMaxFrame.count()));
  if (open_ && frames_.size() - header_at_ + record.size() > kMaxFrame.count()) EndFrame();
  if (!open_) BeginFrame();
  frames_.append(record.data(), record.size());
}

std::string FrameWriter::Finish() {
  if (open_) EndFrame();
  return std::move(frames_);
}

std::optional<Frame> DecodeFrame(absl::string_view area, uint64_t nonce, uint64_t position) {
  const uint64_t area_units = area.size() / kUnit;
  if (position >= area_units) return std::nullopt;
  const absl::string_view rest = area.substr(position * kUnit);
  FrameFields fields;
  absl::string_view in = rest;
  Take(in, fields);
  if (fields.magic != kFrameMagic || fields.position != position || fields.batch > position ||
      fields.units == 0 || fields.units > area_units - position ||
      fields.record_bytes > fields.units * kUnit - sizeof fields) {
    return std::nullopt;
  }
  const absl::string_view frame = rest.substr(0, fields.units * kUnit);
  if (Hash(frame.substr(sizeof fields.checksum), nonce) != fields.checksum) return std::nullopt;
  return Frame{fields.batch, fields.units, FromMicros(fields.written),
               frame.substr(sizeof fields, fields.record_bytes)};
}

}  // namespace palimpsest
