#include "broker/tier/nvme/metadata_log.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/random.h"

namespace palimpsest {
namespace {

constexpr Bytes kSnapshotChunk = MiB(1);

// A batch always fits behind a fresh snapshot.
Bytes BatchLimit(Bytes area) { return std::min(KiB(256), area / 8); }

}  // namespace

MetadataLog::MetadataLog(const NvmeLayout& layout, uint64_t generation, int target,
                         ExtentTable& table)
    : layout_(layout), table_(table), generation_(generation), target_(target) {}

bool MetadataLog::IsFlush(Step step) {
  return step == Step::kFlushData || step == Step::kFlushBatch || step == Step::kFlushClear ||
         step == Step::kFlushSnapshot || step == Step::kFlushHeader;
}

void MetadataLog::Answer(Done& done, absl::Status status) {
  if (done) answers_.emplace_back(std::move(done), std::move(status));
  done = nullptr;
}

absl::Status MetadataLog::Put(uint64_t place) {
  if (table_.IsPurged(place)) {
    table_.Move(place, ExtentState::kTransient);
    return absl::OkStatus();
  }
  if (refuses_puts()) {
    table_.End(place);
    return error_;
  }
  table_.Move(place, ExtentState::kQueued);
  queue_.push_back({Change::Kind::kPut, "", place, false, flushes_begun_, nullptr});
  return absl::OkStatus();
}

void MetadataLog::Remove(uint64_t place, bool quarantine, Done done) {
  if (table_.StateOf(place) == ExtentState::kTransient) {
    table_.End(place, quarantine);
    return Answer(done, absl::OkStatus());
  }
  table_.Move(place, ExtentState::kRemoving);
  Entry entry{Change::Kind::kRemove, EncodeRemove(table_.KeyOf(place), place), place, quarantine, 0,
              std::move(done)};
  if (refuses_puts()) Answer(entry.done, error_);
  queue_.push_back(std::move(entry));
}

void MetadataLog::Purge(const std::string& tenant, Done done) {
  table_.Purge(tenant);
  Entry entry{Change::Kind::kPurge, EncodePurge(tenant), 0, false, 0, std::move(done)};
  if (refuses_puts()) Answer(entry.done, error_);
  queue_.push_back(std::move(entry));
}

void MetadataLog::SetBuffer(const std::string& bytes, Bytes offset) {
  if (buffer_.span().size() != bytes.size()) {
    buffer_ = AlignedBuffer(Bytes(static_cast<int64_t>(bytes.size())));
  }
  if (!bytes.empty()) std::memcpy(buffer_.span().data(), bytes.data(), bytes.size());
  buffer_offset_ = offset;
}

bool MetadataLog::IsPutIn(const Entry& entry, ExtentState state) const {
  return entry.kind == Change::Kind::kPut && table_.StateOf(entry.place) == state;
}

bool MetadataLog::IsCovered(const Entry& entry) const {
  return entry.kind != Change::Kind::kPut || entry.flushes_before < last_good_flush_;
}

bool MetadataLog::TakeBatch(absl::Time now) {
  FrameWriter writer(nonce_, position_, now);
  size_t taken = 0;
  while (taken < queue_.size() && IsCovered(queue_[taken]) &&
         writer.size() < BatchLimit(layout_.area).count()) {
    const Entry& entry = queue_[taken++];
    writer.Add(entry.kind == Change::Kind::kPut ? table_.EncodedOf(entry.place) : entry.record);
  }
  const std::string frames = writer.Finish();
  if (position_ + frames.size() / kIoUnit.count() > layout_.area_units()) return false;
  SetBuffer(frames, OffsetOf(active_, position_));
  const auto end = queue_.begin() + static_cast<std::ptrdiff_t>(taken);
  batch_.assign(std::make_move_iterator(queue_.begin()), std::make_move_iterator(end));
  queue_.erase(queue_.begin(), end);
  for (const Entry& entry : batch_) {
    if (IsPutIn(entry, ExtentState::kQueued)) table_.Move(entry.place, ExtentState::kLogging);
  }
  step_ = Step::kWriteBatch;
  return true;
}

void MetadataLog::CommitBatch() {
  position_ += buffer_.span().size() / kIoUnit.count();
  for (Entry& entry : batch_) {
    if (IsPutIn(entry, ExtentState::kLogging)) table_.Move(entry.place, ExtentState::kDurable);
    if (entry.kind == Change::Kind::kRemove) table_.End(entry.place, entry.quarantine);
    Answer(entry.done, absl::OkStatus());
  }
  batch_.clear();
}

void MetadataLog::BeginSnapshot() {
  target_header_ = AreaHeader{generation_++, RandomSeed(), 0};
  target_position_ = 1;
  snapshot_next_ = 0;
  snapshot_complete_ = false;
  SetBuffer(std::string(kIoUnit.count(), '\0'), OffsetOf(target_, 0));
  step_ = Step::kClearTarget;
}

void MetadataLog::FillSnapshotBuffer(absl::Time now) {
  FrameWriter writer(target_header_.nonce, target_position_, now);
  snapshot_complete_ = !table_.AddToSnapshot(&snapshot_next_, kSnapshotChunk, writer);
  const std::string frames = writer.Finish();
  SetBuffer(frames, OffsetOf(target_, target_position_));
  target_position_ += frames.size() / kIoUnit.count();
  assert(target_position_ < layout_.area_units());
  step_ = frames.empty() ? Step::kFlushSnapshot : Step::kWriteSnapshot;
}

void MetadataLog::FinishSnapshot() {
  active_ = target_;
  target_ = 1 - active_;
  nonce_ = target_header_.nonce;
  position_ = target_position_;
  needs_snapshot_ = false;
  error_ = absl::OkStatus();
  // Both headers are valid, and this one counts. Were it damaged some day, the other one must not
  // bring back what has been removed since.
  SetBuffer(std::string(kIoUnit.count(), '\0'), OffsetOf(target_, 0));
  step_ = Step::kClearOld;
}

void MetadataLog::Choose(absl::Time now) {
  if (!needs_snapshot_) {
    if (queue_.empty()) return;
    if (!IsCovered(queue_.front())) {
      step_ = Step::kFlushData;
      return;
    }
    if (TakeBatch(now)) return;
    needs_snapshot_ = true;
  }
  if (error_.ok() || now >= retry_at_) BeginSnapshot();
}

std::optional<MetadataLog::Io> MetadataLog::Next(absl::Time now) {
  if (in_flight_) return std::nullopt;
  if (step_ == Step::kIdle) Choose(now);
  if (step_ == Step::kIdle) return std::nullopt;
  in_flight_ = true;
  if (!IsFlush(step_)) return Io{IoRequest::Kind::kWrite, buffer_offset_, buffer_.span()};
  ++flushes_begun_;
  return Io{};
}

void MetadataLog::Completed(const absl::Status& status, absl::Time now) {
  assert(in_flight_);
  in_flight_ = false;
  if (!status.ok() && step_ != Step::kClearOld) return Fail(status, now);
  if (IsFlush(step_)) last_good_flush_ = flushes_begun_;
  switch (step_) {
    case Step::kIdle:
      break;
    case Step::kFlushData:
      step_ = Step::kIdle;
      break;
    case Step::kWriteBatch:
      step_ = Step::kFlushBatch;
      break;
    case Step::kFlushBatch:
      CommitBatch();
      step_ = Step::kIdle;
      break;
    case Step::kClearTarget:
      step_ = Step::kFlushClear;
      break;
    case Step::kFlushClear:
    case Step::kWriteSnapshot:
      if (!snapshot_complete_) {
        FillSnapshotBuffer(now);
      } else {
        step_ = Step::kFlushSnapshot;
      }
      break;
    case Step::kFlushSnapshot:
      target_header_.snapshot_units = target_position_ - 1;
      SetBuffer(EncodeAreaHeader(layout_.volume, target_header_), OffsetOf(target_, 0));
      step_ = Step::kWriteHeader;
      break;
    case Step::kWriteHeader:
      step_ = Step::kFlushHeader;
      break;
    case Step::kFlushHeader:
      FinishSnapshot();
      break;
    case Step::kClearOld:
      step_ = Step::kIdle;
      break;
  }
}

void MetadataLog::Fail(const absl::Status& status, absl::Time now) {
  const bool flush_failed = IsFlush(step_);
  error_ = absl::UnavailableError(
      absl::StrCat("the NVMe tier cannot write its metadata: ", status.message()));
  retry_at_ = now + kRetryAfter;
  needs_snapshot_ = true;
  step_ = Step::kIdle;
  std::deque<Entry> kept;
  for (Entry& entry : batch_) {
    Answer(entry.done, error_);
    if (IsPutIn(entry, ExtentState::kLogging)) table_.Move(entry.place, ExtentState::kQueued);
    kept.push_back(std::move(entry));
  }
  for (Entry& entry : queue_) {
    Answer(entry.done, error_);
    if (flush_failed && !IsCovered(entry)) {
      // The disk may have lost the bytes, whatever it says to the next flush.
      if (IsPutIn(entry, ExtentState::kQueued)) table_.Move(entry.place, ExtentState::kTransient);
    } else {
      kept.push_back(std::move(entry));
    }
  }
  batch_.clear();
  queue_ = std::move(kept);
}

}  // namespace palimpsest
