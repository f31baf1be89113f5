// Microbenchmarks of GPU memory, each beside what the machine can do at most, measured in the same
// run: mapping and granting slabs beside pages of 2 MiB one at a time, scrubbing beside writing
// HBM, restoring beside the link.
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "broker/device/cuda_slab_device.h"
#include "common/cuda/context.h"
#include "common/cuda/virtual_memory.h"
#include "tools/gpu_check/check_report.h"
#include "tools/gpu_check/first_gpu.h"
#include "tools/gpu_check/gpu_worker.h"
#include "tools/gpu_check/grant_rate.h"
#include "tools/gpu_check/restore_check.h"
#include "tools/gpu_check/timing.h"

namespace palimpsest {
namespace {

using Limit = CheckReport::Limit;

constexpr Bytes kSlab = MiB(32);
constexpr Bytes kPage = MiB(2);
constexpr Bytes kMapped = GiB(1);
constexpr Bytes kScrubbed = GiB(8);
constexpr int kRounds = 7;

class Microbench {
 public:
  Microbench(const CudaDriver& driver, CudaContextPtr context, CheckReport& report)
      : driver_(driver), context_(std::move(context)), report_(report) {}

  void MapRates() {
    const Rates slabs = MapRate(kSlab, /*at_once=*/true);
    const Rates pages = MapRate(kPage, /*at_once=*/false);
    if (slabs.mapped == 0 || pages.mapped == 0) return;
    report_.Inform("map.slabs", slabs.mapped, "GB/s", "32 slabs of 32 MiB that exist");
    report_.Inform("map.pages", pages.mapped, "GB/s", "512 pages of 2 MiB, one at a time");
    report_.Measure("map.slabs.ratio", slabs.mapped / pages.mapped, "", Limit::kAtLeast, 1,
                    "to pages of 2 MiB, one at a time");
    report_.Inform("map.new_slabs", slabs.created, "GB/s", "created first");
    report_.Inform("map.new_pages", pages.created, "GB/s", "created first");
    report_.Measure("map.new_slabs.ratio", slabs.created / pages.created, "", Limit::kAtLeast, 1,
                    "to pages of 2 MiB, one at a time");
  }

  void ScrubRate() {
    const double written = Written();
    auto device = CudaSlabDevice::Open({.driver = &driver_,
                                        .slabs = static_cast<uint32_t>(kScrubbed / kSlab),
                                        .slab_bytes = kSlab});
    if (written == 0 || !report_.Expect("scrub.open", device.status())) return;
    std::vector<SlabId> all;
    for (uint32_t i = 0; i < static_cast<uint32_t>(kScrubbed / kSlab); ++i) {
      if (!report_.Expect("scrub.create", (*device)->Create(SlabId(i)))) return;
      all.push_back(SlabId(i));
    }
    const absl::Duration time =
        MedianOf([&] { report_.Expect("scrub.scrub", (*device)->Scrub(all)); });
    report_.Ratio("scrub.rate", GigabytesPerSecond(kScrubbed, time), "GB/s", written, 0.95,
                  "8 GiB in slabs of 32 MiB");
  }

 private:
  struct Rates {
    double mapped = 0;   // GB/s; 0: failed
    double created = 0;  // with creating the memory
  };

  static absl::Duration MedianOf(const std::function<void()>& work) {
    std::vector<absl::Duration> times;
    for (int round = 0; round < kRounds; ++round) times.push_back(Timed(work));
    return Median(std::move(times));
  }

  // In pieces of `size`; usable after each one, or when all are mapped.
  Rates MapRate(Bytes size, bool at_once) {
    const int64_t pieces = kMapped / size;
    auto range = CudaAddressRange::Reserve(driver_, 0, kMapped);
    if (!report_.Expect("map.reserve", range.status())) return {};
    std::vector<CudaAllocation> memory;
    absl::Status status;
    const auto map = [&](int64_t i) {
      status.Update(range->Map(size * i, size, memory[static_cast<size_t>(i)]));
      if (!at_once) status.Update(range->Open(size * i, size));
    };
    const auto open = [&] {
      if (at_once) status.Update(range->Open(Bytes(0), kMapped));
    };
    std::vector<absl::Duration> created, mapped;
    for (int round = 0; status.ok() && round < kRounds; ++round) {
      memory.clear();
      created.push_back(Timed([&] {
        for (int64_t i = 0; status.ok() && i < pieces; ++i) {
          auto piece = CudaAllocation::Create(driver_, 0, size);
          status.Update(piece.status());
          if (!status.ok()) return;
          memory.push_back(*std::move(piece));
          map(i);
        }
        open();
      }));
      if (!status.ok()) break;
      status.Update(range->Unmap(Bytes(0), kMapped));
      mapped.push_back(Timed([&] {
        for (int64_t i = 0; i < pieces; ++i) map(i);
        open();
      }));
      status.Update(range->Unmap(Bytes(0), kMapped));
    }
    if (!report_.Expect("map", status)) return {};
    return {GigabytesPerSecond(kMapped, Median(std::move(mapped))),
            GigabytesPerSecond(kMapped, Median(std::move(created)))};
  }

  // GB/s of HBM that one memset over one allocation writes; 0 if that failed.
  double Written() {
    auto memory = CudaAllocation::Create(driver_, 0, kScrubbed);
    auto range = CudaAddressRange::Reserve(driver_, 0, kScrubbed);
    auto stream = CudaStream::Create(context_);
    for (const absl::Status& status : {memory.status(), range.status(), stream.status()}) {
      if (!report_.Expect("scrub.memory", status)) return 0;
    }
    absl::Status status = range->Map(Bytes(0), kScrubbed, *memory);
    if (status.ok()) status = range->Open(Bytes(0), kScrubbed);
    if (!report_.Expect("scrub.memory", status)) return 0;
    const auto bytes = static_cast<size_t>(kScrubbed.count());
    const absl::Duration set = MedianOf([&] {
      status.Update(driver_.Check(
          driver_.cuMemsetD32Async(range->base(), 0, bytes / 4, stream->get()), "memset"));
      status.Update(stream->Synchronize());
    });
    const absl::Duration copy = MedianOf([&] {
      status.Update(
          driver_.Check(driver_.cuMemcpyDtoDAsync(range->base() + bytes / 2, range->base(),
                                                  bytes / 2, stream->get()),
                        "copy"));
      status.Update(stream->Synchronize());
    });
    status.Update(range->Unmap(Bytes(0), kScrubbed));
    if (!report_.Expect("scrub.memory", status)) return 0;
    const double written = GigabytesPerSecond(kScrubbed, set);
    report_.Inform("scrub.memset", written, "GB/s", "one memset of 8 GiB in one allocation");
    report_.Inform("scrub.copy", GigabytesPerSecond(kScrubbed, copy), "GB/s",
                   "4 GiB read and 4 GiB written by one copy");
    return written;
  }

  const CudaDriver& driver_;
  const CudaContextPtr context_;
  CheckReport& report_;
};

int Run() {
  CheckReport report;
  {
    const std::optional<FirstGpu> gpu = OpenFirstGpu(report);
    if (!gpu.has_value()) return report.exit_status();
    Microbench bench(*gpu->driver, gpu->context, report);
    bench.MapRates();
    bench.ScrubRate();
    CheckRestore(*gpu->driver, {0}, "restore.", report);
  }
  CheckGrantRate(report);
  return report.exit_status();
}

}  // namespace
}  // namespace palimpsest

int main(int argc, char** argv) {
  if (argc == 2 && std::string(argv[1]) == "--worker") palimpsest::RunGpuWorker();
  return palimpsest::Run();
}
