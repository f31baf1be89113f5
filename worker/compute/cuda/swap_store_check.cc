#include "worker/compute/cuda/swap_store_check.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/block_checksum.h"
#include "common/fd.h"
#include "common/mapping.h"
#include "common/memory_file.h"
#include "common/stored_block.h"
#include "worker/blocks/chunk_memory.h"
#include "worker/compute/cuda/checked_region.h"
#include "worker/compute/cuda/cuda_swap_copier.h"
#include "worker/memory/cuda/cuda_memory.h"

namespace palimpsest::cuda {
namespace {

using Direction = SwapTransfer::Direction;

constexpr Bytes kBlock = MiB(2);
constexpr int kLayers = 32;
constexpr Bytes kChunk = MiB(64);  // tiers.dram.chunk_bytes
constexpr int kSlabs = 64;
constexpr int kRounds = 5;
constexpr double kLeastShare = 0.9;

// As the broker's arena makes it.
UniqueFd NewChunk() {
  UniqueFd file(::memfd_create("chunk", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file.valid() || ::ftruncate(file.get(), kChunk.count()) != 0) {
    Die(absl::ErrnoToStatus(errno, "making a chunk of the arena"));
  }
  const Mapping mapping = ValueOrDie(Mapping::Map(file.get(), kChunk, MapAccess::kReadWrite));
  OkOrDie(AllocatePages(mapping.data(), kChunk));
  OkOrDie(SealMemory(file.get(), kSlabSeals));
  return file;
}

class StoreCheck {
 public:
  StoreCheck(CheckReport& report, const CudaContextPtr& context, int device)
      : report_(report), region_(context, device, kSlabs, kBlock) {
    backend_ = ValueOrDie(CudaMemory::Open({.driver = &context->driver(), .gpus = {device}}));
    copier_ = ValueOrDie(CudaSwapCopier::Create({{context, region_.memory()}},
                                                {.layers = kLayers, .block_store = true}));
    const auto chunks = static_cast<size_t>(kBlock * count_ / kChunk) + 1;
    for (size_t i = 0; i < chunks; ++i) files_.push_back(NewChunk());
  }

  void Run() {
    MapChunks(nullptr);
    const double unpinned = Rate(Direction::kIn, Blocks(false), false);
    std::vector<absl::Duration> times = MapChunks(backend_.get());
    report_.Inform("store.map_chunk", absl::ToDoubleMilliseconds(Median(std::move(times))), "ms",
                   "64 MiB, mapped and pinned");
    CheckBytes();
    const double link_in = LinkRate(region_, true, kBlock * count_);
    const double link_out = LinkRate(region_, false, kBlock * count_);
    for (const bool scattered : {false, true}) {
      const std::vector<uint32_t> blocks = Blocks(scattered);
      const std::string how = scattered ? ".scattered" : ".neighbours";
      Measure("store.out" + how, Rate(Direction::kOut, blocks, false), link_out);
      Measure("store.in" + how, Rate(Direction::kIn, blocks, false), link_in);
      // With steps that follow behind its layers.
      const double awaited = Rate(Direction::kIn, blocks, true);
      report_.Inform(absl::StrCat("store.in_layers", how, ".share"), awaited / link_in,
                     "of the link");
    }
    report_.Inform("store.in.unpinned.share", unpinned / link_in, "of the link");
    CheckDamage();
  }

 private:
  std::vector<uint32_t> Blocks(bool scattered) const {
    std::vector<uint32_t> blocks = Numbers(1, static_cast<size_t>(count_));
    std::mt19937 random(2);
    if (scattered) std::shuffle(blocks.begin(), blocks.end(), random);
    return blocks;
  }

  // How long each took.
  std::vector<absl::Duration> MapChunks(MemoryBackend* backend) {
    chunks_.clear();
    std::vector<absl::Duration> times;
    for (const UniqueFd& file : files_) {
      times.push_back(Timed([&] {
        chunks_.push_back(std::make_unique<ChunkMemory>(
            ValueOrDie(ChunkMemory::Map(file.get(), kChunk, backend))));
      }));
    }
    return times;
  }

  // Those of blocks[i] and place i.
  std::vector<SwapMove> Moves(const std::vector<uint32_t>& blocks) const {
    const int64_t in_chunk = kChunk / kBlock;
    std::vector<SwapMove> moves;
    for (size_t i = 0; i < blocks.size(); ++i) {
      const auto place = static_cast<int64_t>(i);
      std::byte* const chunk = chunks_[static_cast<size_t>(place / in_chunk)]->data();
      moves.push_back({.block = BlockId(blocks[i]),
                       .memory = chunk + (kBlock * (place % in_chunk)).count(),
                       .key = {11, i},
                       .checksum = checksums_.empty() ? 0 : checksums_[i]});
    }
    return moves;
  }

  SwapEnded Finish(Direction direction, std::vector<SwapMove> moves, bool awaited) {
    copier_->Start({.id = SwapId(++transfers_),
                    .direction = direction,
                    .awaited = awaited,
                    .store = true,
                    .moves = std::move(moves)});
    copier_->AwaitAll();
    return std::move(copier_->TakeEnded().front());
  }

  // GB/s. What is in the store stays what it was, and so does what was known of it.
  double Rate(Direction direction, const std::vector<uint32_t>& blocks, bool awaited) {
    checksums_ = Finish(Direction::kOut, Moves(blocks), false).checksums;
    const std::vector<SwapMove> moves = Moves(blocks);
    std::vector<absl::Duration> times;
    for (int i = 0; i < kRounds; ++i) {
      times.push_back(Timed([&] { OkOrDie(Finish(direction, moves, awaited).status); }));
    }
    return GigabytesPerSecond(kBlock * count_, Median(std::move(times)));
  }

  void Measure(const std::string& what, double rate, double link) {
    report_.Inform(
        what, rate, "GB/s",
        absl::StrCat((kBlock * count_).ToString(), ", ", count_, " blocks, with their checksums"));
    report_.Measure(what + ".share", rate / link, "of the link", CheckReport::Limit::kAtLeast,
                    kLeastShare);
  }

  void CheckBytes() {
    constexpr uint32_t kSome = 24;
    for (uint32_t block = 1; block <= kSome; ++block) region_.Write(block, Pattern(kBlock, block));
    std::vector<uint32_t> blocks = Blocks(true);
    const std::vector<SwapMove> moves = Moves(blocks);
    const SwapEnded out = Finish(Direction::kOut, moves, false);
    bool same = out.status.ok();
    bool checked = out.checksums.size() == moves.size();
    for (size_t i = 0; i < moves.size() && checked; ++i) {
      const absl::Span<const std::byte> stored(moves[i].memory,
                                               static_cast<size_t>(kBlock.count()));
      checked = out.checksums[i] == BlockChecksum(moves[i].key, stored);
      if (blocks[i] > kSome) continue;
      const std::vector<std::byte> expected = Pattern(kBlock, blocks[i]);
      same = same && std::equal(expected.begin(), expected.end(), stored.begin());
    }
    report_.Verify("store.checksums", checked, "of all blocks, as the broker computes them");
    checksums_ = out.checksums;
    for (const bool awaited : {false, true}) {
      // To where another block was.
      std::rotate(blocks.begin(), blocks.begin() + 1, blocks.end());
      const std::vector<SwapMove> back = Moves(blocks);
      same = same && Finish(Direction::kIn, back, awaited).status.ok();
      for (size_t i = 0; i < back.size() && same; i += 40) {
        const std::vector<std::byte> found = region_.Read(blocks[i]);
        same = std::equal(found.begin(), found.end(), back[i].memory);
      }
    }
    report_.Verify("store.bytes", same);
  }

  void CheckDamage() {
    const std::vector<uint32_t> blocks = Blocks(true);
    checksums_ = Finish(Direction::kOut, Moves(blocks), false).checksums;
    const std::vector<SwapMove> moves = Moves(blocks);
    constexpr int kDamaged = 700;
    moves[kDamaged].memory[kBlock.count() - 1] ^= std::byte(64);
    bool found = true;
    for (const bool awaited : {false, true}) {
      const SwapEnded in = Finish(Direction::kIn, moves, awaited);
      found = found && absl::IsDataLoss(in.status) && in.intact == kDamaged;
    }
    report_.Verify("store.damage_found", found, "one bit of one block in host memory");
  }

  CheckReport& report_;
  Region region_;
  const int64_t count_ = region_.blocks() - 2;
  std::unique_ptr<CudaMemory> backend_;
  std::vector<UniqueFd> files_;
  std::vector<std::unique_ptr<ChunkMemory>> chunks_;
  std::unique_ptr<CudaSwapCopier> copier_;
  std::vector<uint64_t> checksums_;
  uint64_t transfers_ = 0;
};

}  // namespace

void CheckSwapStore(CheckReport& report, const CudaContextPtr& context, int device) {
  static_assert(StoredPartBytes(kBlock) == kBlock);
  StoreCheck(report, context, device).Run();
}

}  // namespace palimpsest::cuda
