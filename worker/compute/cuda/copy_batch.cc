#include "worker/compute/cuda/copy_batch.h"

#include <algorithm>

#include "common/log.h"

namespace palimpsest {

CopyBatch::CopyBatch(const CudaDriver& driver, const ModelMemory& memory, CopyDirection direction,
                     std::atomic<bool>* refused)
    : driver_(driver),
      kv_(reinterpret_cast<CUdeviceptr>(memory.kv)),
      slab_bytes_(static_cast<size_t>(memory.slab_bytes.count())),
      direction_(direction),
      refused_(refused) {}

void CopyBatch::Add(CUdeviceptr device, std::byte* host, size_t size) {
  while (size > 0) {
    size_t piece = size;
    if (slab_bytes_ > 0) {
      piece = std::min(piece, slab_bytes_ - static_cast<size_t>((device - kv_) % slab_bytes_));
    }
    const auto host_address = reinterpret_cast<CUdeviceptr>(host);
    const bool out = direction_ == CopyDirection::kToHost;
    to_.push_back(out ? host_address : device);
    from_.push_back(out ? device : host_address);
    sizes_.push_back(piece);
    device += piece;
    host += piece;
    size -= piece;
  }
}

absl::Status CopyBatch::Submit(CUstream stream) {
  absl::Status status;
  for (size_t first = 0; first < sizes_.size() && status.ok(); first += kMostCopies) {
    status = SubmitPart(first, std::min(kMostCopies, sizes_.size() - first), stream);
  }
  to_.clear();
  from_.clear();
  sizes_.clear();
  return status;
}

absl::Status CopyBatch::SubmitPart(size_t first, size_t count, CUstream stream) {
  if (count == 1 || driver_.cuMemcpyBatchAsync == nullptr) {
    return CopySingly(first, count, stream);
  }
  CUmemcpyAttributes attributes{};
  attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
  // Steps run beside them.
  attributes.flags = CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE;
  size_t first_with_attributes = 0;
  const absl::Status refusal =
      driver_.Check(driver_.cuMemcpyBatchAsync(&to_[first], &from_[first], &sizes_[first], count,
                                               &attributes, &first_with_attributes, 1, stream),
                    "cuMemcpyBatchAsync of KV blocks");
  if (refusal.ok()) return refusal;
  // It may be about these copies alone, as where host memory is not pinned. Another error than of
  // the call itself comes back here.
  if (absl::Status status = CopySingly(first, count, stream); !status.ok()) return status;
  if (!refused_->exchange(true)) {
    Log(LogLevel::kWarning, "the driver refuses a batch of copies: such KV blocks go one by one",
        {{"status", refusal}});
  }
  return absl::OkStatus();
}

absl::Status CopyBatch::CopySingly(size_t first, size_t count, CUstream stream) const {
  for (size_t i = first; i < first + count; ++i) {
    const CUresult result =
        direction_ == CopyDirection::kToHost
            ? driver_.cuMemcpyDtoHAsync(reinterpret_cast<void*>(to_[i]), from_[i], sizes_[i],
                                        stream)
            : driver_.cuMemcpyHtoDAsync(to_[i], reinterpret_cast<const void*>(from_[i]), sizes_[i],
                                        stream);
    const absl::Status status = driver_.Check(result, "copying KV blocks");
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace palimpsest
