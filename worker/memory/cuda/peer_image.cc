#include "worker/memory/cuda/peer_image.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "common/monotonic_time.h"

namespace palimpsest {
namespace {

// The best of a few, the first of which warms up.
constexpr int kProbes = 4;

}  // namespace

absl::StatusOr<std::unique_ptr<PeerImage>> PeerImage::Map(
    const std::vector<CudaContextPtr>& contexts, const std::vector<SlabDescriptors>& slabs,
    Bytes slab_bytes) {
  for (const SlabDescriptors& slab : slabs) {
    if (slab.size() == contexts.size()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("a slab of ", slab.size(), " descriptors, expected ", contexts.size()));
  }
  std::unique_ptr<PeerImage> image(new PeerImage(slab_bytes, slabs.size()));
  for (const CudaContextPtr& context : contexts) {
    if (absl::Status status = image->Add(context, slabs); !status.ok()) return status;
  }
  return image;
}

absl::Status PeerImage::Add(const CudaContextPtr& context,
                            const std::vector<SlabDescriptors>& slabs) {
  const size_t number = ranks_.size();
  absl::Status status = context->MakeCurrent();
  if (!status.ok()) return status;
  auto range = CudaAddressRange::Reserve(context->driver(), context->ordinal(), bytes());
  if (!range.ok()) return range.status();
  Rank& rank = ranks_.emplace_back();
  rank.context = context;
  rank.range = *std::move(range);
  for (const SlabDescriptors& slab : slabs) {
    auto memory = CudaAllocation::Import(context->driver(), slab[number]);
    if (!memory.ok()) return memory.status();
    status =
        rank.range.Map(slab_bytes_ * static_cast<int64_t>(rank.slabs.size()), slab_bytes_, *memory);
    if (!status.ok()) return status;
    rank.slabs.push_back(*std::move(memory));
  }
  return rank.range.Open(Bytes(0), bytes());
}

PeerImage::~PeerImage() {
  for (const Rank& rank : ranks_) {
    if (rank.slabs.empty()) continue;
    (void)rank.range.Unmap(Bytes(0), slab_bytes_ * static_cast<int64_t>(rank.slabs.size()));
  }
}

absl::Status PeerImage::Fill(const std::byte* image, ImageRegistration& registration) {
  const auto slab = static_cast<size_t>(slab_bytes_.count());
  std::vector<CudaStream> streams;
  absl::Status status;
  for (size_t number = 0; status.ok() && number < ranks_.size(); ++number) {
    const Rank& rank = ranks_[number];
    const CudaDriver& driver = rank.context->driver();
    status = rank.context->MakeCurrent();
    if (!status.ok()) break;
    auto stream = CudaStream::Create(rank.context);
    if (!stream.ok()) {
      status = stream.status();
      break;
    }
    streams.push_back(*std::move(stream));
    const size_t part = number * (registration.bytes() / ranks_.size());
    for (size_t i = 0; status.ok() && i < slabs_; ++i) {
      status = registration.Await(part + i * slab);
      if (!status.ok()) break;
      status = driver.Check(
          driver.cuMemcpyHtoDAsync(rank.range.base() + i * slab, image + part + i * slab, slab,
                                   streams.back().get()),
          "copying the parameter image to another GPU");
    }
  }
  // Nothing is written any more when this returns, whatever went wrong.
  for (size_t number = 0; number < streams.size(); ++number) {
    status.Update(ranks_[number].context->MakeCurrent());
    status.Update(streams[number].Synchronize());
  }
  return status;
}

double PeerImage::MeasureRate() const {
  double slowest = std::numeric_limits<double>::infinity();
  for (const Rank& rank : ranks_) slowest = std::min(slowest, Rate(rank).value_or(0));
  return slabs_ > 0 ? slowest : 0;
}

absl::StatusOr<double> PeerImage::Rate(const Rank& rank) const {
  const CudaDriver& driver = rank.context->driver();
  absl::Status status = rank.context->MakeCurrent();
  if (!status.ok()) return status;
  const auto stream = CudaStream::Create(rank.context);
  if (!stream.ok()) return stream.status();
  const auto memory = CudaAllocation::Create(driver, rank.context->ordinal(), slab_bytes_);
  if (!memory.ok()) return memory.status();
  const auto range = CudaAddressRange::Reserve(driver, rank.context->ordinal(), slab_bytes_);
  if (!range.ok()) return range.status();
  status = range->Map(Bytes(0), slab_bytes_, *memory);
  if (!status.ok()) return status;
  status = range->Open(Bytes(0), slab_bytes_);
  absl::Duration best = absl::InfiniteDuration();
  for (int probe = 0; status.ok() && probe < kProbes; ++probe) {
    const absl::Time start = MonotonicNow();
    status = driver.Check(
        driver.cuMemcpyDtoDAsync(range->base(), rank.range.base(),
                                 static_cast<size_t>(slab_bytes_.count()), stream->get()),
        "probing the link to another GPU");
    if (status.ok()) status = stream->Synchronize();
    best = std::min(best, MonotonicNow() - start);
  }
  status.Update(range->Unmap(Bytes(0), slab_bytes_));
  if (!status.ok()) return status;
  return static_cast<double>(slab_bytes_.count()) / absl::ToDoubleSeconds(best);
}

}  // namespace palimpsest
