#include "worker/compute/cuda/cuda_block_copier.h"

#include <cstdlib>

#include "common/log.h"

namespace palimpsest {

absl::StatusOr<std::unique_ptr<CudaBlockCopier>> CudaBlockCopier::Create(std::vector<Rank> ranks) {
  std::vector<CudaStream> streams;
  for (const Rank& rank : ranks) {
    if (absl::Status status = rank.context->MakeCurrent(); !status.ok()) return status;
    absl::StatusOr<CudaStream> stream = CudaStream::Create(rank.context);
    if (!stream.ok()) return stream.status();
    streams.push_back(*std::move(stream));
  }
  return std::unique_ptr<CudaBlockCopier>(
      new CudaBlockCopier(std::move(ranks), std::move(streams)));
}

void CudaBlockCopier::Copy(absl::Span<const BlockMove> moves) {
  if (moves.empty()) return;
  const absl::Status status = Try(moves);
  if (status.ok()) return;
  Log(LogLevel::kError, "KV blocks could not be moved; ending the process", {{"status", status}});
  std::abort();
}

absl::Status CudaBlockCopier::Queue(const Rank& rank, absl::Span<const BlockMove> moves,
                                    CUstream stream) {
  if (absl::Status status = rank.context->MakeCurrent(); !status.ok()) return status;
  const CudaDriver& driver = rank.context->driver();
  const Bytes size = rank.memory.kv_block_bytes;
  const auto at = [&](BlockId block) {
    return reinterpret_cast<CUdeviceptr>(rank.memory.kv + (size * block.value()).count());
  };
  for (const BlockMove& move : moves) {
    const absl::Status status =
        driver.Check(driver.cuMemcpyDtoDAsync(at(move.to), at(move.from),
                                              static_cast<size_t>(size.count()), stream),
                     "cuMemcpyDtoDAsync of a KV block");
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status CudaBlockCopier::Try(absl::Span<const BlockMove> moves) const {
  absl::Status status;
  for (size_t i = 0; i < ranks_.size() && status.ok(); ++i) {
    status = Queue(ranks_[i], moves, streams_[i].get());
  }
  for (size_t i = 0; i < ranks_.size() && status.ok(); ++i) {
    status = ranks_[i].context->MakeCurrent();
    if (status.ok()) status = streams_[i].Synchronize();
  }
  return status;
}

}  // namespace palimpsest
