#include "worker/memory/cuda/cuda_memory.h"

#include <algorithm>
#include <map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/cleanup/cleanup.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "common/cuda/virtual_memory.h"
#include "common/monotonic_time.h"
#include "common/mutex.h"
#include "worker/memory/cuda/cuda_image_restorer.h"
#include "worker/memory/cuda/gpu_memory_use.h"

namespace palimpsest {
namespace {

// Memory of one slab as this process knows it; of all places that it is mapped at.
struct Import {
  std::vector<CudaAllocation> handles;  // by rank
  std::shared_ptr<const SlabDescriptors> descriptors;
};
using ImportPtr = std::shared_ptr<const Import>;

class RegisteredMemory final : public HostPin {
 public:
  RegisteredMemory(CudaContextPtr context, std::byte* memory)
      : context_(std::move(context)), memory_(memory) {}
  ~RegisteredMemory() override {
    (void)context_->MakeCurrent();
    context_->driver().cuMemHostUnregister(memory_);
  }

 private:
  const CudaContextPtr context_;
  std::byte* const memory_;
};

}  // namespace

// What slabs that were given back left behind, by memory id. At most one for each slab: whatever a
// slab had before its present memory is nobody's.
class CudaMemory::Imports {
 public:
  bool Has(uint64_t memory_id) const {
    MutexLock lock(&mu_);
    return kept_.contains(memory_id);
  }

  // Null if it is not there.
  ImportPtr Take(SlabId slab, uint64_t memory_id) {
    MutexLock lock(&mu_);
    const auto found = kept_.find(memory_id);
    if (found == kept_.end()) return nullptr;
    ImportPtr import = std::move(found->second);
    kept_.erase(found);
    ids_.erase(slab);
    return import;
  }

  void Keep(SlabId slab, uint64_t memory_id, ImportPtr import) {
    ImportPtr old;  // released after the lock
    MutexLock lock(&mu_);
    const auto [id, fresh] = ids_.emplace(slab, memory_id);
    if (!fresh) {
      if (auto found = kept_.find(id->second); found != kept_.end()) {
        old = std::move(found->second);
        kept_.erase(found);
      }
      id->second = memory_id;
    }
    kept_[memory_id] = std::move(import);
  }

  void Drop() {
    absl::flat_hash_map<uint64_t, ImportPtr> dropped;
    MutexLock lock(&mu_);
    dropped.swap(kept_);
    ids_.clear();
  }

 private:
  mutable Mutex mu_;
  absl::flat_hash_map<uint64_t, ImportPtr> kept_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<SlabId, uint64_t> ids_ ABSL_GUARDED_BY(mu_);
};

class CudaMemory::Region : public RegionMemory {
 public:
  Region(std::vector<CudaContextPtr> contexts, std::shared_ptr<Imports> imports,
         std::vector<CudaAddressRange> ranges, Bytes slab_bytes)
      : contexts_(std::move(contexts)),
        imports_(std::move(imports)),
        ranges_(std::move(ranges)),
        slab_bytes_(slab_bytes) {}

  std::byte* base(int rank) const override {
    return reinterpret_cast<std::byte*>(ranges_[static_cast<size_t>(rank)].base());
  }

  absl::Status Map(absl::Span<Piece> pieces) override {
    absl::Status status = contexts_[0]->MakeCurrent();
    std::vector<Place> mapped;
    for (Piece& piece : pieces) {
      if (status.ok()) status = MapOne(piece, mapped);
      if (!status.ok()) break;
    }
    std::vector<RegionIndex> places;
    for (const Place& place : mapped) places.push_back(place.index);
    if (status.ok()) {
      status = ForEachRun(places, [](const CudaAddressRange& range, Bytes offset, Bytes size) {
        return range.Open(offset, size);
      });
    }
    if (!status.ok()) {
      (void)UnmapRuns(places);
      return status;
    }
    MutexLock lock(&mu_);
    for (Place& place : mapped) {
      const RegionIndex index = place.index;
      slabs_[place.slab] = place.import;
      places_.insert_or_assign(index, std::move(place));
    }
    return absl::OkStatus();
  }

