#include "common/cuda/repeated_mapping.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"

namespace palimpsest {

absl::StatusOr<RepeatedMapping> RepeatedMapping::Map(const CudaDriver& driver, int ordinal,
                                                     const Memory& memory, Bytes size) {
  if (memory.piece <= Bytes(0) || memory.size < memory.piece ||
      memory.piece * (memory.size / memory.piece) != memory.size) {
    return absl::InvalidArgumentError(absl::StrCat("memory to repeat must be whole pieces of ",
                                                   memory.piece.ToString(), ", got ",
                                                   memory.size.ToString()));
  }
  const int64_t pieces = memory.size / memory.piece;
  const int64_t places = CeilDiv(size, memory.piece);
  std::vector<CudaAllocation> handles;
  for (int64_t i = 0; i < std::min(pieces, places); ++i) {
    auto handle = CudaAllocation::At(
        driver, memory.address + static_cast<CUdeviceptr>((memory.piece * i).count()));
    if (!handle.ok()) return handle.status();
    handles.push_back(*std::move(handle));
  }
  auto range = CudaAddressRange::Reserve(driver, ordinal, memory.piece * places);
  if (!range.ok()) return range.status();
  RepeatedMapping repeated;
  repeated.range_ = *std::move(range);
  for (int64_t i = 0; i < places; ++i) {
    absl::Status status = repeated.range_.Map(repeated.mapped_, memory.piece,
                                              handles[static_cast<size_t>(i % pieces)]);
    if (!status.ok()) return status;
    repeated.mapped_ += memory.piece;
  }
  absl::Status status = repeated.range_.Open(Bytes(0), repeated.mapped_);
  if (!status.ok()) return status;
  return repeated;
}

RepeatedMapping::~RepeatedMapping() {
  if (mapped_ > Bytes(0)) (void)range_.Unmap(Bytes(0), mapped_);
}

}  // namespace palimpsest
