// How fast slabs change hands on the host: from a revoke's ack to memory that is zeroed, granted
// and mapped, beside memcpy.
#include <benchmark/benchmark.h>

#include <cstring>
#include <thread>
#include <vector>

#include "broker/device/host_slab_device.h"
#include "common/mapping.h"

namespace palimpsest {
namespace {

constexpr uint32_t kSlabs = 128;
constexpr Bytes kSlab = MiB(2);

// Retires all slabs on `threads` threads, then maps each at its place of a reserved range.
void BM_RetireAndMap(benchmark::State& state) {
  const auto threads = static_cast<uint32_t>(state.range(0));
  auto device = *HostSlabDevice::Open(
      {.slabs = kSlabs, .pages = static_cast<HostSlabDevice::Pages>(state.range(1))});
  AddressRange range = *AddressRange::Reserve(kSlab * kSlabs, kSlab);
  for (uint32_t i = 0; i < kSlabs; ++i) (void)device->Create(SlabId(i));
  for (auto _ : state) {
    std::vector<std::thread> workers;
    for (uint32_t t = 0; t < threads; ++t) {
      workers.emplace_back([&, t] {
        for (uint32_t i = t; i < kSlabs; i += threads) {
          if (!device->Retire(SlabId(i)).ok()) std::abort();
          if (!range
                   .Map(kSlab * i, kSlab, device->Descriptors(SlabId(i))->front().get(),
                        MapAccess::kReadWrite, MapPopulate::kYes)
                   .ok()) {
            std::abort();
          }
        }
      });
    }
    for (std::thread& worker : workers) worker.join();
    state.PauseTiming();
    (void)range.Unmap(Bytes(0), range.size());
    state.ResumeTiming();
  }
  state.SetBytesProcessed(state.iterations() * (kSlab * kSlabs).count());
}
BENCHMARK(BM_RetireAndMap)
    ->ArgNames({"threads", "pages"})
    ->ArgsProduct({{1, 2}, {0, 1, 2}})
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);

void BM_Memcpy(benchmark::State& state) {
  std::vector<char> from((kSlab * kSlabs).count(), 1), to(from.size(), 2);
  for (auto _ : state) {
    std::memcpy(to.data(), from.data(), from.size());
    benchmark::DoNotOptimize(to.data());
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(from.size()));
}
BENCHMARK(BM_Memcpy)->UseRealTime()->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace palimpsest

BENCHMARK_MAIN();
