#include "broker/tier/nvme/simulated_disk.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace palimpsest {
namespace {

constexpr size_t kSector = 512;

}  // namespace

SimulatedDisk::~SimulatedDisk() {
  RunAll();
  if (!off_) medium_.bytes = cached_;
}

void SimulatedDisk::CheckOverlap(const IoRequest& request) const {
  const int64_t begin = request.offset.count(), end = begin + request.data.size();
  const bool aligned = reinterpret_cast<uintptr_t>(request.data.data()) % kIoUnit.count() == 0 &&
                       begin % kIoUnit.count() == 0 && end % kIoUnit.count() == 0;
  bool good = aligned && begin >= 0 && end <= size().count();
  for (const Pending& other : in_flight_) {
    const int64_t at = other.request.offset.count();
    const bool overlaps = begin < at + static_cast<int64_t>(other.request.data.size()) && at < end;
    const bool writes =
        request.kind == IoRequest::Kind::kWrite || other.request.kind == IoRequest::Kind::kWrite;
    good &= !(overlaps && writes);
  }
  if (good) return;
  std::fprintf(stderr,
               "a transfer of bytes %lld .. %lld is unaligned, outside or overlaps another\n",
               static_cast<long long>(begin), static_cast<long long>(end));
  std::abort();
}

void SimulatedDisk::Submit(IoRequest request) {
  CheckOverlap(request);
  Pending pending{std::move(request), completed_};
  if (immediate_) return Complete(std::move(pending));
  in_flight_.push_back(std::move(pending));
}

bool SimulatedDisk::RunOne() {
  if (in_flight_.empty()) return false;
  std::swap(in_flight_[random_() % in_flight_.size()], in_flight_.back());
  Pending pending = std::move(in_flight_.back());
  in_flight_.pop_back();
  Complete(std::move(pending));
  return true;
}

void SimulatedDisk::Complete(Pending pending) {
  if (cut_after_ && completed_ >= *cut_after_ && !off_) {
    in_flight_.push_back(std::move(pending));
    CutPower();
    pending = std::move(in_flight_.back());
    in_flight_.pop_back();
  }
  absl::Status status = Execute(pending);
  if (!off_) ++completed_;
  pending.request.done(std::move(status));
}

absl::Status SimulatedDisk::Execute(const Pending& pending) {
  const IoRequest& request = pending.request;
  if (off_) return absl::UnavailableError("the power is off");
  absl::Status status = fault_ ? fault_(request) : absl::OkStatus();
  const auto begin = cached_.begin() + request.offset.count();
  switch (request.kind) {
    case IoRequest::Kind::kRead:
      if (status.ok()) std::copy_n(begin, request.data.size(), request.data.begin());
      break;
    case IoRequest::Kind::kWrite: {
      // A failed write leaves some of its sectors.
      std::vector<std::byte> bytes(request.data.begin(), request.data.end());
      for (size_t at = 0; !status.ok() && at < bytes.size(); at += kSector) {
        if (random_() % 2 == 0) std::copy_n(begin + at, kSector, bytes.begin() + at);
      }
      std::copy(bytes.begin(), bytes.end(), begin);
      unflushed_.push_back({request.offset, std::move(bytes), completed_});
      break;
    }
    case IoRequest::Kind::kFlush:
      for (const Unflushed& write : unflushed_) {
        if (write.completed >= pending.submitted) continue;
        // What a failed flush could not write is gone, though reads still show it.
        if (!status.ok() && random_() % 2 == 0) continue;
        std::copy(write.bytes.begin(), write.bytes.end(),
                  medium_.bytes.begin() + write.offset.count());
      }
      std::erase_if(unflushed_,
                    [&](const Unflushed& write) { return write.completed < pending.submitted; });
      break;
  }
  return status;
}

void SimulatedDisk::PersistSomeSectors(const Unflushed& write) {
  // All, nothing, or any sectors of it.
  const uint64_t choice = random_() % 4;
  for (size_t at = 0; at < write.bytes.size(); at += kSector) {
    if (choice == 0 || (choice > 1 && random_() % 2 == 0)) continue;
    std::copy_n(write.bytes.begin() + at, kSector,
                medium_.bytes.begin() + write.offset.count() + at);
  }
}

void SimulatedDisk::CutPower() {
  off_ = true;
  for (const Pending& pending : in_flight_) {
    if (pending.request.kind != IoRequest::Kind::kWrite) continue;
    unflushed_.push_back({pending.request.offset,
                          {pending.request.data.begin(), pending.request.data.end()},
                          completed_});
  }
  // Sectors reach the medium in any order, those of the same place too.
  std::shuffle(unflushed_.begin(), unflushed_.end(), random_);
  for (const Unflushed& write : unflushed_) PersistSomeSectors(write);
  unflushed_.clear();
}

}  // namespace palimpsest
