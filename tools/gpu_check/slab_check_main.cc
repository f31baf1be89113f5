// Checks of one process on a GPU: what slabs cost, that the pool's and the workers' classes do on
// the driver what their tests show on its double, and that checksums on the GPU are exact and
// cheap. Where there are two GPUs, a pool on both is checked too.
#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "broker/device/cuda_slab_device.h"
#include "common/cuda/context.h"
#include "common/cuda/virtual_memory.h"
#include "tools/gpu_check/check_report.h"
#include "tools/gpu_check/first_gpu.h"
#include "tools/gpu_check/restore_check.h"
#include "tools/gpu_check/timing.h"
#include "worker/compute/cuda/cuda_block_copier.h"

namespace palimpsest {
namespace {

using Limit = CheckReport::Limit;

constexpr Bytes kSlab = MiB(32);
constexpr uint32_t kSlabs = 32;  // 1 GiB
constexpr int kRounds = 7;

double Microseconds(absl::Duration duration) { return absl::ToDoubleMicroseconds(duration); }

class SlabCheck {
 public:
  SlabCheck(const CudaDriver& driver, CudaContextPtr context, CheckReport& report)
      : driver_(driver), context_(std::move(context)), report_(report) {}

  // The driver keeps some memory from the first use on.
  void WarmUp() {
    auto slab = CudaAllocation::Create(driver_, 0, kSlab);
    auto range = CudaAddressRange::Reserve(driver_, 0, kSlab);
    if (!report_.Expect("slabs.create", slab.status()) ||
        !report_.Expect("slabs.reserve", range.status())) {
      return;
    }
    (void)range->Map(Bytes(0), kSlab, *slab);
    (void)range->Open(Bytes(0), kSlab);
    Fill(range->base(), kSlab, 1);
    report_.Verify("slabs.fill", Holds(range->base(), kSlab, 1));
    (void)range->Unmap(Bytes(0), kSlab);
  }

  // Prices of single calls, and of 1 GiB at once.
  void Prices() {
    std::vector<CudaAllocation> slabs;
    std::vector<UniqueFd> descriptors;
    std::vector<absl::Duration> create, exported, imported;
    for (uint32_t i = 0; i < kSlabs; ++i) {
      create.push_back(Timed([&] {
        auto slab = CudaAllocation::Create(driver_, 0, kSlab);
        if (report_.Expect("slabs.create", slab.status())) slabs.push_back(*std::move(slab));
      }));
      if (slabs.size() != i + 1) return;
      exported.push_back(Timed([&] { descriptors.push_back(*slabs.back().Export()); }));
    }
    std::vector<CudaAllocation> imports;
    for (const UniqueFd& descriptor : descriptors) {
      imported.push_back(
          Timed([&] { imports.push_back(*CudaAllocation::Import(driver_, 0, descriptor)); }));
    }
    report_.Measure("slabs.create", Microseconds(Median(create)), "us", Limit::kAtMost, 300);
    report_.Inform("slabs.export", Microseconds(Median(exported)), "us");
    report_.Inform("slabs.import", Microseconds(Median(imported)), "us");
    auto range = CudaAddressRange::Reserve(driver_, 0, kSlab * (kSlabs + 2));
    if (!report_.Expect("slabs.reserve", range.status())) return;
    std::vector<absl::Duration> map, open, unmap;
    for (int round = 0; round < kRounds; ++round) {
      map.push_back(Timed([&] {
        for (uint32_t i = 0; i < kSlabs; ++i) (void)range->Map(kSlab * i, kSlab, imports[i]);
      }));
      open.push_back(
          Timed([&] { report_.Expect("slabs.open", range->Open(Bytes(0), kSlab * kSlabs)); }));
      unmap.push_back(
          Timed([&] { report_.Expect("slabs.unmap", range->Unmap(Bytes(0), kSlab * kSlabs)); }));
    }
    report_.Inform("slabs.map_1gib", Microseconds(Median(map)), "us", "32 slabs");
    report_.Inform("slabs.open_1gib", Microseconds(Median(open)), "us", "one call for 32 slabs");
    report_.Inform("slabs.unmap_1gib", Microseconds(Median(unmap)), "us", "one call");
    // One memory at two addresses.
    (void)range->Map(Bytes(0), kSlab, imports[0]);
    (void)range->Map(kSlab, kSlab, imports[0]);
    if (report_.Expect("slabs.alias", range->Open(Bytes(0), kSlab * 2))) {
      Fill(range->base(), kSlab, 0x5a5a5a5a);
      report_.Verify("slabs.alias", Holds(range->base() + static_cast<CUdeviceptr>(kSlab.count()),
                                          kSlab, 0x5a5a5a5a));
    }
    (void)range->Unmap(Bytes(0), kSlab * 2);
  }

