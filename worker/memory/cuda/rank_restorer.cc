#include "worker/memory/cuda/rank_restorer.h"

#include <xxhash.h>

#include <algorithm>

#include "absl/strings/str_format.h"
#include "common/slab_checksum.h"
#include "worker/memory/cuda/slab_checksum_kernels.h"

namespace palimpsest {
namespace {

constexpr unsigned kLanes = 8;
constexpr unsigned kBlockThreads = 128;

}  // namespace

absl::StatusOr<std::unique_ptr<RankRestorer>> RankRestorer::Create(CudaContextPtr context, int rank,
                                                                   const std::byte* part,
                                                                   const ImageShape& shape,
                                                                   size_t slots) {
  std::unique_ptr<RankRestorer> restorer(new RankRestorer(std::move(context), rank, part, shape));
  if (absl::Status status = restorer->Prepare(slots); !status.ok()) return status;
  return restorer;
}

RankRestorer::~RankRestorer() {
  Drain();
  const CudaDriver& driver = context_->driver();
  if (module_ != nullptr) driver.cuModuleUnload(module_);
  if (hashes_ != nullptr) driver.cuMemFreeHost(hashes_);
}

void RankRestorer::Drain() const {
  (void)context_->MakeCurrent();
  if (copies_.get() != nullptr) (void)copies_.Synchronize();
  if (checks_.get() != nullptr) (void)checks_.Synchronize();
}

uint32_t RankRestorer::chunks() const {
  return static_cast<uint32_t>(static_cast<size_t>(shape_.slab_bytes.count()) / kChecksumChunk);
}

absl::Status RankRestorer::LoadKernel() {
  const CudaDriver& driver = context_->driver();
  absl::Status status = driver.Check(driver.cuModuleLoadData(&module_, slab_checksum_kernels),
                                     "loading the kernel for checksums");
  if (!status.ok()) return status;
  return driver.Check(driver.cuModuleGetFunction(&hash_chunks_, module_, "palimpsest_hash_chunks"),
                      "finding the kernel for checksums");
}

absl::Status RankRestorer::Prepare(size_t slots) {
  const CudaDriver& driver = context_->driver();
  absl::Status status = context_->MakeCurrent();
  if (!status.ok()) return status;
  if (shape_.verify) {
    if (status = LoadKernel(); !status.ok()) return status;
    status = driver.Check(
        driver.cuMemHostAlloc(reinterpret_cast<void**>(&hashes_),
                              slots * chunks() * sizeof(uint64_t), CU_MEMHOSTALLOC_PORTABLE),
        "allocating host memory for checksums");
    if (!status.ok()) return status;
  }
  for (CudaStream* stream : {&copies_, &checks_}) {
    absl::StatusOr<CudaStream> made = CudaStream::Create(context_);
    if (!made.ok()) return made.status();
    *stream = *std::move(made);
  }
  const auto make_events = [this](size_t count, std::vector<CudaEvent>& events) {
    for (size_t i = 0; i < count; ++i) {
      absl::StatusOr<CudaEvent> event = CudaEvent::Create(context_);
      if (!event.ok()) return event.status();
      events.push_back(*std::move(event));
    }
    return absl::OkStatus();
  };
  status = make_events(slots, copied_);
  status.Update(make_events(slots, finished_));
  status.Update(make_events(shape_.stages.size(), stages_));
  return status;
}

size_t RankRestorer::StageOf(RegionIndex slab) const {
  const auto after = std::upper_bound(shape_.stages.begin(), shape_.stages.end(), slab.value());
  return static_cast<size_t>(after - shape_.stages.begin()) - 1;
}

absl::Status RankRestorer::Hash(CUdeviceptr slab, size_t slot) const {
  unsigned chunk = static_cast<unsigned>(kChecksumChunk);
  unsigned count = chunks();
  uint64_t* hashes = hashes_ + slot * count;
  void* parameters[] = {&slab, &chunk, &count, &hashes};
  const unsigned blocks = (count * kLanes + kBlockThreads - 1) / kBlockThreads;
  const CudaDriver& driver = context_->driver();
  return driver.Check(driver.cuLaunchKernel(hash_chunks_, blocks, 1, 1, kBlockThreads, 1, 1, 0,
                                            checks_.get(), parameters, nullptr),
                      "hashing a slab");
}

absl::Status RankRestorer::Copy(CUdeviceptr to, RegionIndex slab) const {
  const CudaDriver& driver = context_->driver();
  const int64_t offset = (shape_.slab_bytes * slab.value()).count();
  const auto size = static_cast<size_t>(shape_.slab_bytes.count());
  const CUresult result =
      FromPeer(slab) ? driver.cuMemcpyDtoDAsync(to, reinterpret_cast<CUdeviceptr>(peer_ + offset),
                                                size, copies_.get())
                     : driver.cuMemcpyHtoDAsync(to, part_ + offset, size, copies_.get());
  return driver.Check(result, "copying a slab of the parameter image");
}

absl::Status RankRestorer::Queue(std::byte* to, RegionIndex slab, size_t slot) {
  absl::Status status = context_->MakeCurrent();
  if (!status.ok()) return status;
  const auto target = reinterpret_cast<CUdeviceptr>(to);
  status = Copy(target, slab);
  CUstream last = copies_.get();
  if (shape_.verify) {
    last = checks_.get();
    if (status.ok()) status = copied_[slot].Record(copies_.get());
    if (status.ok()) status = copied_[slot].MakeWait(last);
    if (status.ok()) status = Hash(target, slot);
  }
  if (status.ok()) status = finished_[slot].Record(last);
  if (status.ok()) status = stages_[StageOf(slab)].Record(last);
  return status;
}

absl::Status RankRestorer::Finish(RegionIndex slab, size_t slot) const {
  absl::Status status = context_->MakeCurrent();
  if (status.ok()) status = finished_[slot].Synchronize();
  if (!status.ok() || !shape_.verify) return status;
  const size_t number = shape_.slabs() * static_cast<size_t>(rank_) + slab.value();
  const uint64_t expected = shape_.checksums[number];
  const uint64_t found = XXH3_64bits(hashes_ + slot * chunks(), chunks() * sizeof(uint64_t));
  if (found == expected) return absl::OkStatus();
  return absl::DataLossError(absl::StrFormat(
      "slab %d of the parameter image has checksum %016x in the memory of GPU %d, its manifest "
      "says "
      "%016x: host memory or the link is damaged; restart the broker, which packs the image anew",
      number, found, context_->ordinal(), expected));
}

}  // namespace palimpsest
