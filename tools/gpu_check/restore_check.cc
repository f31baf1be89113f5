#include "tools/gpu_check/restore_check.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <memory>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/cuda/context.h"
#include "common/cuda/virtual_memory.h"
#include "common/mapping.h"
#include "common/memory_file.h"
#include "common/slab_checksum.h"
#include "tools/gpu_check/timing.h"
#include "worker/memory/cuda/cuda_memory.h"
#include "worker/memory/regions.h"

namespace palimpsest {
namespace {

using Limit = CheckReport::Limit;

constexpr Bytes kSlab = MiB(32);
constexpr uint32_t kSlabs = 64;  // of a rank
constexpr int kRounds = 7;

class RestoreCheck {
 public:
  RestoreCheck(const CudaDriver& driver, const std::vector<int>& gpus, const std::string& prefix,
               CheckReport& report)
      : driver_(driver),
        gpus_(gpus),
        prefix_(prefix),
        report_(report),
        part_(kSlab * kSlabs),
        size_(part_ * static_cast<int64_t>(gpus.size())) {}

  void Run() {
    if (!MakeImage() || !MapSlabs()) return;
    const absl::Duration unverified = Restore(/*verify=*/false);
    const absl::Duration verified = Restore(/*verify=*/true);
    const double link = GigabytesPerSecond(size_, PlainCopies());
    report_.Inform(prefix_ + "link", link, "GB/s",
                   "plain copies of the registered image, to all GPUs at once");
    report_.Ratio(prefix_ + "rate", GigabytesPerSecond(size_, unverified), "GB/s", link, 0.95);
    report_.Ratio(prefix_ + "rate_verified", GigabytesPerSecond(size_, verified), "GB/s", link,
                  0.95);
    report_.Measure(prefix_ + "checksum_cost",
                    100.0 * (absl::FDivDuration(verified, unverified) - 1.0), "%", Limit::kAtMost,
                    5.0, "of the time of the copies");
  }

 private:
  static ImageRestorer::Progress Everything() {
    return {.wanted = [](RegionIndex) { return true; },
            .queued = [](RegionIndex) {},
            .done = [](RegionIndex) {}};
  }