  absl::Status Unmap(absl::Span<const RegionIndex> places) override {
    absl::Status status = contexts_[0]->MakeCurrent();
    if (!status.ok()) return status;
    status = UnmapRuns({places.begin(), places.end()});
    std::vector<Place> gone;  // released after the lock
    MutexLock lock(&mu_);
    for (const RegionIndex index : places) {
      const auto found = places_.find(index);
      if (found == places_.end()) continue;
      gone.push_back(std::move(found->second));
      places_.erase(found);
      Place& place = gone.back();
      if (place.import.use_count() > 1) {  // it is mapped elsewhere
        place.import = nullptr;
        continue;
      }
      slabs_.erase(place.slab);
      if (status.ok() && place.memory_id != 0) {
        imports_->Keep(place.slab, place.memory_id, std::move(place.import));
      }
    }
    return status;
  }

 private:
  struct Place {
    RegionIndex index;
    SlabId slab;
    uint64_t memory_id = 0;
    ImportPtr import;
  };

  // What is mapped of the slab, here or by this call so far, or was kept, or is imported now.
  absl::StatusOr<ImportPtr> Find(const Piece& piece, absl::Span<const Place> mapped) {
    for (const Place& place : mapped) {
      if (place.slab == piece.slab) return place.import;
    }
    {
      MutexLock lock(&mu_);
      const auto found = slabs_.find(piece.slab);
      if (found != slabs_.end()) {
        if (ImportPtr import = found->second.lock()) return import;
      }
    }
    if (piece.memory_id != 0) {
      if (ImportPtr kept = imports_->Take(piece.slab, piece.memory_id)) return kept;
    }
    return ImportAll(piece);
  }

  absl::Status MapOne(Piece& piece, std::vector<Place>& mapped) {
    Place place{piece.place, piece.slab, piece.memory_id, nullptr};
    absl::StatusOr<ImportPtr> import = Find(piece, mapped);
    absl::Status status = import.status();
    if (status.ok()) place.import = *std::move(import);
    const Bytes offset = slab_bytes_ * piece.place.value();
    size_t rank = 0;
    while (status.ok() && rank < ranges_.size()) {
      status = ranges_[rank].Map(offset, slab_bytes_, place.import->handles[rank]);
      if (status.ok()) ++rank;
    }
    if (!status.ok()) {
      while (rank > 0) (void)ranges_[--rank].Unmap(offset, slab_bytes_);
      return absl::Status(status.code(),
                          absl::StrCat("slab ", piece.slab.ToString(), ": ", status.message()));
    }
    piece.descriptors = place.import->descriptors;
    mapped.push_back(std::move(place));
    return absl::OkStatus();
  }

  absl::StatusOr<ImportPtr> ImportAll(const Piece& piece) const {
    if (piece.descriptors == nullptr || piece.descriptors->size() != contexts_.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat(piece.descriptors == nullptr ? 0 : piece.descriptors->size(),
                       " descriptors, expected ", contexts_.size()));
    }
    auto import = std::make_shared<Import>();
    for (size_t rank = 0; rank < contexts_.size(); ++rank) {
      auto handle = CudaAllocation::Import(contexts_[rank]->driver(), contexts_[rank]->ordinal(),
                                           (*piece.descriptors)[rank]);
      if (!handle.ok()) return handle.status();
      import->handles.push_back(*std::move(handle));
    }
    import->descriptors = piece.descriptors;
    return import;
  }

  absl::Status UnmapRuns(std::vector<RegionIndex> places) const {
    return ForEachRun(std::move(places), [](const CudaAddressRange& range, Bytes offset,
                                            Bytes size) { return range.Unmap(offset, size); });
  }

