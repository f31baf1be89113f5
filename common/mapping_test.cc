#include "common/mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

#include "common/fd.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

constexpr Bytes kPage(4096);

UniqueFd Memory(Bytes size, char content) {
  UniqueFd fd(::memfd_create("test", MFD_CLOEXEC));
  EXPECT_EQ(::ftruncate(fd.get(), size.count()), 0);
  EXPECT_EQ(::pwrite(fd.get(), &content, 1, 0), 1);
  return fd;
}

char First(const std::byte* data) { return static_cast<char>(*data); }

TEST(Mapping, OutlivesItsDescriptorAndMoves) {
  UniqueFd fd = Memory(kPage * 2, 'a');
  absl::StatusOr<Mapping> mapping = Mapping::Map(fd.get(), kPage * 2, MapAccess::kReadWrite);
  ASSERT_TRUE(mapping.ok()) << mapping.status();
  fd.Reset();
  const Mapping moved = *std::move(mapping);
  EXPECT_EQ(moved.size(), 8192);
  EXPECT_EQ(First(moved.data()), 'a');
  EXPECT_FALSE(mapping->valid());  // NOLINT(bugprone-use-after-move): a promise of the class
}

TEST(Mapping, CollapsingSealedMemoryKeepsItsBytes) {
  const Bytes size = kHugePage * 2 + kPage;
  const UniqueFd fd(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(fd.get(), size.count()), 0);
  for (Bytes at; at < size; at += kPage) {
    const int64_t number = at.count();
    ASSERT_EQ(::pwrite(fd.get(), &number, sizeof number, number), sizeof number);
  }
  ASSERT_EQ(::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW), 0);
  const absl::StatusOr<Mapping> mapping = Mapping::Map(fd.get(), size, MapAccess::kRead);
  ASSERT_TRUE(mapping.ok()) << mapping.status();
  EXPECT_EQ(reinterpret_cast<uintptr_t>(mapping->data()) % kHugePage.count(), 0);
  CollapsePages(mapping->data(), size);
  for (Bytes at; at < size; at += kPage) {
    int64_t number = 0;
    std::memcpy(&number, mapping->data() + at.count(), sizeof number);
    ASSERT_EQ(number, at.count());
  }
}

// Places of which nothing is there, something is, and all is.
TEST(Mapping, AllocatedPagesAreAllThereAndKeepWhatWasWritten) {
  const Bytes size = kHugePage * 3 + kPage;
  const UniqueFd fd(::memfd_create("test", MFD_CLOEXEC));
  ASSERT_EQ(::ftruncate(fd.get(), size.count()), 0);
  const auto written = [](Bytes at) {
    return at == kHugePage + kPage || (at >= kHugePage * 2 && at < kHugePage * 3);
  };
  for (Bytes at; at < size; at += kPage) {
    const int64_t number = at.count();
    if (!written(at)) continue;
    ASSERT_EQ(::pwrite(fd.get(), &number, sizeof number, number), sizeof number);
  }
  const absl::StatusOr<Mapping> mapping = Mapping::Map(fd.get(), size, MapAccess::kReadWrite);
  ASSERT_TRUE(mapping.ok()) << mapping.status();
  ASSERT_TRUE(AllocatePages(mapping->data(), size).ok());
  struct stat file;
  ASSERT_EQ(::fstat(fd.get(), &file), 0);
  EXPECT_EQ(file.st_blocks * 512, size.count());
  for (Bytes at; at < size; at += kPage) {
    int64_t number = 0;
    std::memcpy(&number, mapping->data() + at.count(), sizeof number);
    ASSERT_EQ(number, written(at) ? at.count() : 0) << at;
  }
}

TEST(Mapping, AllocatingPagesPastTheEndOfTheFileIsAnError) {
  const UniqueFd fd(::memfd_create("test", MFD_CLOEXEC));
  ASSERT_EQ(::ftruncate(fd.get(), kHugePage.count()), 0);
  const absl::StatusOr<Mapping> mapping =
      Mapping::Map(fd.get(), kHugePage * 2, MapAccess::kReadWrite);
  ASSERT_TRUE(mapping.ok()) << mapping.status();
  EXPECT_TRUE(absl::IsResourceExhausted(AllocatePages(mapping->data(), kHugePage * 2)));
}

TEST(Mapping, ReadOnlyOfReadOnlyDescriptorWorksAndWritableDoesNot) {
  const UniqueFd writable = Memory(kPage, 'a');
  const std::string path = "/proc/self/fd/" + std::to_string(writable.get());
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  EXPECT_TRUE(Mapping::Map(fd.get(), kPage, MapAccess::kRead, MapPopulate::kYes).ok());
  EXPECT_TRUE(
      absl::IsPermissionDenied(Mapping::Map(fd.get(), kPage, MapAccess::kReadWrite).status()));
}