  // Everything that was created is free again.
  void Accounting(const std::function<void()>& work) {
    const Bytes before = Free();
    work();
    const Bytes after = Free();
    report_.Verify("slabs.nothing_leaked", after >= before - MiB(4),
                   absl::StrCat("free before ", before.ToString(), ", after ", after.ToString()));
  }

  void Pool() {
    constexpr uint32_t kPool = 256;  // 8 GiB
    auto device = CudaSlabDevice::Open({.driver = &driver_, .slabs = kPool, .slab_bytes = kSlab});
    if (!report_.Expect("pool.open", device.status())) return;
    std::vector<SlabId> all;
    const absl::Duration created = Timed([&] {
      for (uint32_t i = 0; i < kPool; ++i) {
        report_.Expect("pool.create", (*device)->Create(SlabId(i)));
        all.push_back(SlabId(i));
      }
    });
    report_.Inform("pool.create_8gib", absl::ToDoubleMilliseconds(created), "ms",
                   "created, exported, mapped, zeroed");
    std::vector<absl::Duration> scrub, scrub_one_gib;
    const std::vector<SlabId> one_gib(all.begin(), all.begin() + kSlabs);
    for (int round = 0; round < kRounds; ++round) {
      scrub.push_back(Timed([&] { report_.Expect("pool.scrub", (*device)->Scrub(all)); }));
      scrub_one_gib.push_back(
          Timed([&] { report_.Expect("pool.scrub", (*device)->Scrub(one_gib)); }));
    }
    report_.Measure("pool.scrub_rate", GigabytesPerSecond(kSlab * kPool, Median(scrub)), "GB/s",
                    Limit::kAtLeast, 2400, "half of the HBM's 4.8 TB/s at least");
    report_.Inform("pool.scrub_1gib", Microseconds(Median(scrub_one_gib)), "us");
    // A worker's mapping sees the scrub; a retired slab is other memory.
    auto worker = CudaAddressRange::Reserve(driver_, 0, kSlab);
    auto import = CudaAllocation::Import(driver_, 0, (*device)->Descriptors(SlabId(3))->front());
    if (!report_.Expect("pool.import", import.status())) return;
    (void)worker->Map(Bytes(0), kSlab, *import);
    if (!report_.Expect("pool.import", worker->Open(Bytes(0), kSlab))) return;
    Fill(worker->base(), kSlab, 0x11111111);
    report_.Expect("pool.scrub", (*device)->Scrub({SlabId(3)}));
    report_.Verify("pool.scrub_reaches_mapping", Holds(worker->base(), kSlab, 0));
    Fill(worker->base(), kSlab, 0x22222222);
    const absl::Duration retire =
        Timed([&] { report_.Expect("pool.retire", (*device)->Retire(SlabId(3))); });
    report_.Inform("pool.retire", Microseconds(retire), "us");
    report_.Verify("pool.retired_memory_stays_with_the_liar",
                   Holds(worker->base(), kSlab, 0x22222222));
    (void)worker->Unmap(Bytes(0), kSlab);
  }

  // KV blocks are copied within a region whose memory is several slabs; some straddle two.
  void Move() {
    constexpr uint32_t kRegion = 4;
    const Bytes block = MiB(5);
    const auto blocks = static_cast<uint32_t>(kSlab * kRegion / block);
    std::vector<CudaAllocation> slabs;
    auto range = CudaAddressRange::Reserve(driver_, 0, kSlab * kRegion);
    if (!report_.Expect("blocks.reserve", range.status())) return;
    for (uint32_t i = 0; i < kRegion; ++i) {
      auto slab = CudaAllocation::Create(driver_, 0, kSlab);
      if (!report_.Expect("blocks.create", slab.status())) return;
      slabs.push_back(*std::move(slab));
      (void)range->Map(kSlab * i, kSlab, slabs.back());
    }
    if (!report_.Expect("blocks.open", range->Open(Bytes(0), kSlab * kRegion))) return;
    ModelMemory memory;
    memory.kv = reinterpret_cast<std::byte*>(range->base());
    memory.kv_block_bytes = block;
    auto copier = CudaBlockCopier::Create({{context_, memory}});
    if (!report_.Expect("blocks.copier", copier.status())) return;
    const auto at = [&](uint32_t b) { return range->base() + (block * b).count(); };
    std::vector<unsigned> expected(blocks);
    for (uint32_t b = 0; b < blocks; ++b) Fill(at(b), block, expected[b] = b + 1);
    std::vector<BlockMove> moves;
    for (uint32_t b = 0; b < blocks / 2; ++b) {
      moves.push_back({.from = BlockId(blocks - 1 - b), .to = BlockId(b)});
      expected[b] = expected[blocks - 1 - b];
    }
    const absl::Duration time = Timed([&] { (*copier)->Copy(moves); });
    bool right = true;
    for (uint32_t b = 0; b < blocks; ++b) right = right && Holds(at(b), block, expected[b]);
    report_.Verify("blocks.moved", right);
    report_.Inform("blocks.move",
                   GigabytesPerSecond(block * static_cast<int64_t>(moves.size()), time), "GB/s",
                   "read and written once each");
    (void)range->Unmap(Bytes(0), kSlab * kRegion);
  }

