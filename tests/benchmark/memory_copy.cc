#include "tests/benchmark/memory_copy.h"

#include <cstring>
#include <ctime>
#include <thread>
#include <vector>

#include "common/monotonic_time.h"

namespace palimpsest {
namespace {

constexpr Bytes kSlab = MiB(2);

absl::Duration ThreadCpu() {
  timespec time = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return absl::DurationFromTimespec(time);
}

}  // namespace

absl::StatusOr<std::unique_ptr<MemoryCopy>> MemoryCopy::Create(int slabs) {
  std::unique_ptr<MemoryCopy> copy(new MemoryCopy());
  auto device = HostSlabDevice::Open({.slabs = static_cast<uint32_t>(2 * slabs)});
  if (!device.ok()) return device.status();
  copy->device_ = *std::move(device);
  uint32_t slab = 0;
  for (AddressRange* range : {&copy->from_, &copy->to_}) {
    absl::StatusOr<AddressRange> reserved = AddressRange::Reserve(kSlab * slabs, kSlab);
    if (!reserved.ok()) return reserved.status();
    *range = *std::move(reserved);
    for (int i = 0; i < slabs; ++i, ++slab) {
      absl::Status status = copy->device_->Create(SlabId(slab));
      if (status.ok()) {
        status =
            range->Map(kSlab * i, kSlab, copy->device_->Descriptors(SlabId(slab))->front().get(),
                       MapAccess::kReadWrite, MapPopulate::kYes);
      }
      if (!status.ok()) return status;
    }
    std::memset(range->base(), static_cast<int>(slab), static_cast<size_t>(range->size().count()));
  }
  return copy;
}

MemoryCopy::Time MemoryCopy::Run(int threads) {
  const auto slabs = static_cast<int64_t>(to_.size() / kSlab);
  std::vector<absl::Duration> cpu(static_cast<size_t>(threads));
  std::vector<std::thread> running;
  const absl::Time start = MonotonicNow();
  for (int t = 0; t < threads; ++t) {
    running.emplace_back([this, t, threads, slabs, &cpu] {
      for (int64_t i = slabs * t / threads; i < slabs * (t + 1) / threads; ++i) {
        const int64_t at = (kSlab * i).count();
        std::memcpy(to_.base() + at, from_.base() + at, static_cast<size_t>(kSlab.count()));
      }
      cpu[static_cast<size_t>(t)] = ThreadCpu();
    });
  }
  for (std::thread& thread : running) thread.join();
  Time time{MonotonicNow() - start, absl::ZeroDuration()};
  for (const absl::Duration of_thread : cpu) time.cpu += of_thread;
  return time;
}

}  // namespace palimpsest
