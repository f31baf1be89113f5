#include "broker/device/cuda_slab_device.h"

#include <algorithm>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "common/descriptor_limit.h"
#include "common/monotonic_time.h"

namespace palimpsest {
namespace {

// Identity::device of all GPU memory: "CUDA".
constexpr uint64_t kCudaMemory = 0x43554441;

// Copies of this size run at the link's speed.
constexpr Bytes kLinkProbe = MiB(32);
// So many copies in a row that are no faster than the best before: that was it.
constexpr int kProbesWithoutGain = 8;
constexpr int kMostProbes = 64;
constexpr double kGain = 1.02;

// `copy` copies kLinkProbe bytes on the stream.
template <typename Copy>
absl::StatusOr<double> BestSpeed(const CudaDriver& driver, const CudaStream& stream,
                                 const Copy& copy) {
  double best = 0;
  int without_gain = 0;
  for (int i = 0; i < kMostProbes && without_gain < kProbesWithoutGain; ++i) {
    const absl::Time start = MonotonicNow();
    absl::Status status = driver.Check(copy(), "probing the link");
    if (status.ok()) status = stream.Synchronize();
    if (!status.ok()) return status;
    const absl::Duration took = std::max(MonotonicNow() - start, absl::Nanoseconds(1));
    const double speed = static_cast<double>(kLinkProbe.count()) / absl::ToDoubleSeconds(took);
    without_gain = speed > best * kGain ? 0 : without_gain + 1;
    best = std::max(best, speed);
  }
  return best;
}

}  // namespace

absl::StatusOr<std::unique_ptr<CudaSlabDevice>> CudaSlabDevice::Open(const Options& options) {
  const uint64_t descriptors = uint64_t{options.slabs} * options.gpus.size() * 2;
  if (absl::Status status = ReserveDescriptors(descriptors + options.other_descriptors);
      !status.ok()) {
    return status;
  }
  if (options.gpus.empty()) return absl::InvalidArgumentError("a pool of GPU memory without GPUs");
  std::vector<Gpu> gpus;
  for (const int ordinal : options.gpus) {
    absl::StatusOr<Gpu> gpu = OpenGpu(options, ordinal);
    if (!gpu.ok()) return gpu.status();
    gpus.push_back(*std::move(gpu));
  }
  return std::unique_ptr<CudaSlabDevice>(new CudaSlabDevice(options, std::move(gpus)));
}

absl::StatusOr<CudaSlabDevice::Gpu> CudaSlabDevice::OpenGpu(const Options& options, int ordinal) {
  const CudaDriver& driver = *options.driver;
  absl::StatusOr<CudaContextPtr> context = CudaContext::Open(driver, ordinal);
  if (!context.ok()) return context.status();
  if (absl::Status status = (*context)->MakeCurrent(); !status.ok()) return status;
  absl::StatusOr<Bytes> granularity = CudaAllocation::Granularity(driver, ordinal);
  if (!granularity.ok()) return granularity.status();
  if (options.slabs == 0 || options.slab_bytes <= Bytes(0) ||
      options.slab_bytes.count() % granularity->count() != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("a pool of ", options.slabs, " slabs of ", options.slab_bytes.count(),
                     " bytes; expected at least one slab of a multiple of GPU ", ordinal, "'s ",
                     granularity->ToString()));
  }
  absl::StatusOr<CudaContext::MemoryInfo> memory = (*context)->Memory();
  if (!memory.ok()) return memory.status();
  const Bytes pool = options.slab_bytes * options.slabs;
  if (pool > memory->total) {
    return absl::FailedPreconditionError(
        absl::StrCat("a pool of ", pool.ToString(), " on GPU ", ordinal, " (", (*context)->name(),
                     "), which has ", memory->total.ToString(),
                     ": make pool.bytes smaller, and leave room for the workers' contexts"));
  }
  absl::StatusOr<CudaAddressRange> range = CudaAddressRange::Reserve(driver, ordinal, pool);
  if (!range.ok()) return range.status();
  absl::StatusOr<CudaStream> stream = CudaStream::Create(*context);
  if (!stream.ok()) return stream.status();
  return Gpu{*std::move(context), *std::move(range), *std::move(stream)};
}

