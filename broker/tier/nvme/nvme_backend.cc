#include "broker/tier/nvme/nvme_backend.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "broker/tier/nvme/area_replay.h"
#include "common/log.h"
#include "common/random.h"

namespace palimpsest {
namespace {

constexpr Bytes kReadChunk = MiB(4);

absl::string_view Text(absl::Span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

bool IsZero(absl::string_view bytes) {
  return bytes.find_first_not_of('\0') == absl::string_view::npos;
}

bool IsAligned(absl::Span<const std::byte> bytes) {
  return reinterpret_cast<uintptr_t>(bytes.data()) % kIoUnit.count() == 0 &&
         bytes.size() % kIoUnit.count() == 0;
}

absl::Status WriteUnit(BlockDevice& device, Bytes offset, absl::string_view unit) {
  const AlignedBuffer buffer(kIoUnit);
  std::memcpy(buffer.span().data(), unit.data(), unit.size());
  if (absl::Status status = WriteAndWait(device, offset, buffer.span()); !status.ok()) {
    return status;
  }
  return FlushAndWait(device);
}

// The second copy first: as long as the first one is zero, nothing else has been written.
absl::Status Format(BlockDevice& device, const NvmeLayout& layout) {
  const std::string superblock = EncodeSuperblock(layout);
  absl::Status status = WriteUnit(device, kIoUnit, superblock);
  if (status.ok()) status = WriteUnit(device, Bytes(0), superblock);
  return status;
}

absl::Status ReadAll(BlockDevice& device, Bytes offset, absl::Span<std::byte> to) {
  for (size_t at = 0; at < to.size(); at += kReadChunk.count()) {
    absl::Status status = ReadAndWait(device, offset + Bytes(static_cast<int64_t>(at)),
                                      to.subspan(at, kReadChunk.count()));
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace

NvmeBackend::NvmeBackend(DeviceOpener open_device, const Clock& clock, Options options)
    : clock_(clock), options_(options), open_device_(std::move(open_device)) {}

NvmeBackend::~NvmeBackend() { device_.reset(); }

Bytes NvmeBackend::CapacityOf(Bytes device) {
  const NvmeLayout layout{0, device, DefaultArea(device)};
  if (!ValidateLayout(layout).ok()) return Bytes(0);
  return kIoUnit * static_cast<int64_t>(layout.data_units());
}

absl::Status NvmeBackend::ReadLayout() {
  const AlignedBuffer buffer(kIoUnit * 2);
  if (absl::Status status = ReadAll(*device_, Bytes(0), buffer.span()); !status.ok()) {
    return status;
  }
  const absl::string_view first = Text(buffer.span().subspan(0, kIoUnit.count()));
  const absl::string_view second = Text(buffer.span().subspan(kIoUnit.count()));
  const std::optional<NvmeLayout> copies[] = {DecodeSuperblock(first), DecodeSuperblock(second)};
  std::optional<NvmeLayout> layout = copies[0] ? copies[0] : copies[1];
  if (!layout && !IsZero(first)) {
    return absl::FailedPreconditionError(
        "the device of the NVMe tier holds something else, or its first sectors are damaged; if it "
        "may be overwritten, remove the file, or zero the first 8 KiB of the device");
  }
  if (!layout) {
    const Bytes size = device_->size();
    layout = NvmeLayout{RandomSeed(), size, options_.area.value_or(DefaultArea(size))};
    if (absl::Status status = ValidateLayout(*layout); !status.ok()) return status;
  }
  if (!copies[0] || !copies[1]) {
    if (absl::Status status = Format(*device_, *layout); !status.ok()) return status;
  }
  if (layout->device != device_->size()) {
    return absl::FailedPreconditionError(
        absl::StrCat("the device of the NVMe tier was formatted with ", layout->device.ToString(),
                     " and now has ", device_->size().ToString(),
                     "; give it the old size, or remove the file to lose its blocks and start with "
                     "the new one"));
  }
  layout_ = *layout;
  return absl::OkStatus();
}

absl::StatusOr<NvmeBackend::Found> NvmeBackend::ReadAreas() {
  std::optional<AreaHeader> headers[2];
  bool blank = true;
  for (int i = 0; i < 2; ++i) {
    const AlignedBuffer unit(kIoUnit);
    absl::Status status = ReadAndWait(*device_, layout_.area_offset(i), unit.span());
    if (!status.ok()) return status;
    headers[i] = DecodeAreaHeader(layout_.volume, Text(unit.span()));
    blank &= IsZero(Text(unit.span()));
  }
  Found found;
  if (!headers[0] && !headers[1]) {
    if (!blank) Log(LogLevel::kError, "no metadata of the NVMe tier is valid: it starts empty");
    return found;
  }
  found.area =
      !headers[1] || (headers[0] && headers[0]->generation > headers[1]->generation) ? 0 : 1;
  const AreaHeader header = *headers[found.area];
  found.generation = header.generation;

  const AlignedBuffer area(layout_.area);
  absl::Status status = ReadAll(*device_, layout_.area_offset(found.area), area.span());
  if (!status.ok()) return status;
  absl::StatusOr<AreaContent> content = ReplayArea(layout_, header, Text(area.span()));
  if (!content.ok()) {
    Log(LogLevel::kError, "all blocks of the NVMe tier are forgotten",
        {{"reason", content.status()}});
    return found;
  }
  const absl::Duration back = std::max(absl::ZeroDuration(), content->last_written - clock_.Now());
  found.blocks = std::move(content->blocks);
  for (StoredBlock& block : found.blocks) block.record.expiry -= back;
  Log(LogLevel::kInfo, "blocks found in the NVMe tier",
      {{"blocks", found.blocks.size()},
       {"generation", found.generation},
       {"log_frames", content->log_frames},
       {"clock_went_back", back}});
  return found;
}

void NvmeBackend::Restore(Found& found) {
  table_.emplace(layout_.data_units(), MetadataLog::MetadataLimit(layout_));
  std::vector<StoredBlock> restored;
  for (StoredBlock& block : found.blocks) {
    if (table_->Restore(block.record, block.place.value())) restored.push_back(std::move(block));
  }
  found.blocks = std::move(restored);
  log_.emplace(layout_, found.generation + 1, 1 - found.area, *table_);
}

absl::StatusOr<std::vector<StoredBlock>> NvmeBackend::Open() {
  absl::StatusOr<std::unique_ptr<BlockDevice>> device = open_device_();
  if (!device.ok()) return device.status();
  device_ = *std::move(device);
  if (absl::Status status = ReadLayout(); !status.ok()) return status;
  absl::StatusOr<Found> found = ReadAreas();
  if (!found.ok()) return found.status();
  Effects effects;
  {
    MutexLock lock(&mutex_);
    Restore(*found);
    effects = Pump();
  }
  // Only behind a snapshot of its own is there room that no earlier log reaches into.
  Perform(std::move(effects));
  MutexLock lock(&mutex_);
  while (!log_->started() && log_->error().ok()) changed_.Wait(&mutex_);
  while (log_->io_in_flight()) changed_.Wait(&mutex_);
  if (!log_->error().ok()) return log_->error();
  return std::move(found->blocks);
}

void NvmeBackend::Close() {
  {
    MutexLock lock(&mutex_);
    while (operations_ > 0 || (log_ && !log_->settled())) changed_.Wait(&mutex_);
  }
  device_.reset();
}

NvmeBackend::Effects NvmeBackend::Pump() {
  Effects effects;
  effects.io = log_->Next(clock_.Now());
  effects.answers = log_->TakeAnswers();
  const bool failing = !log_->error().ok();
  if (failing && !error_reported_) effects.new_error = log_->error();
  effects.recovered = !failing && error_reported_;
  error_reported_ = failing;
  changed_.SignalAll();
  return effects;
}

void NvmeBackend::Perform(Effects effects) {
  if (!effects.new_error.ok()) {
    Log(LogLevel::kError, "the NVMe tier takes no blocks", {{"reason", effects.new_error}});
  }
  if (effects.recovered) Log(LogLevel::kInfo, "the NVMe tier takes blocks again");
  if (effects.io) {
    const auto ended = [this](const absl::Status& status) { LogIoEnded(status); };
    device_->Submit(effects.io->kind == IoRequest::Kind::kFlush
                        ? IoRequest::Flush(ended)
                        : IoRequest::Write(effects.io->offset, effects.io->data, ended));
  }
  for (auto& [done, status] : effects.answers) {
    done(std::move(status));
    OperationEnds();
  }
}

void NvmeBackend::LogIoEnded(const absl::Status& status) {
  Effects effects;
  {
    MutexLock lock(&mutex_);
    log_->Completed(status, clock_.Now());
    effects = Pump();
  }
  Perform(std::move(effects));
}

void NvmeBackend::OperationEnds() {
  MutexLock lock(&mutex_);
  --operations_;
  changed_.SignalAll();
}

void NvmeBackend::Write(const BlockRecord& record, absl::Span<const std::byte> from, Written done) {
  Effects effects;
  absl::StatusOr<uint64_t> place;
  {
    MutexLock lock(&mutex_);
    effects = Pump();
    place = log_->refuses_puts() ? log_->error() : table_->Begin(record);
    if (place.ok()) OperationBegins();
  }
  Perform(std::move(effects));
  if (!place.ok()) return done(place.status());
  AlignedBuffer bounce;
  if (!IsAligned(from)) {
    bounce = AlignedBuffer(Footprint(record.length));
    std::memcpy(bounce.span().data(), from.data(), from.size());
    from = bounce.span();
  }
  device_->Submit(IoRequest::Write(OffsetOf(*place), from,
                                   [this, place = *place, bounce = std::move(bounce),
                                    done = std::move(done)](absl::Status status) mutable {
                                     DataWritten(place, std::move(status), std::move(done));
                                   }));
}

void NvmeBackend::DataWritten(uint64_t place, absl::Status status, Written done) {
  Effects effects;
  {
    MutexLock lock(&mutex_);
    if (status.ok()) {
      status = log_->Put(place);
    } else {
      table_->End(place);
    }
    effects = Pump();
  }
  Perform(std::move(effects));
  if (status.ok()) {
    done(TierPlace(place));
  } else {
    done(std::move(status));
  }
  OperationEnds();
}

void NvmeBackend::Read(const BlockRecord& record, TierPlace place, absl::Span<std::byte> to,
                       Done done) {
  {
    MutexLock lock(&mutex_);
    OperationBegins();
  }
  AlignedBuffer bounce;
  if (!IsAligned(to)) bounce = AlignedBuffer(Footprint(record.length));
  const absl::Span<std::byte> target = bounce.span().empty() ? to : bounce.span();
  device_->Submit(IoRequest::Read(
      OffsetOf(place.value()), target,
      [this, to, bounce = std::move(bounce), done = std::move(done)](absl::Status status) mutable {
        if (status.ok() && !bounce.span().empty()) {
          std::memcpy(to.data(), bounce.span().data(), to.size());
        }
        done(std::move(status));
        OperationEnds();
      }));
}

void NvmeBackend::Remove(const BlockRecord& record, TierPlace place, RemoveReason reason,
                         Done done) {
  (void)record;
  Effects effects;
  {
    MutexLock lock(&mutex_);
    OperationBegins();
    if (table_->StateOf(place.value())) {
      log_->Remove(place.value(), reason == RemoveReason::kCorrupt, std::move(done));
      effects = Pump();
    } else {
      effects.answers.emplace_back(std::move(done),
                                   absl::NotFoundError("the NVMe tier has no block at this place"));
    }
  }
  Perform(std::move(effects));
}

void NvmeBackend::Purge(const std::string& tenant, Done done) {
  Effects effects;
  {
    MutexLock lock(&mutex_);
    OperationBegins();
    log_->Purge(tenant, std::move(done));
    effects = Pump();
  }
  Perform(std::move(effects));
}

ExtentUsage NvmeBackend::usage() const {
  MutexLock lock(&mutex_);
  return table_->usage();
}

absl::Status NvmeBackend::CheckConsistency() const {
  MutexLock lock(&mutex_);
  return table_->CheckConsistency();
}

}  // namespace palimpsest
