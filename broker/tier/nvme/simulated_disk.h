// A disk that does what disks may do: completes requests in any order, loses what was not flushed,
// whole or by sectors, and fails when it is told to. Deterministic.
#ifndef PALIMPSEST_BROKER_TIER_NVME_SIMULATED_DISK_H_
#define PALIMPSEST_BROKER_TIER_NVME_SIMULATED_DISK_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "broker/tier/nvme/block_device.h"

namespace palimpsest {

// What is left of a disk when nobody uses it. Outlives the SimulatedDisks that do, one at a time.
struct DiskMedium {
  explicit DiskMedium(Bytes size) : bytes(static_cast<size_t>(size.count())) {}

  std::vector<std::byte> bytes;
};

// Not thread-safe: one thread submits, and completes by RunOne.
class SimulatedDisk : public BlockDevice {
 public:
  // The error of a request, if it fails. A write that fails has changed any of its sectors.
  using Fault = std::function<absl::Status(const IoRequest&)>;

  SimulatedDisk(DiskMedium& medium, uint64_t seed) : medium_(medium), random_(seed) {
    cached_ = medium.bytes;
  }
  // What completed reaches the medium if power was not cut.
  ~SimulatedDisk() override;

  Bytes size() const override { return Bytes(static_cast<int64_t>(medium_.bytes.size())); }
  // Aborts if the request overlaps one in flight and one of them is a write.
  void Submit(IoRequest request) override;

  // From now on Submit completes before it returns, unless a flush or write is held back.
  void set_immediate(bool immediate) { immediate_ = immediate; }
  void set_fault(Fault fault) { fault_ = std::move(fault); }

  size_t in_flight() const { return in_flight_.size(); }
  // Completes one request in flight, any; false if there is none.
  bool RunOne();
  void RunAll() {
    while (RunOne()) {
    }
  }

  // Requests that have completed.
  uint64_t completed() const { return completed_; }
  // Power goes when that many have completed: the next request to complete does not.
  void CutPowerAfter(uint64_t completed) { cut_after_ = completed; }
  // Any part of what was not flushed is lost, sector by sector; whatever still is in flight and
  // all that is submitted from now on fails.
  void CutPower();
  bool off() const { return off_; }

 private:
  struct Unflushed {
    Bytes offset;
    std::vector<std::byte> bytes;
    uint64_t completed = 0;  // its number among the completed requests
  };
  struct Pending {
    IoRequest request;
    uint64_t submitted = 0;  // how many requests had completed before
  };

  void CheckOverlap(const IoRequest& request) const;
  void Complete(Pending pending);
  absl::Status Execute(const Pending& pending);
  void PersistSomeSectors(const Unflushed& write);

  DiskMedium& medium_;
  std::mt19937_64 random_;
  std::vector<std::byte> cached_;  // what reads see
  std::vector<Unflushed> unflushed_;
  std::vector<Pending> in_flight_;
  Fault fault_;
  std::optional<uint64_t> cut_after_;
  uint64_t completed_ = 0;
  bool immediate_ = false;
  bool off_ = false;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_TIER_NVME_SIMULATED_DISK_H_