absl::StatusOr<SlabDevice::Link> CudaSlabDevice::MeasureLink(const Gpu& gpu) {
  const CudaDriver& driver = gpu.context->driver();
  const int ordinal = gpu.context->ordinal();
  absl::Status status = gpu.context->MakeCurrent();
  if (!status.ok()) return status;
  const auto bytes = static_cast<size_t>(kLinkProbe.count());
  void* host = nullptr;
  status = driver.Check(driver.cuMemHostAlloc(&host, bytes, 0), "allocating a probe of the link");
  if (!status.ok()) return status;
  const auto free_host = absl::MakeCleanup([&] { driver.cuMemFreeHost(host); });
  const auto memory = CudaAllocation::Create(driver, ordinal, kLinkProbe);
  if (!memory.ok()) return memory.status();
  const auto range = CudaAddressRange::Reserve(driver, ordinal, kLinkProbe);
  if (!range.ok()) return range.status();
  if (status = range->Map(Bytes(0), kLinkProbe, *memory); !status.ok()) return status;
  const auto unmap = absl::MakeCleanup([&] { (void)range->Unmap(Bytes(0), kLinkProbe); });
  if (status = range->Open(Bytes(0), kLinkProbe); !status.ok()) return status;
  CUstream stream = gpu.stream.get();
  const auto to = BestSpeed(driver, gpu.stream, [&] {
    return driver.cuMemcpyHtoDAsync(range->base(), host, bytes, stream);
  });
  if (!to.ok()) return to.status();
  const auto from = BestSpeed(driver, gpu.stream, [&] {
    return driver.cuMemcpyDtoHAsync(host, range->base(), bytes, stream);
  });
  if (!from.ok()) return from.status();
  return Link{*to, *from};
}

absl::Status CudaSlabDevice::MeasureLinks() {
  for (const Gpu& gpu : gpus_) {
    const absl::StatusOr<Link> link = MeasureLink(gpu);
    if (!link.ok()) {
      links_.clear();
      return link.status();
    }
    links_.push_back(*link);
  }
  return absl::OkStatus();
}

CudaSlabDevice::~CudaSlabDevice() {
  for (uint32_t i = 0; i < options_.slabs; ++i) (void)Drop(SlabId(i));
}

absl::Status CudaSlabDevice::CheckId(SlabId slab) const {
  if (slab.value() < options_.slabs) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("slab ", slab.ToString(), " of a pool of ", options_.slabs));
}

absl::Status CudaSlabDevice::CheckEmpty(SlabId slab) const {
  absl::Status status = CheckId(slab);
  if (!status.ok() || !HasMemory(slab)) return status;
  return absl::AlreadyExistsError(absl::StrCat("slab ", slab.ToString(), " has memory"));
}

bool CudaSlabDevice::HasMemory(SlabId slab) const {
  MutexLock lock(&mu_);
  return !slabs_[slab.value()].memory.empty();
}

absl::Status CudaSlabDevice::MapPiece(SlabId slab, const Gpu& gpu,
                                      const CudaAllocation& memory) const {
  absl::Status status = gpu.range.Map(Place(slab), options_.slab_bytes, memory);
  if (!status.ok()) return status;
  status = gpu.range.Open(Place(slab), options_.slab_bytes);
  if (!status.ok()) (void)gpu.range.Unmap(Place(slab), options_.slab_bytes);
  return status;
}

absl::Status CudaSlabDevice::Map(SlabId slab, const Stripe& memory) {
  for (size_t i = 0; i < gpus_.size(); ++i) {
    const absl::Status status = MapPiece(slab, gpus_[i], memory[i]);
    if (status.ok()) continue;
    (void)Unmap(slab, i);
    return status;
  }
  return absl::OkStatus();
}

absl::Status CudaSlabDevice::Unmap(SlabId slab, size_t count) {
  absl::Status status;
  for (size_t i = 0; i < count; ++i) {
    status.Update(gpus_[i].range.Unmap(Place(slab), options_.slab_bytes));
  }
  return status;
}

absl::Status CudaSlabDevice::Zero(SlabId first, uint32_t count) {
  const auto words = static_cast<size_t>((options_.slab_bytes * count).count()) / 4;
  absl::Status status;
  for (const Gpu& gpu : gpus_) {
    const CUdeviceptr at = gpu.range.base() + static_cast<CUdeviceptr>(Place(first).count());
    const CudaDriver& driver = gpu.context->driver();
    status.Update(gpu.context->MakeCurrent());
    if (!status.ok()) return status;
    status =
        driver.Check(driver.cuMemsetD32Async(at, 0, words, gpu.stream.get()), "scrubbing slabs");
  }
  return status;
}

absl::Status CudaSlabDevice::AwaitZeroed() {
  absl::Status status;
  for (const Gpu& gpu : gpus_) {
    absl::Status done = gpu.context->MakeCurrent();
    if (done.ok()) done = gpu.stream.Synchronize();
    status.Update(done);
  }
  return status;
}

void CudaSlabDevice::Install(SlabId slab, Stripe memory, SlabDescriptors descriptors,
                             const Identity& identity) {
  auto shared = std::make_shared<const SlabDescriptors>(std::move(descriptors));
  MutexLock lock(&mu_);
  slabs_[slab.value()] = Slab{std::move(memory), std::move(shared), identity};
}

