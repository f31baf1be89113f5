#include "worker/compute/cuda/cuda_swap_copier.h"

#include <algorithm>
#include <utility>

namespace palimpsest {
namespace {

// Smaller copies do not fill the link: each costs about 3 us beside its bytes (measured on an
// H200).
constexpr Bytes kCopyBytes = MiB(1);

Bytes Offset(const ModelMemory& memory, uint32_t index) { return memory.kv_block_bytes * index; }

CUdeviceptr DeviceAt(const ModelMemory& memory, BlockId block) {
  return reinterpret_cast<CUdeviceptr>(memory.kv + Offset(memory, block.value()).count());
}

}  // namespace

void CudaSwapCopier::FreePinned::operator()(std::byte* memory) const {
  (void)context->MakeCurrent();
  context->driver().cuMemFreeHost(memory);
}

absl::StatusOr<std::unique_ptr<CudaSwapCopier>> CudaSwapCopier::Create(std::vector<Rank> ranks,
                                                                       int32_t slots, int layers,
                                                                       LinkPacer* pacer) {
  std::unique_ptr<CudaSwapCopier> copier(new CudaSwapCopier(layers, pacer));
  copier->gpus_.reserve(ranks.size());
  for (Rank& rank : ranks) {
    if (absl::Status status = copier->Open(std::move(rank), slots); !status.ok()) return status;
  }
  copier->StartThreads();
  return copier;
}

CudaSwapCopier::~CudaSwapCopier() { StopThreads(); }

absl::Status CudaSwapCopier::Open(Rank rank, int32_t slots) {
  Gpu& gpu = gpus_.emplace_back();
  gpu.rank = std::move(rank);
  const CudaContextPtr& context = gpu.rank.context;
  if (absl::Status status = context->MakeCurrent(); !status.ok()) return status;
  const Bytes bytes = gpu.rank.memory.kv_block_bytes * slots;
  void* arena = nullptr;
  const absl::Status status = context->driver().Check(
      context->driver().cuMemHostAlloc(&arena, static_cast<size_t>(bytes.count()),
                                       CU_MEMHOSTALLOC_PORTABLE),
      "allocating " + bytes.ToString() + " of pinned memory for engine.swap_space");
  if (!status.ok()) return status;
  gpu.arena = {static_cast<std::byte*>(arena), FreePinned{context}};
  const auto make = [&context](auto& made, auto create) {
    auto created = create(context);
    if (!created.ok()) return created.status();
    made = *std::move(created);
    return absl::OkStatus();
  };
  absl::Status made = make(gpu.out, CudaStream::Create);
  for (CudaStream& stream : gpu.in) made.Update(make(stream, CudaStream::Create));
  made.Update(make(gpu.beside, CudaEvent::Create));
  made.Update(make(gpu.left, CudaEvent::Create));
  gpu.layers.resize(static_cast<size_t>(layers_));
  for (CudaEvent& event : gpu.layers) made.Update(make(event, CudaEvent::Create));
  return made;
}

std::vector<CudaSwapCopier::Run> CudaSwapCopier::RunsOf(const SwapTransfer& transfer) {
  std::vector<Run> runs;
  for (const SwapMove& move : transfer.moves) {
    if (!runs.empty()) {
      Run& last = runs.back();
      if (last.block.value() + last.blocks == move.block.value() &&
          last.slot.value() + last.blocks == move.slot.value()) {
        ++last.blocks;
        continue;
      }
    }
    runs.push_back({move.block, move.slot, 1});
  }
  return runs;
}

absl::Status CudaSwapCopier::QueueOut(const Gpu& gpu, absl::Span<const Run> runs) const {
  const ModelMemory& memory = gpu.rank.memory;
  const CudaDriver& driver = gpu.rank.context->driver();
  for (const Run& run : runs) {
    const Bytes size = memory.kv_block_bytes * static_cast<int64_t>(run.blocks);
    const absl::Status status = driver.Check(
        driver.cuMemcpyDtoHAsync(gpu.arena.get() + Offset(memory, run.slot.value()).count(),
                                 DeviceAt(memory, run.block), static_cast<size_t>(size.count()),
                                 gpu.out.get()),
        "cuMemcpyDtoHAsync of KV blocks");
    if (!status.ok()) return status;
  }
  return gpu.left.Record(gpu.out.get());
}

absl::Status CudaSwapCopier::CopyOut(const SwapTransfer& transfer, std::vector<uint64_t>&) {
  const std::vector<Run> runs = RunsOf(transfer);
  absl::Status status;
  for (const Gpu& gpu : gpus_) {
    if (status.ok()) status = gpu.rank.context->MakeCurrent();
    if (status.ok()) status = QueueOut(gpu, runs);
  }
  // Whatever was queued must have ended, too, when this fails.
  for (const Gpu& gpu : gpus_) {
    status.Update(gpu.rank.context->MakeCurrent());
    status.Update(status.ok() ? gpu.left.Synchronize() : gpu.out.Synchronize());
  }
  return status;
}

int CudaSwapCopier::StripeLayers(size_t blocks, size_t runs) const {
  const Bytes layer = gpus_.front().rank.memory.kv_block_bytes / layers_;
  const Bytes copy = layer * static_cast<int64_t>(blocks / std::max<size_t>(runs, 1));
  return std::clamp(static_cast<int>(CeilDiv(kCopyBytes, std::max(copy, Bytes(1)))), 1, layers_);
}

absl::Status CudaSwapCopier::QueueStripe(const Gpu& gpu, int first, int last,
                                         absl::Span<const Run> runs) const {
  const ModelMemory& memory = gpu.rank.memory;
  const CudaDriver& driver = gpu.rank.context->driver();
  const Bytes layer = memory.kv_block_bytes / layers_;
  const Bytes begin = layer * first;
  const Bytes end = last == layers_ ? memory.kv_block_bytes : layer * last;
  CUDA_MEMCPY2D copy{};
  copy.srcMemoryType = CU_MEMORYTYPE_HOST;
  copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.srcPitch = copy.dstPitch = static_cast<size_t>(memory.kv_block_bytes.count());
  copy.WidthInBytes = static_cast<size_t>((end - begin).count());
  size_t next = 0;
  for (const Run& run : runs) {
    CUstream stream = gpu.in[next++ % gpu.in.size()].get();
    copy.srcHost = gpu.arena.get() + (Offset(memory, run.slot.value()) + begin).count();
    copy.dstDevice = DeviceAt(memory, run.block) + static_cast<CUdeviceptr>(begin.count());
    copy.Height = run.blocks;
    const absl::Status status = driver.Check(
        run.blocks > 1
            ? driver.cuMemcpy2DAsync(&copy, stream)
            : driver.cuMemcpyHtoDAsync(copy.dstDevice, copy.srcHost, copy.WidthInBytes, stream),
        "copying KV blocks from host memory");
    if (!status.ok()) return status;
  }
  absl::Status status = gpu.beside.Record(gpu.in[1].get());
  status.Update(gpu.beside.MakeWait(gpu.in[0].get()));
  for (int l = first; l < last; ++l) {
    status.Update(gpu.layers[static_cast<size_t>(l)].Record(gpu.in[0].get()));
  }
  return status;
}

absl::Status CudaSwapCopier::CopyIn(const SwapTransfer& transfer, int32_t&) {
  const std::vector<Run> runs = RunsOf(transfer);
  const int stripe = StripeLayers(transfer.moves.size(), runs.size());
  absl::Status status;
  for (int first = 0; first < layers_ && status.ok(); first += stripe) {
    const int last = std::min(first + stripe, layers_);
    const Bytes block = gpus_.front().rank.memory.kv_block_bytes;
    AwaitTurn(block * (last - first) / layers_ * static_cast<int64_t>(transfer.moves.size()));
    for (const Gpu& gpu : gpus_) {
      if (status.ok()) status = gpu.rank.context->MakeCurrent();
      if (status.ok()) status = QueueStripe(gpu, first, last, runs);
    }
    if (status.ok()) Pass(last);
  }
  for (const Gpu& gpu : gpus_) {
    status.Update(gpu.rank.context->MakeCurrent());
    if (status.ok()) status = gpu.layers.back().Synchronize();
    if (status.ok()) continue;
    for (const CudaStream& stream : gpu.in) status.Update(stream.Synchronize());
  }
  return status;
}

absl::Status CudaSwapCopier::LayerEvents(int layer, absl::Span<void*> events) {
  if (absl::Status status = AwaitLayer(layer); !status.ok()) return status;
  if (!Awaited()) return absl::OkStatus();
  for (size_t i = 0; i < gpus_.size(); ++i) {
    const Gpu& gpu = gpus_[i];
    if (events[i] != nullptr) {
      const CudaDriver& driver = gpu.rank.context->driver();
      const absl::Status status =
          driver.Check(driver.cuEventSynchronize(static_cast<CUevent>(events[i])),
                       "waiting for parameters beside KV");
      if (!status.ok()) return status;
    }
    events[i] = gpu.layers[static_cast<size_t>(layer)].get();
  }
  return absl::OkStatus();
}

}  // namespace palimpsest
