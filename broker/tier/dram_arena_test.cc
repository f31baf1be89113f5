#include "broker/tier/dram_arena.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "common/mapping.h"
#include "common/memory_file.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

constexpr ArenaChunkId kChunk(1);

std::unique_ptr<DramArena> Open(DramArena::Options options = {}) {
  options.max_chunks = 3;
  options.chunk_bytes = MiB(2);
  options.other_descriptors = 64;
  auto arena = DramArena::Open(options);
  EXPECT_EQ(arena.status(), absl::OkStatus());
  return *std::move(arena);
}

std::vector<std::byte> Content(size_t size) {
  std::vector<std::byte> bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i * 7 + 1);
  return bytes;
}

TEST(DramArena, WorkersAndTheBrokerSeeTheSameBytes) {
  const auto arena = Open();
  EXPECT_EQ(arena->Descriptor(kChunk), nullptr);
  ASSERT_EQ(arena->Create(kChunk), absl::OkStatus());
  EXPECT_TRUE(absl::IsAlreadyExists(arena->Create(kChunk)));
  EXPECT_EQ(arena->chunks(), 1);
  const auto descriptor = arena->Descriptor(kChunk);
  EXPECT_EQ(CheckSlabFile(descriptor->get(), MiB(2)), absl::OkStatus());
  const auto worker = *Mapping::Map(descriptor->get(), MiB(2), MapAccess::kReadWrite);

  const ArenaExtent extent = {kChunk, KiB(4), Bytes(10000)};
  const std::vector<std::byte> bytes = Content(10000);
  ASSERT_EQ(arena->Write(extent, bytes), absl::OkStatus());
  EXPECT_EQ(std::memcmp(worker.data() + 4096, bytes.data(), bytes.size()), 0);
  worker.data()[4096] = std::byte{99};
  std::vector<std::byte> back(10000);
  ASSERT_EQ(arena->Read(extent, absl::MakeSpan(back)), absl::OkStatus());
  EXPECT_EQ(back[0], std::byte{99});
  EXPECT_EQ(back[9999], bytes[9999]);
}

TEST(DramArena, ExtentsOutsideAreRefused) {
  const auto arena = Open();
  ASSERT_EQ(arena->Create(kChunk), absl::OkStatus());
  std::vector<std::byte> bytes(4096);
  for (const ArenaExtent& extent :
       {ArenaExtent{kChunk, MiB(2), KiB(4)}, ArenaExtent{kChunk, MiB(2) - Bytes(1), KiB(4)},
        ArenaExtent{kChunk, Bytes(-1), KiB(4)}, ArenaExtent{kChunk, Bytes(0), KiB(8)}}) {
    EXPECT_TRUE(absl::IsInvalidArgument(arena->Read(extent, absl::MakeSpan(bytes))));
    EXPECT_TRUE(absl::IsInvalidArgument(arena->Write(extent, bytes)));
  }
  const ArenaExtent other = {ArenaChunkId(2), Bytes(0), KiB(4)};
  EXPECT_TRUE(absl::IsFailedPrecondition(arena->Write(other, bytes)));
  EXPECT_TRUE(absl::IsInvalidArgument(arena->Create(ArenaChunkId(3))));
}

TEST(DramArena, RetiredChunkGivesItsMemoryUpAndStartsZeroed) {
  const auto arena = Open();
  const ArenaExtent extent = {kChunk, Bytes(0), Bytes(100)};
  ASSERT_EQ(arena->Create(kChunk), absl::OkStatus());
  ASSERT_EQ(arena->Write(extent, Content(100)), absl::OkStatus());
  const auto held = arena->Descriptor(kChunk);
  ASSERT_EQ(arena->Retire(kChunk), absl::OkStatus());
  EXPECT_TRUE(absl::IsFailedPrecondition(arena->Retire(kChunk)));
  EXPECT_EQ(arena->Descriptor(kChunk), nullptr);
  struct stat file;
  ASSERT_EQ(::fstat(held->get(), &file), 0);
  EXPECT_EQ(file.st_size, 0);
  EXPECT_EQ(file.st_blocks, 0);
  EXPECT_NE(::ftruncate(held->get(), 4096), 0) << "a worker could take memory back";
  ASSERT_EQ(arena->Create(kChunk), absl::OkStatus());
  std::vector<std::byte> back(100);
  ASSERT_EQ(arena->Read(extent, absl::MakeSpan(back)), absl::OkStatus());
  EXPECT_EQ(back, std::vector<std::byte>(100));
}

TEST(DramArena, WorkerThatTruncatesItsChunkDoesNotKillTheBroker) {
  const auto arena = Open();
  ASSERT_EQ(arena->Create(kChunk), absl::OkStatus());
  ASSERT_EQ(::ftruncate(arena->Descriptor(kChunk)->get(), 4096 + 50), 0);
  const ArenaExtent extent = {kChunk, KiB(4), Bytes(100)};
  std::vector<std::byte> bytes(100);
  EXPECT_TRUE(absl::IsDataLoss(arena->Read(extent, absl::MakeSpan(bytes))));
  EXPECT_TRUE(absl::IsDataLoss(arena->Write(extent, bytes)));
  EXPECT_EQ(arena->Retire(kChunk), absl::OkStatus());
}

// A chunk that was granted and gets no memory leaves no trace.
void ExpectRefusal(DramArena& arena, const std::string& message) {
  ArenaLedger ledger({.max_chunks = 3, .chunk_bytes = MiB(2)});
  const ArenaChunkId chunk = *ledger.Grant(TenantId(0));
  const absl::Status refused = arena.Create(chunk);
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), testing::HasSubstr(message));
  EXPECT_EQ(ledger.BeginRevoke(chunk), absl::OkStatus());
  EXPECT_EQ(ledger.Retired(chunk), absl::OkStatus());
  EXPECT_EQ(ledger.CheckConsistency(), absl::OkStatus());
  EXPECT_EQ(ledger.Count(ArenaChunkState::kFree), 3);
  EXPECT_EQ(arena.chunks(), 0);
  EXPECT_EQ(arena.Descriptor(chunk), nullptr);
}

TEST(DramArena, KernelWithoutMemoryIsAClearRefusal) {
  bool refuse = true;
  const auto arena = Open({.maker = [&](Bytes size) -> absl::StatusOr<UniqueFd> {
    if (refuse) return absl::ResourceExhaustedError("cannot create palimpsest-arena: ENOMEM");
    UniqueFd file(::memfd_create("test", 0));
    EXPECT_EQ(::ftruncate(file.get(), size.count()), 0);
    return file;
  }});
  ExpectRefusal(*arena, "ENOMEM");
  refuse = false;
  EXPECT_EQ(arena->Create(kChunk), absl::OkStatus());
}

TEST(DramArena, ControlGroupWithoutMemoryIsAClearRefusal) {
  std::string root = testing::TempDir() + "/arenaXXXXXX";
  ASSERT_NE(::mkdtemp(root.data()), nullptr);
  const auto write = [&](const std::string& path, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(root + path).parent_path());
    std::ofstream(root + path) << text;
  };
  write("/proc/meminfo", "MemTotal: 33554432 kB\nMemAvailable: 16777216 kB\n");
  write("/proc/self/cgroup", "0::/broker\n");
  write("/sys/fs/cgroup/broker/memory.max", "4194304\n");
  write("/sys/fs/cgroup/broker/memory.current", "3145728\n");
  const auto arena = Open({.system_root = root});
  ExpectRefusal(*arena, "broker/memory.max is 4 MiB and 3 MiB");
  std::filesystem::remove_all(root);
}

}  // namespace
}  // namespace palimpsest
