#include "worker/memory/cuda/cuda_memory.h"

#include <algorithm>
#include <map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "common/cuda/virtual_memory.h"
#include "common/mutex.h"
#include "worker/memory/cuda/cuda_image_restorer.h"

namespace palimpsest {
namespace {

// Memory of one slab as this process knows it.
struct Import {
  CudaAllocation handle;
  std::shared_ptr<const UniqueFd> descriptor;
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

  // Nothing if it is not there.
  Import Take(SlabId slab, uint64_t memory_id) {
    MutexLock lock(&mu_);
    const auto found = kept_.find(memory_id);
    if (found == kept_.end()) return {};
    Import import = std::move(found->second);
    kept_.erase(found);
    ids_.erase(slab);
    return import;
  }

  void Keep(SlabId slab, uint64_t memory_id, Import import) {
    Import old;  // released after the lock
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
    absl::flat_hash_map<uint64_t, Import> dropped;
    MutexLock lock(&mu_);
    dropped.swap(kept_);
    ids_.clear();
  }

 private:
  mutable Mutex mu_;
  absl::flat_hash_map<uint64_t, Import> kept_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<SlabId, uint64_t> ids_ ABSL_GUARDED_BY(mu_);
};

class CudaMemory::Region : public RegionMemory {
 public:
  Region(CudaContextPtr context, std::shared_ptr<Imports> imports, CudaAddressRange range,
         Bytes slab_bytes)
      : context_(std::move(context)),
        imports_(std::move(imports)),
        range_(std::move(range)),
        slab_bytes_(slab_bytes) {}

  std::byte* base() const override { return reinterpret_cast<std::byte*>(range_.base()); }

  absl::Status Map(absl::Span<Piece> pieces) override {
    absl::Status status = context_->MakeCurrent();
    std::vector<Place> mapped;
    for (Piece& piece : pieces) {
      if (status.ok()) status = MapOne(piece, mapped);
      if (!status.ok()) break;
    }
    std::vector<RegionIndex> places;
    for (const Place& place : mapped) places.push_back(place.index);
    if (status.ok()) {
      status = ForEachRun(places,
                          [this](Bytes offset, Bytes size) { return range_.Open(offset, size); });
    }
    if (!status.ok()) {
      (void)ForEachRun(places,
                       [this](Bytes offset, Bytes size) { return range_.Unmap(offset, size); });
      return status;
    }
    MutexLock lock(&mu_);
    for (Place& place : mapped) {
      const RegionIndex index = place.index;
      places_.insert_or_assign(index, std::move(place));
    }
    return absl::OkStatus();
  }

  absl::Status Unmap(absl::Span<const RegionIndex> places) override {
    absl::Status status = context_->MakeCurrent();
    if (!status.ok()) return status;
    status = ForEachRun({places.begin(), places.end()},
                        [this](Bytes offset, Bytes size) { return range_.Unmap(offset, size); });
    std::vector<Place> gone;  // released after the lock
    MutexLock lock(&mu_);
    for (const RegionIndex index : places) {
      const auto found = places_.find(index);
      if (found == places_.end()) continue;
      gone.push_back(std::move(found->second));
      places_.erase(found);
      Place& place = gone.back();
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
    Import import;
  };

  absl::Status MapOne(Piece& piece, std::vector<Place>& mapped) {
    Place place{piece.place, piece.slab, piece.memory_id, {}};
    if (piece.memory_id != 0) place.import = imports_->Take(piece.slab, piece.memory_id);
    const auto refusal = [&piece](const absl::Status& status) {
      return absl::Status(status.code(),
                          absl::StrCat("slab ", piece.slab.ToString(), ": ", status.message()));
    };
    if (!place.import.handle.valid()) {
      if (piece.descriptor == nullptr || !piece.descriptor->valid()) {
        return refusal(absl::InvalidArgumentError("no descriptor"));
      }
      auto handle =
          CudaAllocation::Import(context_->driver(), context_->ordinal(), *piece.descriptor);
      if (!handle.ok()) return refusal(handle.status());
      place.import = {*std::move(handle), piece.descriptor};
    }
    const absl::Status status =
        range_.Map(slab_bytes_ * piece.place.value(), slab_bytes_, place.import.handle);
    if (!status.ok()) return refusal(status);
    piece.descriptor = place.import.descriptor;
    mapped.push_back(std::move(place));
    return absl::OkStatus();
  }

  // Calls `act` for each run of places that lie side by side; the first error, after all.
  template <typename Act>
  absl::Status ForEachRun(std::vector<RegionIndex> places, const Act& act) const {
    std::sort(places.begin(), places.end());
    absl::Status status;
    for (size_t begin = 0; begin < places.size();) {
      size_t end = begin + 1;
      while (end < places.size() && places[end].value() == places[end - 1].value() + 1) ++end;
      status.Update(act(slab_bytes_ * places[begin].value(),
                        slab_bytes_ * static_cast<int64_t>(end - begin)));
      begin = end;
    }
    return status;
  }

  const CudaContextPtr context_;
  const std::shared_ptr<Imports> imports_;
  const CudaAddressRange range_;
  const Bytes slab_bytes_;

  Mutex mu_;
  std::map<RegionIndex, Place> places_ ABSL_GUARDED_BY(mu_);
};

absl::StatusOr<std::unique_ptr<CudaMemory>> CudaMemory::Open(const Options& options) {
  absl::StatusOr<CudaContextPtr> context = CudaContext::Open(*options.driver, options.gpu);
  if (!context.ok()) return context.status();
  return std::unique_ptr<CudaMemory>(
      new CudaMemory(options, *std::move(context), std::make_shared<Imports>()));
}

CudaMemory::~CudaMemory() = default;

absl::StatusOr<std::shared_ptr<RegionMemory>> CudaMemory::Reserve(uint32_t places,
                                                                  Bytes slab_bytes) {
  absl::StatusOr<CudaAddressRange> range =
      CudaAddressRange::Reserve(context_->driver(), options_.gpu, slab_bytes * places);
  if (!range.ok()) return range.status();
  return std::make_shared<Region>(context_, imports_, *std::move(range), slab_bytes);
}

absl::StatusOr<std::unique_ptr<ImageRestorer>> CudaMemory::OpenImage(UniqueFd image,
                                                                     const ImageShape& shape) {
  return CudaImageRestorer::Open(context_, std::move(image), shape, options_.restore_window);
}

bool CudaMemory::Keeps(uint64_t memory_id) const { return imports_->Has(memory_id); }

void CudaMemory::DropKept() { imports_->Drop(); }

}  // namespace palimpsest