absl::Status CudaSlabDevice::NewMemory(SlabId slab) {
  Stripe memory;
  SlabDescriptors descriptors;
  for (const Gpu& gpu : gpus_) {
    absl::StatusOr<CudaAllocation> piece =
        CudaAllocation::Create(gpu.context->driver(), gpu.context->ordinal(), options_.slab_bytes);
    if (!piece.ok()) return piece.status();
    absl::StatusOr<UniqueFd> descriptor = piece->Export();
    if (!descriptor.ok()) return descriptor.status();
    memory.push_back(*std::move(piece));
    descriptors.push_back(*std::move(descriptor));
  }
  absl::Status status = Map(slab, memory);
  if (!status.ok()) return status;
  // What the driver hands out may hold what others left in it.
  status = Zero(slab, 1);
  status.Update(AwaitZeroed());
  if (!status.ok()) {
    (void)Unmap(slab, gpus_.size());
    return status;
  }
  uint64_t number;
  {
    MutexLock lock(&mu_);
    number = ++created_;
  }
  Install(slab, std::move(memory), std::move(descriptors),
          {kCudaMemory, uint64_t{options_.generation} << 32 | number});
  return absl::OkStatus();
}

absl::Status CudaSlabDevice::Drop(SlabId slab) {
  Slab old;
  {
    MutexLock lock(&mu_);
    if (slabs_[slab.value()].memory.empty()) return absl::OkStatus();
    old = std::exchange(slabs_[slab.value()], Slab{});
  }
  return Unmap(slab, gpus_.size());
}

absl::Status CudaSlabDevice::Create(SlabId slab) {
  absl::Status status = CheckEmpty(slab);
  return status.ok() ? NewMemory(slab) : status;
}

absl::Status CudaSlabDevice::CheckMemory(const SlabDescriptors& memory,
                                         const Identity& granted) const {
  if (granted.device != kCudaMemory) {
    return absl::InvalidArgumentError("the slab was not GPU memory when it was granted");
  }
  if (memory.size() == gpus_.size()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(memory.size(), " descriptors for a slab on ",
                                                 gpus_.size(), " GPUs: was pool.gpus changed?"));
}

absl::Status CudaSlabDevice::Adopt(SlabId slab, SlabDescriptors memory, const Identity& granted) {
  absl::Status status = CheckMemory(memory, granted);
  if (status.ok()) status = CheckEmpty(slab);
  if (!status.ok()) return status;
  Stripe imported;
  for (size_t i = 0; i < gpus_.size(); ++i) {
    const CudaContext& context = *gpus_[i].context;
    absl::StatusOr<CudaAllocation> piece =
        CudaAllocation::Import(context.driver(), context.ordinal(), memory[i]);
    if (!piece.ok()) return piece.status();
    imported.push_back(*std::move(piece));
  }
  // Refused unless each allocation has exactly the size of a slab.
  if (status = Map(slab, imported); !status.ok()) return status;
  Install(slab, std::move(imported), std::move(memory), granted);
  return absl::OkStatus();
}

absl::Status CudaSlabDevice::Scrub(absl::Span<const SlabId> slabs) {
  std::vector<SlabId> sorted(slabs.begin(), slabs.end());
  std::sort(sorted.begin(), sorted.end());
  for (const SlabId slab : sorted) {
    absl::Status status = CheckId(slab);
    // Without memory, it never came back from an earlier broker's worker.
    if (status.ok() && !HasMemory(slab)) status = NewMemory(slab);
    if (!status.ok()) return status;
  }
  absl::Status status;
  for (size_t begin = 0; begin < sorted.size() && status.ok();) {
    size_t end = begin + 1;
    while (end < sorted.size() && sorted[end].value() == sorted[end - 1].value() + 1) ++end;
    status = Zero(sorted[begin], static_cast<uint32_t>(end - begin));
    begin = end;
  }
  status.Update(AwaitZeroed());
  return status;
}

absl::Status CudaSlabDevice::Retire(SlabId slab) {
  absl::Status status = CheckId(slab);
  if (status.ok()) status = Drop(slab);
  return status.ok() ? NewMemory(slab) : status;
}

std::shared_ptr<const SlabDescriptors> CudaSlabDevice::Descriptors(SlabId slab) {
  MutexLock lock(&mu_);
  return slabs_[slab.value()].descriptors;
}

SlabDevice::Identity CudaSlabDevice::IdentityOf(SlabId slab) {
  MutexLock lock(&mu_);
  return slabs_[slab.value()].identity;
}

absl::StatusOr<UniqueFd> CudaSlabDevice::CreateBeside(int gpu) {
  const auto memory = CudaAllocation::Create(*options_.driver, gpu, options_.slab_bytes);
  if (!memory.ok()) return memory.status();
  return memory->Export();
}

}  // namespace palimpsest
