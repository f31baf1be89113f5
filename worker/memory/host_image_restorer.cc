#include "worker/memory/host_image_restorer.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/memory_file.h"
#include "common/slab_checksum.h"

namespace palimpsest {
absl::StatusOr<std::unique_ptr<HostImageRestorer>> HostImageRestorer::Open(UniqueFd image,
                                                                           const ImageShape& shape,
                                                                           int threads) {
  const Bytes size = shape.slab_bytes * static_cast<int64_t>(shape.checksums.size());
  if (absl::Status status = CheckImageFile(image.get(), size); !status.ok()) return status;
  absl::StatusOr<Mapping> mapping =
      Mapping::Map(image.get(), size, MapAccess::kRead, MapPopulate::kYes);
  if (!mapping.ok()) return mapping.status();
  std::unique_ptr<HostImageRestorer> restorer(
      new HostImageRestorer(std::move(image), *std::move(mapping), shape));
  for (int i = 1; i < threads; ++i) {
    restorer->helpers_.emplace_back([r = restorer.get()] { r->HelperLoop(); });
  }
  return restorer;
}

HostImageRestorer::~HostImageRestorer() {
  {
    MutexLock lock(&mu_);
    stopping_ = true;
    changed_.SignalAll();
  }
  for (std::thread& helper : helpers_) helper.join();
}

absl::Status HostImageRestorer::Restore(absl::Span<std::byte* const> bases,
                                        absl::Span<const RegionIndex> slabs,
                                        const Progress& progress) {
  Job job;
  job.base = bases[0];
  job.slabs = slabs;
  job.progress = &progress;
  MutexLock lock(&mu_);
  job_ = &job;
  changed_.SignalAll();
  Work();
  while (job.working > 0) changed_.Wait(&mu_);
  job_ = nullptr;
  return job.status;
}

void HostImageRestorer::HelperLoop() {
  MutexLock lock(&mu_);
  while (!stopping_) {
    if (job_ != nullptr && job_->next < job_->slabs.size()) {
      Work();
    } else {
      changed_.Wait(&mu_);
    }
  }
}

void HostImageRestorer::Work() {
  Job& job = *job_;
  ++job.working;
  while (job.next < job.slabs.size() && job.status.ok()) {
    const RegionIndex slab = job.slabs[job.next++];
    mu_.Unlock();
    absl::Status status;
    if (job.progress->wanted(slab)) {
      if (job.progress->pacer != nullptr) {
        job.progress->pacer->AwaitTurn(LinkPacer::Kind::kRestore, slab_bytes_);
      }
      status = CopySlab(job.base, slab);
      if (status.ok()) job.progress->done(slab);
    }
    mu_.Lock();
    if (!status.ok() && job.status.ok()) {
      job.status = status;
      job.next = job.slabs.size();
    }
  }
  --job.working;
  changed_.SignalAll();
}

absl::Status HostImageRestorer::CopySlab(std::byte* base, RegionIndex slab) const {
  if (slab.value() >= checksums_.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("slab ", slab.ToString(), " of an image of ", checksums_.size()));
  }
  const int64_t offset = (slab_bytes_ * slab.value()).count();
  const auto size = static_cast<size_t>(slab_bytes_.count());
  std::byte* const to = base + offset;
  const std::byte* const from = mapping_.data() + offset;
  if (!verify_) {
    std::memcpy(to, from, size);
    return absl::OkStatus();
  }
  const uint64_t expected = checksums_[slab.value()];
  uint64_t found = 0;
  for (int attempt = 0; attempt < 2; ++attempt) {
    found = CopyWithChecksum(to, absl::MakeConstSpan(from, size));
    if (found == expected) return absl::OkStatus();
  }
  return absl::DataLossError(absl::StrFormat(
      "slab %d of the parameter image has checksum %016x, its manifest says %016x: host memory is "
      "damaged; restart the broker, which packs the image anew",
      slab.value(), found, expected));
}

}  // namespace palimpsest
