#include "worker/memory/host_memory.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/mapping.h"
#include "common/memory_file.h"
#include "worker/memory/host_image_restorer.h"

namespace palimpsest {
namespace {

class HostRegion : public RegionMemory {
 public:
  HostRegion(AddressRange range, Bytes slab_bytes)
      : range_(std::move(range)), slab_bytes_(slab_bytes) {}

  std::byte* base(int) const override { return range_.base(); }

  absl::Status Map(absl::Span<Piece> pieces) override {
    for (size_t i = 0; i < pieces.size(); ++i) {
      const absl::Status status = MapOne(pieces[i]);
      if (status.ok()) continue;
      for (const Piece& mapped : pieces.subspan(0, i)) {
        (void)range_.Unmap(Offset(mapped.place), slab_bytes_);
      }
      return absl::Status(status.code(),
                          absl::StrCat("slab ", pieces[i].slab.ToString(), ": ", status.message()));
    }
    return absl::OkStatus();
  }

  absl::Status Unmap(absl::Span<const RegionIndex> places) override {
    for (const RegionIndex place : places) {
      absl::Status status = range_.Unmap(Offset(place), slab_bytes_);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

 private:
  Bytes Offset(RegionIndex place) const { return slab_bytes_ * place.value(); }

  absl::Status MapOne(const Piece& piece) {
    if (piece.descriptors == nullptr || piece.descriptors->size() != 1) {
      return absl::InvalidArgumentError("expected one descriptor");
    }
    const int fd = piece.descriptors->front().get();
    if (absl::Status status = CheckSlabFile(fd, slab_bytes_); !status.ok()) return status;
    return range_.Map(Offset(piece.place), slab_bytes_, fd, MapAccess::kReadWrite,
                      MapPopulate::kYes);
  }

  AddressRange range_;
  const Bytes slab_bytes_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<RegionMemory>> HostMemory::Reserve(uint32_t places,
                                                                  Bytes slab_bytes) {
  absl::StatusOr<AddressRange> range = AddressRange::Reserve(slab_bytes * places, kHugePage);
  if (!range.ok()) return range.status();
  return std::make_shared<HostRegion>(*std::move(range), slab_bytes);
}

absl::StatusOr<std::unique_ptr<ImageRestorer>> HostMemory::OpenImage(UniqueFd image,
                                                                     const ImageShape& shape) {
  return HostImageRestorer::Open(std::move(image), shape, restore_threads_);
}

}  // namespace palimpsest
