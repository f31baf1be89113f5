#include "worker/compute/cuda/cuda_block_copier.h"

#include <cstdlib>

#include "common/log.h"

namespace palimpsest {

absl::StatusOr<std::unique_ptr<CudaBlockCopier>> CudaBlockCopier::Create(
    CudaContextPtr context, const ModelMemory& memory) {
  if (absl::Status status = context->MakeCurrent(); !status.ok()) return status;
  absl::StatusOr<CudaStream> stream = CudaStream::Create(context);
  if (!stream.ok()) return stream.status();
  return std::unique_ptr<CudaBlockCopier>(
      new CudaBlockCopier(std::move(context), *std::move(stream), memory));
}

void CudaBlockCopier::Copy(absl::Span<const BlockMove> moves) {
  if (moves.empty()) return;
  const absl::Status status = Try(moves);
  if (status.ok()) return;
  Log(LogLevel::kError, "KV blocks could not be moved; ending the process", {{"status", status}});
  std::abort();
}

absl::Status CudaBlockCopier::Try(absl::Span<const BlockMove> moves) const {
  if (absl::Status status = context_->MakeCurrent(); !status.ok()) return status;
  const CudaDriver& driver = context_->driver();
  for (const BlockMove& move : moves) {
    const absl::Status status =
        driver.Check(driver.cuMemcpyDtoDAsync(At(move.to), At(move.from),
                                              static_cast<size_t>(memory_.kv_block_bytes.count()),
                                              stream_.get()),
                     "cuMemcpyDtoDAsync of a KV block");
    if (!status.ok()) return status;
  }
  return stream_.Synchronize();
}

}  // namespace palimpsest
