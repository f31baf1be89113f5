#include "common/memory_file.h"

#include <sys/mman.h>
#include <unistd.h>

#include "common/fd.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

constexpr size_t kSize = 1 << 16;

TEST(SealMemoryTest, IsRefusedWhileSomebodyCanWriteAndFinalAfterwards) {
  const UniqueFd memory(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(memory.get(), kSize), 0);
  void* const mapping = ::mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_SHARED, memory.get(), 0);
  ASSERT_NE(mapping, MAP_FAILED);
  const absl::Status refused = SealMemory(memory.get(), kImageSeals);
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_EQ(::fcntl(memory.get(), F_GET_SEALS), 0);
  ASSERT_EQ(::munmap(mapping, kSize), 0);
  EXPECT_TRUE(SealMemory(memory.get(), kImageSeals).ok());
  EXPECT_EQ(::fcntl(memory.get(), F_GET_SEALS), kImageSeals);
  EXPECT_TRUE(SealMemory(memory.get(), F_SEAL_SEAL).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(SealMemory(memory.get(), F_SEAL_SEAL)));
}

}  // namespace
}  // namespace palimpsest