TEST(Mapping, PopulatingPastTheEndOfTheFileIsAnError) {
  const UniqueFd fd = Memory(kPage, 'a');
  EXPECT_TRUE(absl::IsResourceExhausted(
      Mapping::Map(fd.get(), kPage * 2, MapAccess::kReadWrite, MapPopulate::kYes).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(Mapping::Map(fd.get(), Bytes(0), MapAccess::kRead).status()));
}

TEST(AddressRange, IsAligned) {
  for (const Bytes alignment : {kPage, MiB(2), GiB(1)}) {
    absl::StatusOr<AddressRange> range = AddressRange::Reserve(MiB(4), alignment);
    ASSERT_TRUE(range.ok()) << range.status();
    EXPECT_EQ(reinterpret_cast<uintptr_t>(range->base()) % alignment.count(), 0);
    EXPECT_EQ(range->size(), MiB(4));
  }
  EXPECT_FALSE(AddressRange::Reserve(MiB(1), Bytes(3)).ok());
  EXPECT_FALSE(AddressRange::Reserve(Bytes(17), kPage).ok());
  EXPECT_FALSE(AddressRange::Reserve(Bytes(0), kPage).ok());
}

TEST(AddressRange, PiecesComeAndGo) {
  AddressRange range = *AddressRange::Reserve(kPage * 4, kPage);
  const UniqueFd a = Memory(kPage, 'a'), b = Memory(kPage, 'b');
  ASSERT_TRUE(range.Map(kPage, kPage, a.get(), MapAccess::kReadWrite, MapPopulate::kYes).ok());
  ASSERT_TRUE(range.Map(kPage * 2, kPage, b.get(), MapAccess::kReadWrite, MapPopulate::kYes).ok());
  EXPECT_EQ(First(range.base() + 4096), 'a');
  EXPECT_EQ(First(range.base() + 8192), 'b');
  ASSERT_TRUE(range.Unmap(kPage, kPage).ok());
  EXPECT_EQ(First(range.base() + 8192), 'b');
  // In place of what was there.
  ASSERT_TRUE(range.Map(kPage * 2, kPage, a.get(), MapAccess::kReadWrite, MapPopulate::kNo).ok());
  EXPECT_EQ(First(range.base() + 8192), 'a');
}

TEST(AddressRangeDeathTest, UnmappedPiecesFault) {
  AddressRange range = *AddressRange::Reserve(kPage * 2, kPage);
  const UniqueFd a = Memory(kPage, 'a');
  ASSERT_TRUE(range.Map(Bytes(0), kPage, a.get(), MapAccess::kReadWrite, MapPopulate::kYes).ok());
  EXPECT_DEATH(std::memset(range.base() + 4096, 1, 1), "");
  ASSERT_TRUE(range.Unmap(Bytes(0), kPage).ok());
  EXPECT_DEATH(std::memset(range.base(), 1, 1), "");
}

TEST(AddressRangeDeathTest, ProtectedPiecesRefuseWrites) {
  AddressRange range = *AddressRange::Reserve(kPage, kPage);
  const UniqueFd a = Memory(kPage, 'a');
  ASSERT_TRUE(range.Map(Bytes(0), kPage, a.get(), MapAccess::kReadWrite, MapPopulate::kYes).ok());
  ASSERT_TRUE(range.Protect(Bytes(0), kPage, MapAccess::kRead).ok());
  EXPECT_EQ(First(range.base()), 'a');
  EXPECT_DEATH(std::memset(range.base(), 1, 1), "");
  ASSERT_TRUE(range.Protect(Bytes(0), kPage, MapAccess::kReadWrite).ok());
  std::memset(range.base(), 'z', 1);
  EXPECT_EQ(First(range.base()), 'z');
}

TEST(AddressRange, PiecesOutsideOrOddAreRefused) {
  AddressRange range = *AddressRange::Reserve(kPage * 2, kPage);
  const UniqueFd a = Memory(kPage, 'a');
  const auto map = [&](Bytes offset, Bytes length) {
    return range.Map(offset, length, a.get(), MapAccess::kReadWrite, MapPopulate::kNo);
  };
  EXPECT_TRUE(absl::IsInvalidArgument(map(kPage * 2, kPage)));
  EXPECT_TRUE(absl::IsInvalidArgument(map(kPage, kPage * 2)));
  EXPECT_TRUE(absl::IsInvalidArgument(map(Bytes(-4096), kPage)));
  EXPECT_TRUE(absl::IsInvalidArgument(map(Bytes(8), kPage)));
  EXPECT_TRUE(absl::IsInvalidArgument(map(kPage, Bytes(INT64_MAX / 4096 * 4096))));
  EXPECT_TRUE(absl::IsInvalidArgument(range.Unmap(kPage, Bytes(0))));
}

TEST(AddressRange, FailedMapLeavesThePieceUnmapped) {
  AddressRange range = *AddressRange::Reserve(kPage * 2, kPage);
  const UniqueFd a = Memory(kPage, 'a'), empty = Memory(Bytes(0), 'x');
  ASSERT_EQ(::ftruncate(empty.get(), 0), 0);
  ASSERT_TRUE(range.Map(Bytes(0), kPage, a.get(), MapAccess::kReadWrite, MapPopulate::kYes).ok());
  EXPECT_TRUE(absl::IsResourceExhausted(
      range.Map(Bytes(0), kPage, empty.get(), MapAccess::kReadWrite, MapPopulate::kYes)));
  EXPECT_EQ(::msync(range.base(), 4096, MS_ASYNC), 0);  // the addresses are still ours
  EXPECT_DEATH(std::memset(range.base(), 1, 1), "");
}

}  // namespace
}  // namespace palimpsest
