#include "worker/memory/cuda/cuda_image_restorer.h"

#include <xxhash.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/memory_file.h"
#include "common/slab_checksum.h"
#include "worker/memory/cuda/slab_checksum_kernels.h"

namespace palimpsest {
namespace {

constexpr unsigned kLanes = 8;
constexpr unsigned kBlockThreads = 128;

}  // namespace

absl::StatusOr<std::unique_ptr<CudaImageRestorer>> CudaImageRestorer::Open(CudaContextPtr context,
                                                                           UniqueFd image,
                                                                           const ImageShape& shape,
                                                                           Bytes window) {
  const Bytes size = shape.slab_bytes * static_cast<int64_t>(shape.checksums.size());
  if (absl::Status status = CheckImageFile(image.get(), size); !status.ok()) return status;
  if (shape.verify && shape.slab_bytes.count() % static_cast<int64_t>(kChecksumChunk) != 0) {
    return absl::InvalidArgumentError(absl::StrCat("slabs of ", shape.slab_bytes.count(),
                                                   " bytes; checksums on a GPU need a multiple of ",
                                                   kChecksumChunk));
  }
  absl::StatusOr<Mapping> mapping =
      Mapping::Map(image.get(), size, MapAccess::kRead, MapPopulate::kYes);
  if (!mapping.ok()) return mapping.status();
  std::unique_ptr<CudaImageRestorer> restorer(
      new CudaImageRestorer(std::move(context), std::move(image), *std::move(mapping), shape));
  const size_t slots = static_cast<size_t>(std::max<int64_t>(window / shape.slab_bytes, 2));
  if (absl::Status status = restorer->Prepare(slots); !status.ok()) return status;
  return restorer;
}

CudaImageRestorer::~CudaImageRestorer() {
  const CudaDriver& driver = context_->driver();
  (void)context_->MakeCurrent();
  if (copies_.get() != nullptr) (void)copies_.Synchronize();
  if (checks_.get() != nullptr) (void)checks_.Synchronize();
  if (module_ != nullptr) driver.cuModuleUnload(module_);
  if (hashes_ != nullptr) driver.cuMemFreeHost(hashes_);
  if (registered_) driver.cuMemHostUnregister(mapping_.data());
}

uint32_t CudaImageRestorer::chunks() const {
  return static_cast<uint32_t>(static_cast<size_t>(shape_.slab_bytes.count()) / kChecksumChunk);
}

absl::Status CudaImageRestorer::LoadKernel() {
  const CudaDriver& driver = context_->driver();
  absl::Status status = driver.Check(driver.cuModuleLoadData(&module_, slab_checksum_kernels),
                                     "loading the kernel for checksums");
  if (!status.ok()) return status;
  return driver.Check(driver.cuModuleGetFunction(&hash_chunks_, module_, "palimpsest_hash_chunks"),
                      "finding the kernel for checksums");
}

absl::Status CudaImageRestorer::Prepare(size_t slots) {
  const CudaDriver& driver = context_->driver();
  absl::Status status = context_->MakeCurrent();
  if (!status.ok()) return status;
  // Sealed pages can be pinned for reading alone; unregistered ones copy at a sixth of the speed.
  status = driver.Check(
      driver.cuMemHostRegister(mapping_.data(), mapping_.size(), CU_MEMHOSTREGISTER_READ_ONLY),
      "registering the parameter image with the GPU");
  if (!status.ok()) return status;
  registered_ = true;
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

size_t CudaImageRestorer::StageOf(RegionIndex slab) const {
  const auto after = std::upper_bound(shape_.stages.begin(), shape_.stages.end(), slab.value());
  return static_cast<size_t>(after - shape_.stages.begin()) - 1;
}

void* CudaImageRestorer::StageEvent(int stage, int) {
  return stages_[static_cast<size_t>(stage)].get();
}

absl::Status CudaImageRestorer::Hash(CUdeviceptr slab, size_t slot) const {
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

absl::Status CudaImageRestorer::Queue(std::byte* base, const Flight& flight) {
  const CudaDriver& driver = context_->driver();
  const int64_t offset = (shape_.slab_bytes * flight.slab.value()).count();
  const auto to = reinterpret_cast<CUdeviceptr>(base + offset);
  absl::Status status = driver.Check(
      driver.cuMemcpyHtoDAsync(to, mapping_.data() + offset,
                               static_cast<size_t>(shape_.slab_bytes.count()), copies_.get()),
      "copying a slab of the parameter image");
  CUstream last = copies_.get();
  if (shape_.verify) {
    last = checks_.get();
    if (status.ok()) status = copied_[flight.slot].Record(copies_.get());
    if (status.ok()) status = copied_[flight.slot].MakeWait(last);
    if (status.ok()) status = Hash(to, flight.slot);
  }
  if (status.ok()) status = finished_[flight.slot].Record(last);
  if (status.ok()) status = stages_[StageOf(flight.slab)].Record(last);
  return status;
}

absl::Status CudaImageRestorer::Finish(const Flight& flight) const {
  absl::Status status = finished_[flight.slot].Synchronize();
  if (!status.ok() || !shape_.verify) return status;
  const uint64_t expected = shape_.checksums[flight.slab.value()];
  const uint64_t found = XXH3_64bits(hashes_ + flight.slot * chunks(), chunks() * sizeof(uint64_t));
  if (found == expected) return absl::OkStatus();
  return absl::DataLossError(absl::StrFormat(
      "slab %d of the parameter image has checksum %016x in GPU memory, its manifest says %016x: "
      "host memory or the link is damaged; restart the broker, which packs the image anew",
      flight.slab.value(), found, expected));
}

absl::Status CudaImageRestorer::Restore(std::byte* base, absl::Span<const RegionIndex> slabs,
                                        const Progress& progress) {
  absl::Status status = context_->MakeCurrent();
  std::deque<Flight> flights;
  size_t next_slot = 0;
  const auto finish_oldest = [&] {
    const Flight oldest = flights.front();
    flights.pop_front();
    const absl::Status finished = Finish(oldest);
    if (finished.ok()) progress.done(oldest.slab);
    status.Update(finished);
  };
  for (const RegionIndex slab : slabs) {
    if (flights.size() == finished_.size()) finish_oldest();
    if (!status.ok()) break;
    if (slab.value() >= shape_.checksums.size()) {
      status = absl::InvalidArgumentError(
          absl::StrCat("slab ", slab.ToString(), " of an image of ", shape_.checksums.size()));
      break;
    }
    if (!progress.wanted(slab)) continue;
    const Flight flight{slab, next_slot};
    next_slot = (next_slot + 1) % finished_.size();
    status = Queue(base, flight);
    if (!status.ok()) break;
    progress.queued(slab);
    flights.push_back(flight);
  }
  // Nothing is written any more when this returns, whatever went wrong.
  while (!flights.empty()) finish_oldest();
  if (!status.ok()) (void)copies_.Synchronize();
  return status;
}

}  // namespace palimpsest
