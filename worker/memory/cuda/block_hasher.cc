#include "worker/memory/cuda/block_hasher.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/slab_checksum.h"
#include "common/stored_block.h"
#include "worker/memory/cuda/hashed_blocks.h"
#include "worker/memory/cuda/slab_checksum_kernels.h"

namespace palimpsest {
namespace {

constexpr unsigned kLanes = 8;
constexpr unsigned kBlockThreads = 128;
// What the kernel reads at once.
constexpr int64_t kWordBytes = 16;

}  // namespace

BlockHasher::BlockHasher(CudaContextPtr context, const std::byte* kv, Bytes block_bytes)
    : context_(std::move(context)),
      kv_(kv),
      block_bytes_(block_bytes),
      chunks_(static_cast<unsigned>(StoredPartBytes(block_bytes) / Bytes(kChecksumChunk))) {}

absl::StatusOr<std::unique_ptr<BlockHasher>> BlockHasher::Create(CudaContextPtr context,
                                                                 const std::byte* kv,
                                                                 Bytes block_bytes) {
  if (block_bytes.count() < kWordBytes || block_bytes.count() % kWordBytes != 0) {
    return absl::InvalidArgumentError(absl::StrCat("KV blocks of ", block_bytes.count(),
                                                   " bytes on a GPU, expected a multiple of ",
                                                   kWordBytes));
  }
  std::unique_ptr<BlockHasher> hasher(new BlockHasher(std::move(context), kv, block_bytes));
  const CudaDriver& driver = hasher->context_->driver();
  absl::Status status =
      driver.Check(driver.cuModuleLoadData(&hasher->module_, slab_checksum_kernels),
                   "loading the kernels for checksums");
  if (!status.ok()) return status;
  status = driver.Check(
      driver.cuModuleGetFunction(&hasher->hash_blocks_, hasher->module_, "palimpsest_hash_blocks"),
      "finding the kernel for checksums of KV blocks");
  if (!status.ok()) return status;
  return hasher;
}

BlockHasher::~BlockHasher() {
  (void)context_->MakeCurrent();
  FreeHashes();
  if (module_ != nullptr) context_->driver().cuModuleUnload(module_);
}

void BlockHasher::FreeHashes() {
  if (hashes_ != nullptr) context_->driver().cuMemFreeHost(hashes_);
  hashes_ = nullptr;
  room_ = 0;
}

absl::Status BlockHasher::Reserve(size_t blocks) {
  if (blocks <= room_) return absl::OkStatus();
  FreeHashes();
  // Not again for each that has a few more.
  const size_t room = std::max<size_t>(64, blocks + blocks / 2);
  void* memory = nullptr;
  const CudaDriver& driver = context_->driver();
  const absl::Status status = driver.Check(
      driver.cuMemHostAlloc(&memory, room * chunks_ * sizeof(uint64_t), CU_MEMHOSTALLOC_PORTABLE),
      "allocating host memory for checksums of KV blocks");
  if (!status.ok()) return status;
  hashes_ = static_cast<uint64_t*>(memory);
  room_ = room;
  return absl::OkStatus();
}

absl::Status BlockHasher::Queue(absl::Span<const BlockId> blocks, size_t first,
                                CUstream stream) const {
  const CudaDriver& driver = context_->driver();
  auto kv = reinterpret_cast<CUdeviceptr>(kv_);
  auto block_bytes = static_cast<unsigned long long>(block_bytes_.count());
  auto chunk = static_cast<unsigned>(kChecksumChunk);
  unsigned chunks = chunks_;
  HashedBlocks hashed{};
  for (size_t done = 0; done < blocks.size(); done += hashed.count) {
    hashed.count =
        static_cast<unsigned>(std::min<size_t>(blocks.size() - done, HashedBlocks::kMost));
    for (unsigned i = 0; i < hashed.count; ++i) hashed.numbers[i] = blocks[done + i].value();
    uint64_t* hashes = hashes_ + (first + done) * chunks_;
    void* parameters[] = {&kv, &block_bytes, &chunk, &chunks, &hashed, &hashes};
    const unsigned groups = (hashed.count * chunks * kLanes + kBlockThreads - 1) / kBlockThreads;
    const absl::Status status =
        driver.Check(driver.cuLaunchKernel(hash_blocks_, groups, 1, 1, kBlockThreads, 1, 1, 0,
                                           stream, parameters, nullptr),
                     "hashing KV blocks");
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace palimpsest