  // Calls `act` on every GPU for each run of places that lie side by side; the first error, after
  // all.
  template <typename Act>
  absl::Status ForEachRun(std::vector<RegionIndex> places, const Act& act) const {
    std::sort(places.begin(), places.end());
    absl::Status status;
    for (size_t begin = 0; begin < places.size();) {
      size_t end = begin + 1;
      while (end < places.size() && places[end].value() == places[end - 1].value() + 1) ++end;
      for (const CudaAddressRange& range : ranges_) {
        status.Update(act(range, slab_bytes_ * places[begin].value(),
                          slab_bytes_ * static_cast<int64_t>(end - begin)));
      }
      begin = end;
    }
    return status;
  }

  const std::vector<CudaContextPtr> contexts_;
  const std::shared_ptr<Imports> imports_;
  const std::vector<CudaAddressRange> ranges_;
  const Bytes slab_bytes_;

  Mutex mu_;
  std::map<RegionIndex, Place> places_ ABSL_GUARDED_BY(mu_);
  // What places_ hold.
  absl::flat_hash_map<SlabId, std::weak_ptr<const Import>> slabs_ ABSL_GUARDED_BY(mu_);
};

absl::StatusOr<std::unique_ptr<CudaMemory>> CudaMemory::Open(const Options& options) {
  if (options.gpus.empty()) return absl::InvalidArgumentError("GPU memory without a GPU");
  std::vector<CudaContextPtr> contexts;
  std::vector<Bytes> taken;
  for (const int gpu : options.gpus) {
    const absl::StatusOr<Bytes> before = GpuMemoryUse(*options.driver, gpu);
    absl::StatusOr<CudaContextPtr> context = CudaContext::Open(*options.driver, gpu);
    if (!context.ok()) return context.status();
    contexts.push_back(*std::move(context));
    const absl::StatusOr<Bytes> after = GpuMemoryUse(*options.driver, gpu);
    taken.push_back(before.ok() && after.ok() ? std::max(*after - *before, Bytes(0)) : Bytes(0));
  }
  return std::unique_ptr<CudaMemory>(
      new CudaMemory(options, std::move(contexts), std::move(taken), std::make_shared<Imports>()));
}

CudaMemory::~CudaMemory() = default;

absl::StatusOr<std::shared_ptr<RegionMemory>> CudaMemory::Reserve(uint32_t places,
                                                                  Bytes slab_bytes) {
  std::vector<CudaAddressRange> ranges;
  for (const CudaContextPtr& context : contexts_) {
    absl::StatusOr<CudaAddressRange> range =
        CudaAddressRange::Reserve(context->driver(), context->ordinal(), slab_bytes * places);
    if (!range.ok()) return range.status();
    ranges.push_back(*std::move(range));
  }
  return std::make_shared<Region>(contexts_, imports_, std::move(ranges), slab_bytes);
}

absl::StatusOr<std::unique_ptr<ImageRestorer>> CudaMemory::OpenImage(UniqueFd image,
                                                                     const ImageShape& shape) {
  return CudaImageRestorer::Open(contexts_, std::move(image), shape, options_.restore_window);
}

absl::StatusOr<std::unique_ptr<HostPin>> CudaMemory::Pin(absl::Span<std::byte> memory) {
  const CudaContextPtr& context = contexts_.front();
  if (absl::Status status = context->MakeCurrent(); !status.ok()) return status;
  // Portable: pinned for every GPU.
  const absl::Status status =
      context->driver().Check(context->driver().cuMemHostRegister(memory.data(), memory.size(),
                                                                  CU_MEMHOSTREGISTER_PORTABLE),
                              "registering host memory with the GPU");
  if (!status.ok()) return status;
  return std::make_unique<RegisteredMemory>(context, memory.data());
}

absl::StatusOr<Bytes> CudaMemory::DeviceMemoryUse(int rank) const {
  return GpuMemoryUse(*options_.driver, options_.gpus[static_cast<size_t>(rank)]);
}

bool CudaMemory::Keeps(uint64_t memory_id) const { return imports_->Has(memory_id); }

void CudaMemory::DropKept() { imports_->Drop(); }

}  // namespace palimpsest
