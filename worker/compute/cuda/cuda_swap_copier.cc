#include "worker/compute/cuda/cuda_swap_copier.h"

#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/block_checksum.h"
#include "common/stored_block.h"
#include "worker/compute/cuda/copy_batch.h"

namespace palimpsest {
namespace {

// Smaller copies do not fill the link: each costs about 3 us beside its bytes (measured on an
// H200).
constexpr Bytes kCopyBytes = MiB(1);
// Blocks that nobody follows are copied, and hashed, so many bytes at a time: about 1 ms.
constexpr Bytes kGroupBytes = MiB(64);

Bytes Offset(const ModelMemory& memory, uint32_t index) { return memory.kv_block_bytes * index; }

CUdeviceptr DeviceAt(const ModelMemory& memory, BlockId block) {
  return reinterpret_cast<CUdeviceptr>(memory.kv + Offset(memory, block.value()).count());
}

template <typename Made, typename Create>
absl::Status Make(const CudaContextPtr& context, Create create, Made& made) {
  auto created = create(context);
  if (!created.ok()) return created.status();
  made = *std::move(created);
  return absl::OkStatus();
}

}  // namespace

void CudaSwapCopier::FreePinned::operator()(std::byte* memory) const {
  (void)context->MakeCurrent();
  context->driver().cuMemFreeHost(memory);
}

absl::StatusOr<std::unique_ptr<CudaSwapCopier>> CudaSwapCopier::Create(std::vector<Rank> ranks,
                                                                       const Options& options) {
  std::unique_ptr<CudaSwapCopier> copier(new CudaSwapCopier(options));
  copier->gpus_.reserve(ranks.size());
  for (Rank& rank : ranks) {
    if (absl::Status status = copier->Open(std::move(rank), options); !status.ok()) return status;
  }
  copier->StartThreads();
  return copier;
}

CudaSwapCopier::~CudaSwapCopier() { StopThreads(); }

absl::Status CudaSwapCopier::Open(Rank rank, const Options& options) {
  Gpu& gpu = gpus_.emplace_back();
  gpu.rank = std::move(rank);
  gpu.index = gpus_.size() - 1;
  const CudaContextPtr& context = gpu.rank.context;
  if (absl::Status status = context->MakeCurrent(); !status.ok()) return status;
  const Bytes bytes = gpu.rank.memory.kv_block_bytes * options.slots;
  if (bytes > Bytes(0)) {
    void* arena = nullptr;
    const absl::Status status = context->driver().Check(
        context->driver().cuMemHostAlloc(&arena, static_cast<size_t>(bytes.count()),
                                         CU_MEMHOSTALLOC_PORTABLE),
        "allocating " + bytes.ToString() + " of pinned memory for engine.swap_space");
    if (!status.ok()) return status;
    gpu.arena = {static_cast<std::byte*>(arena), FreePinned{context}};
  }
  absl::Status made = Make(context, CudaStream::Create, gpu.out);
  for (CudaStream& stream : gpu.in) made.Update(Make(context, CudaStream::Create, stream));
  for (CudaEvent* event : {&gpu.left, &gpu.beside, &gpu.arrived}) {
    made.Update(Make(context, CudaEvent::Create, *event));
  }
  gpu.layers.resize(static_cast<size_t>(layers_));
  for (CudaEvent& event : gpu.layers) made.Update(Make(context, CudaEvent::Create, event));
  for (Checker* checker : {&gpu.out_check, &gpu.in_check}) {
    made.Update(Make(context, CudaStream::Create, checker->stream));
    made.Update(Make(context, CudaEvent::Create, checker->copied));
    made.Update(Make(context, CudaEvent::Create, checker->hashed));
    if (!options.block_store || !made.ok()) continue;
    const ModelMemory& memory = gpu.rank.memory;
    auto hasher = BlockHasher::Create(context, memory.kv, memory.kv_block_bytes);
    if (!hasher.ok()) return hasher.status();
    checker->hasher = *std::move(hasher);
  }
  return made;
}

std::byte* CudaSwapCopier::HostOf(const Gpu& gpu, const SwapMove& move) const {
  const Bytes block = block_bytes();
  if (move.memory == nullptr) return gpu.arena.get() + (block * move.slot.value()).count();
  return move.memory + (StoredPartBytes(block) * static_cast<int64_t>(gpu.index)).count();
}

Bytes CudaSwapCopier::HostStride(const SwapTransfer& transfer) const {
  const Bytes block = block_bytes();
  return transfer.store ? StoredPartBytes(block) * static_cast<int64_t>(gpus_.size()) : block;
}

std::vector<CudaSwapCopier::Run> CudaSwapCopier::RunsOf(const Gpu& gpu,
                                                        const SwapTransfer& transfer,
                                                        Moves moves) const {
  const Bytes stride = HostStride(transfer);
  std::vector<Run> runs;
  for (const SwapMove& move : moves) {
    std::byte* const host = HostOf(gpu, move);
    if (!runs.empty()) {
      Run& last = runs.back();
      if (last.block.value() + last.blocks == move.block.value() &&
          last.host + (stride * static_cast<int64_t>(last.blocks)).count() == host) {
        ++last.blocks;
        continue;
      }
    }
    runs.push_back({move.block, host, 1});
  }
  return runs;
}

// To a block store.

uint64_t CudaSwapCopier::ChecksumOf(const BlockKey& key, size_t index,
                                    Checker Gpu::*checker) const {
  std::vector<uint64_t> hashes;
  for (const Gpu& gpu : gpus_) {
    const absl::Span<const uint64_t> part = (gpu.*checker).hasher->hashes(index);
    hashes.insert(hashes.end(), part.begin(), part.end());
  }
  const Bytes length = StoredPartBytes(block_bytes()) * static_cast<int64_t>(gpus_.size());
  return BlockChecksum(key, static_cast<size_t>(length.count()),
                       XXH3_64bits(hashes.data(), hashes.size() * sizeof(uint64_t)));
}

absl::Status CudaSwapCopier::QueueHashes(const Checker& checker, Moves moves, size_t first,
                                         CUstream after) const {
  std::vector<BlockId> blocks;
  blocks.reserve(moves.size());
  for (const SwapMove& move : moves) blocks.push_back(move.block);
  absl::Status status = checker.copied.Record(after);
  status.Update(checker.copied.MakeWait(checker.stream.get()));
  if (status.ok()) status = checker.hasher->Queue(blocks, first, checker.stream.get());
  return status;
}

absl::Status CudaSwapCopier::QueueOut(const Gpu& gpu, const SwapTransfer& transfer) const {
  const ModelMemory& memory = gpu.rank.memory;
  CUstream stream = gpu.out.get();
  absl::Status status;
  if (transfer.store) {
    status = gpu.out_check.hasher->Reserve(transfer.moves.size());
    if (status.ok()) status = QueueHashes(gpu.out_check, transfer.moves, 0, stream);
    if (status.ok()) status = gpu.out_check.hashed.Record(gpu.out_check.stream.get());
  }
  if (!status.ok()) return status;
  CopyBatch batch(gpu.rank.context->driver(), memory, CopyDirection::kToHost, &refused_);
  const bool whole = HostStride(transfer) == memory.kv_block_bytes;
  for (const Run& run : RunsOf(gpu, transfer, transfer.moves)) {
    const auto stride = static_cast<size_t>(HostStride(transfer).count());
    const auto size = static_cast<size_t>(memory.kv_block_bytes.count());
    if (whole) {
      batch.Add(DeviceAt(memory, run.block), run.host, size * run.blocks);
      continue;
    }
    for (size_t i = 0; i < run.blocks; ++i) {
      batch.Add(DeviceAt(memory, run.block) + size * i, run.host + stride * i, size);
    }
  }
  status = batch.Submit(stream);
  if (status.ok() && transfer.store) status = gpu.out_check.hashed.MakeWait(stream);
  if (status.ok()) status = gpu.left.Record(stream);
  return status;
}

absl::Status CudaSwapCopier::CopyOut(const SwapTransfer& transfer,
                                     std::vector<uint64_t>& checksums) {
  absl::Status status;
  for (const Gpu& gpu : gpus_) {
    if (status.ok()) status = gpu.rank.context->MakeCurrent();
    if (status.ok()) status = QueueOut(gpu, transfer);
  }
  // Whatever was queued must have ended, too, when this fails.
  for (const Gpu& gpu : gpus_) {
    status.Update(gpu.rank.context->MakeCurrent());
    if (status.ok()) status = gpu.left.Synchronize();
    if (status.ok()) continue;
    status.Update(gpu.out.Synchronize());
    status.Update(gpu.out_check.stream.Synchronize());
  }
  if (!status.ok() || !transfer.store) return status;
  const Bytes padding = StoredPartBytes(block_bytes()) - block_bytes();
  for (size_t i = 0; i < transfer.moves.size(); ++i) {
    const SwapMove& move = transfer.moves[i];
    for (const Gpu& gpu : gpus_) {
      std::memset(HostOf(gpu, move) + block_bytes().count(), 0,
                  static_cast<size_t>(padding.count()));
    }
    checksums.push_back(ChecksumOf(move.key, i, &Gpu::out_check));
  }
  return absl::OkStatus();
}

// Into the KV region.

absl::Status CudaSwapCopier::CopyIn(const SwapTransfer& transfer, int32_t& intact) {
  absl::Status status;
  if (transfer.store) {
    for (const Gpu& gpu : gpus_) {
      status.Update(gpu.rank.context->MakeCurrent());
      if (status.ok()) status = gpu.in_check.hasher->Reserve(transfer.moves.size());
    }
  }
  if (status.ok()) status = transfer.awaited ? CopyInStripes(transfer) : CopyInGroups(transfer);
  status = AwaitIn(std::move(status));
  return status.ok() && transfer.store ? Verify(transfer, intact) : status;
}

absl::Status CudaSwapCopier::JoinIn(const Gpu& gpu) const {
  absl::Status status = gpu.beside.Record(gpu.in[1].get());
  status.Update(gpu.beside.MakeWait(gpu.in[0].get()));
  return status;
}

int CudaSwapCopier::StripeLayers(size_t blocks, size_t runs) const {
  const Bytes layer = block_bytes() / layers_;
  const Bytes copy = layer * static_cast<int64_t>(blocks / std::max<size_t>(runs, 1));
  return std::clamp(static_cast<int>(CeilDiv(kCopyBytes, std::max(copy, Bytes(1)))), 1, layers_);
}

absl::Status CudaSwapCopier::QueueStripe(const Gpu& gpu, int first, int last,
                                         const SwapTransfer& transfer,
                                         absl::Span<const Run> runs) const {
  const ModelMemory& memory = gpu.rank.memory;
  const CudaDriver& driver = gpu.rank.context->driver();
  const Bytes layer = memory.kv_block_bytes / layers_;
  const Bytes begin = layer * first;
  const Bytes end = last == layers_ ? memory.kv_block_bytes : layer * last;
  CUDA_MEMCPY2D copy{};
  copy.srcMemoryType = CU_MEMORYTYPE_HOST;
  copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.srcPitch = static_cast<size_t>(HostStride(transfer).count());
  copy.dstPitch = static_cast<size_t>(memory.kv_block_bytes.count());
  copy.WidthInBytes = static_cast<size_t>((end - begin).count());
  const CopyBatch none(driver, memory, CopyDirection::kToDevice, &refused_);
  std::array<CopyBatch, 2> batches = {none, none};
  size_t next = 0;
  for (const Run& run : runs) {
    const size_t which = next++ % gpu.in.size();
    const CUdeviceptr to = DeviceAt(memory, run.block) + static_cast<CUdeviceptr>(begin.count());
    std::byte* const from = run.host + begin.count();
    if (run.blocks == 1) {
      batches[which].Add(to, from, copy.WidthInBytes);
      continue;
    }
    copy.dstDevice = to;
    copy.srcHost = from;
    copy.Height = run.blocks;
    const absl::Status status = driver.Check(driver.cuMemcpy2DAsync(&copy, gpu.in[which].get()),
                                             "copying KV blocks from host memory");
    if (!status.ok()) return status;
  }
  absl::Status status;
  for (size_t i = 0; i < batches.size() && status.ok(); ++i) {
    status = batches[i].Submit(gpu.in[i].get());
  }
  if (status.ok()) status = JoinIn(gpu);
  for (int l = first; l < last; ++l) {
    status.Update(gpu.layers[static_cast<size_t>(l)].Record(gpu.in[0].get()));
  }
  return status;
}

absl::Status CudaSwapCopier::CopyInStripes(const SwapTransfer& transfer) {
  const auto count = static_cast<int64_t>(transfer.moves.size());
  std::vector<std::vector<Run>> runs;  // by GPU
  for (const Gpu& gpu : gpus_) runs.push_back(RunsOf(gpu, transfer, transfer.moves));
  const int stripe = StripeLayers(transfer.moves.size(), runs.front().size());
  absl::Status status;
  for (int first = 0; first < layers_ && status.ok(); first += stripe) {
    const int last = std::min(first + stripe, layers_);
    AwaitTurn(block_bytes() * (last - first) / layers_ * count);
    for (const Gpu& gpu : gpus_) {
      if (status.ok()) status = gpu.rank.context->MakeCurrent();
      if (status.ok()) status = QueueStripe(gpu, first, last, transfer, runs[gpu.index]);
    }
    // Steps must not have all of it before it is checked.
    if (status.ok()) Pass(transfer.store ? std::min(last, layers_ - 1) : last);
  }
  if (!transfer.store) return status;
  for (const Gpu& gpu : gpus_) {
    if (status.ok()) status = gpu.rank.context->MakeCurrent();
    if (status.ok()) status = QueueHashes(gpu.in_check, transfer.moves, 0, gpu.in[0].get());
  }
  return status;
}

absl::Status CudaSwapCopier::QueueGroup(const Gpu& gpu, const SwapTransfer& transfer, size_t first,
                                        size_t count) const {
  const ModelMemory& memory = gpu.rank.memory;
  const Moves moves = Moves(transfer.moves).subspan(first, count);
  const auto size = static_cast<size_t>(memory.kv_block_bytes.count());
  const auto stride = static_cast<size_t>(HostStride(transfer).count());
  const CopyBatch none(gpu.rank.context->driver(), memory, CopyDirection::kToDevice, &refused_);
  std::array<CopyBatch, 2> batches = {none, none};
  size_t next = 0;
  for (const Run& run : RunsOf(gpu, transfer, moves)) {
    const size_t at_once = size == stride ? run.blocks : 1;
    for (size_t i = 0; i < run.blocks; i += at_once) {
      batches[next++ % batches.size()].Add(DeviceAt(memory, run.block) + size * i,
                                           run.host + stride * i, size * at_once);
    }
  }
  absl::Status status;
  for (size_t i = 0; i < batches.size() && status.ok(); ++i) {
    status = batches[i].Submit(gpu.in[i].get());
  }
  if (status.ok()) status = JoinIn(gpu);
  if (!status.ok() || !transfer.store) return status;
  return QueueHashes(gpu.in_check, moves, first, gpu.in[0].get());
}

absl::Status CudaSwapCopier::CopyInGroups(const SwapTransfer& transfer) {
  const size_t blocks = transfer.moves.size();
  const auto group = static_cast<size_t>(std::max<int64_t>(kGroupBytes / block_bytes(), 1));
  absl::Status status;
  for (size_t first = 0; first < blocks && status.ok(); first += group) {
    const size_t count = std::min(group, blocks - first);
    AwaitTurn(block_bytes() * static_cast<int64_t>(count));
    for (const Gpu& gpu : gpus_) {
      if (status.ok()) status = gpu.rank.context->MakeCurrent();
      if (status.ok()) status = QueueGroup(gpu, transfer, first, count);
    }
  }
  return status;
}

absl::Status CudaSwapCopier::AwaitIn(absl::Status status) const {
  for (const Gpu& gpu : gpus_) {
    status.Update(gpu.rank.context->MakeCurrent());
    const Checker& checker = gpu.in_check;
    if (status.ok()) status = checker.hashed.Record(checker.stream.get());
    if (status.ok()) status = checker.hashed.MakeWait(gpu.in[0].get());
    if (status.ok()) status = gpu.arrived.Record(gpu.in[0].get());
  }
  // Whatever was queued must have ended, too, when this fails.
  for (const Gpu& gpu : gpus_) {
    status.Update(gpu.rank.context->MakeCurrent());
    if (status.ok()) status = gpu.arrived.Synchronize();
    if (status.ok()) continue;
    for (const CudaStream& stream : gpu.in) status.Update(stream.Synchronize());
    status.Update(gpu.in_check.stream.Synchronize());
  }
  return status;
}

absl::Status CudaSwapCopier::Verify(const SwapTransfer& transfer, int32_t& intact) const {
  for (const SwapMove& move : transfer.moves) {
    if (ChecksumOf(move.key, static_cast<size_t>(intact), &Gpu::in_check) != move.checksum) {
      return absl::DataLossError(
          absl::StrCat("block ", intact, " of ", transfer.moves.size(),
                       " came from the block store with another checksum than it went with"));
    }
    ++intact;
  }
  return absl::OkStatus();
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