  // A pool on two GPUs: a slab is there on both, and both are scrubbed at once.
  void Stripes() {
    constexpr uint32_t kPool = 128;  // 4 GiB a GPU
    auto device = CudaSlabDevice::Open(
        {.driver = &driver_, .gpus = {0, 1}, .slabs = kPool, .slab_bytes = kSlab});
    if (!report_.Expect("stripes.open", device.status())) return;
    std::vector<SlabId> all;
    const absl::Duration created = Timed([&] {
      for (uint32_t i = 0; i < kPool; ++i) {
        report_.Expect("stripes.create", (*device)->Create(SlabId(i)));
        all.push_back(SlabId(i));
      }
    });
    report_.Inform("stripes.create_8gib", absl::ToDoubleMilliseconds(created), "ms",
                   "4 GiB a GPU: created, exported, mapped, zeroed");
    std::vector<absl::Duration> scrub;
    for (int round = 0; round < kRounds; ++round) {
      scrub.push_back(Timed([&] { report_.Expect("stripes.scrub", (*device)->Scrub(all)); }));
    }
    report_.Measure("stripes.scrub_rate", GigabytesPerSecond(kSlab * kPool * 2, Median(scrub)),
                    "GB/s", Limit::kAtLeast, 4000, "of both GPUs together");
  }

 private:
  // Whatever GPU was the last to be worked with.
  Bytes Free() {
    absl::Status status = context_->MakeCurrent();
    const absl::StatusOr<CudaContext::MemoryInfo> memory = context_->Memory();
    status.Update(memory.status());
    return report_.Expect("slabs.free_memory", status) ? memory->free : Bytes(0);
  }

  void Fill(CUdeviceptr at, Bytes size, unsigned value) {
    auto stream = CudaStream::Create(context_);
    (void)driver_.cuMemsetD32Async(at, value, static_cast<size_t>(size.count()) / 4, stream->get());
    (void)stream->Synchronize();
  }

  bool Holds(CUdeviceptr at, Bytes size, unsigned value) {
    std::vector<unsigned> seen(static_cast<size_t>(size.count()) / 4);
    auto stream = CudaStream::Create(context_);
    const CUresult copied =
        driver_.cuMemcpyDtoHAsync(seen.data(), at, seen.size() * 4, stream->get());
    (void)stream->Synchronize();
    return copied == CUDA_SUCCESS &&
           std::all_of(seen.begin(), seen.end(), [value](unsigned v) { return v == value; });
  }

  const CudaDriver& driver_;
  const CudaContextPtr context_;
  CheckReport& report_;
};

int Run() {
  CheckReport report;
  const std::optional<FirstGpu> gpu = OpenFirstGpu(report);
  if (!gpu.has_value()) return report.exit_status();
  const CudaDriver& driver = *gpu->driver;
  SlabCheck check(driver, gpu->context, report);
  check.WarmUp();
  int gpus = 0;
  (void)driver.cuDeviceGetCount(&gpus);
  check.Accounting([&] {
    check.Prices();
    check.Pool();
    check.Move();
    if (gpus > 1) check.Stripes();
  });
  CheckRestore(driver, {0}, "restore.", report);
  if (gpus > 1) CheckRestore(driver, {0, 1}, "stripes.restore.", report);
  return report.exit_status();
}

}  // namespace
}  // namespace palimpsest

int main() { return palimpsest::Run(); }