  bool MakeImage() {
    UniqueFd writable(::memfd_create("image", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    shape_ = {.slab_bytes = kSlab, .checksums = {}, .stages = {0, 8, 32}};
    shape_.ranks = static_cast<int>(gpus_.size());
    if (::ftruncate(writable.get(), size_.count()) != 0) {
      report_.Verify(prefix_ + "image", false);
      return false;
    }
    {
      auto mapping = Mapping::Map(writable.get(), size_, MapAccess::kReadWrite);
      if (!report_.Expect(prefix_ + "image", mapping.status())) return false;
      std::mt19937_64 random(1);
      auto* const words = reinterpret_cast<uint64_t*>(mapping->data());
      for (size_t i = 0; i < mapping->size() / 8; ++i) words[i] = random();
      for (Bytes at; at < size_; at += kSlab) {
        shape_.checksums.push_back(
            SlabChecksum({mapping->data() + at.count(), static_cast<size_t>(kSlab.count())}));
      }
    }
    if (!report_.Expect(prefix_ + "image", SealMemory(writable.get(), kImageSeals))) return false;
    const std::string path = absl::StrCat("/proc/self/fd/", writable.get());
    image_ = UniqueFd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    return true;
  }

  bool MapSlabs() {
    auto memory = CudaMemory::Open({.driver = &driver_, .gpus = gpus_});
    if (!report_.Expect(prefix_ + "open", memory.status())) return false;
    memory_ = *std::move(memory);
    std::vector<SlabRegion::Arrival> arrivals;
    for (uint32_t i = 0; i < kSlabs; ++i) {
      arrivals.push_back({SlabId(i), Epoch(1), 0, {}});
      for (const int gpu : gpus_) {
        slabs_.push_back(*CudaAllocation::Create(driver_, gpu, kSlab));
        arrivals.back().memory.push_back(*slabs_.back().Export());
      }
      all_.push_back(RegionIndex(i));
    }
    auto reserved = memory_->Reserve(kSlabs, kSlab);
    if (!report_.Expect(prefix_ + "reserve", reserved.status())) return false;
    region_ = std::make_unique<SlabRegion>(*reserved, 0, kSlabs, kSlab);
    for (int rank = 0; rank < memory_->ranks(); ++rank) bases_.push_back(region_->base(rank));
    return report_.Expect(prefix_ + "map", region_->Map(std::move(arrivals), all_));
  }

  absl::Duration Restore(bool verify) {
    shape_.verify = verify;
    std::unique_ptr<ImageRestorer> restorer;
    const absl::Duration opened = Timed([&] {
      auto made = memory_->OpenImage(*image_.Duplicate(), shape_);
      if (report_.Expect(prefix_ + "open_image", made.status())) restorer = *std::move(made);
    });
    if (restorer == nullptr) return absl::InfiniteDuration();
    if (!verify) {
      report_.Inform(prefix_ + "register",
                     absl::ToDoubleMilliseconds(opened) / static_cast<double>(size_ / GiB(1)),
                     "ms/GiB", "mapping and registering the image");
    }
    std::vector<absl::Duration> times;
    for (int round = 0; round < kRounds; ++round) {
      times.push_back(Timed([&] {
        report_.Expect(prefix_ + "restore", restorer->Restore(bases_, all_, Everything()));
      }));
    }
    if (verify) Lie();
    return Median(times);
  }

  // Bytes of the image, wrong checksum on the last GPU: must be found.
  void Lie() {
    ImageShape lie = shape_;
    lie.checksums[lie.checksums.size() - kSlabs + 17] ^= 1;
    auto liar = memory_->OpenImage(*image_.Duplicate(), lie);
    report_.Verify(prefix_ + "wrong_checksum_is_found",
                   !liar.ok() || absl::IsDataLoss((*liar)->Restore(bases_, all_, Everything())));
  }

  absl::Duration PlainCopies() {
    auto mapping = Mapping::Map(image_.get(), size_, MapAccess::kRead, MapPopulate::kYes);
    if (!mapping.ok()) return absl::InfiniteDuration();
    std::vector<CudaStream> streams;
    for (int rank = 0; rank < memory_->ranks(); ++rank) {
      (void)memory_->context(rank)->MakeCurrent();
      auto stream = CudaStream::Create(memory_->context(rank));
      if (!stream.ok()) return absl::InfiniteDuration();
      streams.push_back(*std::move(stream));
    }
    (void)driver_.cuMemHostRegister(mapping->data(), mapping->size(),
                                    CU_MEMHOSTREGISTER_READ_ONLY | CU_MEMHOSTREGISTER_PORTABLE);
    std::vector<absl::Duration> times;
    for (int round = 0; round < kRounds; ++round) {
      times.push_back(Timed([&] {
        for (size_t rank = 0; rank < streams.size(); ++rank) {
          (void)memory_->context(static_cast<int>(rank))->MakeCurrent();
          (void)driver_.cuMemcpyHtoDAsync(reinterpret_cast<CUdeviceptr>(bases_[rank]),
                                          mapping->data() + rank * part_.count(),
                                          static_cast<size_t>(part_.count()), streams[rank].get());
        }
        for (size_t rank = 0; rank < streams.size(); ++rank) {
          (void)memory_->context(static_cast<int>(rank))->MakeCurrent();
          (void)streams[rank].Synchronize();
        }
      }));
    }
    (void)driver_.cuMemHostUnregister(mapping->data());
    return Median(times);
  }

  const CudaDriver& driver_;
  const std::vector<int> gpus_;
  const std::string prefix_;
  CheckReport& report_;
  const Bytes part_;
  const Bytes size_;
  ImageShape shape_;
  UniqueFd image_;
  std::unique_ptr<CudaMemory> memory_;
  std::vector<CudaAllocation> slabs_;
  std::vector<RegionIndex> all_;
  std::unique_ptr<SlabRegion> region_;
  std::vector<std::byte*> bases_;
};

}  // namespace

void CheckRestore(const CudaDriver& driver, const std::vector<int>& gpus, const std::string& prefix,
                  CheckReport& report) {
  RestoreCheck(driver, gpus, prefix, report).Run();
}

}  // namespace palimpsest
