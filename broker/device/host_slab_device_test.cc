#include "broker/device/host_slab_device.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "common/descriptor_limit.h"
#include "common/mapping.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

using ::testing::HasSubstr;

constexpr Bytes kSlab = MiB(2);

std::unique_ptr<HostSlabDevice> Open(uint32_t slabs = 4) {
  absl::StatusOr<std::unique_ptr<HostSlabDevice>> device =
      HostSlabDevice::Open({.slabs = slabs, .other_descriptors = 16});
  EXPECT_TRUE(device.ok()) << device.status();
  return *std::move(device);
}

Mapping MapSlab(HostSlabDevice& device, SlabId slab) {
  absl::StatusOr<Mapping> mapping =
      Mapping::Map(device.Descriptors(slab)->front().get(), kSlab, MapAccess::kReadWrite);
  EXPECT_TRUE(mapping.ok()) << mapping.status();
  return *std::move(mapping);
}

bool AllZero(const Mapping& mapping) {
  return std::all_of(mapping.data(), mapping.data() + mapping.size(),
                     [](std::byte b) { return b == std::byte{0}; });
}

SlabDevice::Identity Fstat(int fd) {
  struct stat file = {};
  EXPECT_EQ(::fstat(fd, &file), 0);
  return {file.st_dev, file.st_ino};
}

TEST(HostSlabDevice, FreshSlabIsZeroedCommittedAndSealed) {
  auto device = Open();
  EXPECT_EQ(device->Descriptors(SlabId(1)), nullptr);
  EXPECT_EQ(device->IdentityOf(SlabId(1)), SlabDevice::Identity());
  ASSERT_TRUE(device->Create(SlabId(1)).ok());
  const int fd = device->Descriptors(SlabId(1))->front().get();
  struct stat file;
  ASSERT_EQ(::fstat(fd, &file), 0);
  EXPECT_EQ(file.st_size, kSlab.count());
  EXPECT_GE(file.st_blocks * 512, kSlab.count());  // faulted in
  EXPECT_EQ(::fcntl(fd, F_GET_SEALS), F_SEAL_GROW | F_SEAL_SEAL);
  EXPECT_NE(::ftruncate(fd, kSlab.count() * 2), 0);
  EXPECT_NE(::fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
  EXPECT_EQ(::fcntl(fd, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
  EXPECT_EQ(device->IdentityOf(SlabId(1)), Fstat(fd));
  EXPECT_TRUE(AllZero(MapSlab(*device, SlabId(1))));
}

TEST(HostSlabDevice, EveryKindOfPagesWorks) {
  for (const auto pages : {HostSlabDevice::Pages::kHugetlb, HostSlabDevice::Pages::kTransparent,
                           HostSlabDevice::Pages::kSmall}) {
    absl::StatusOr<std::unique_ptr<HostSlabDevice>> device =
        HostSlabDevice::Open({.slabs = 1, .slab_bytes = MiB(4), .pages = pages});
    ASSERT_TRUE(device.ok()) << device.status();
    ASSERT_TRUE((*device)->Create(SlabId(0)).ok());
    absl::StatusOr<Mapping> mapping =
        Mapping::Map((*device)->Descriptors(SlabId(0))->front().get(), MiB(4),
                     MapAccess::kReadWrite, MapPopulate::kYes);
    ASSERT_TRUE(mapping.ok()) << mapping.status();
    EXPECT_TRUE(AllZero(*mapping));
    std::memset(mapping->data(), 1, mapping->size());
    EXPECT_TRUE((*device)->Retire(SlabId(0)).ok());
    EXPECT_GE((*device)->created((*device)->best_pages()), 1);
  }
}

TEST(HostSlabDevice, RetireGivesOtherMemoryThatIsZero) {
  auto device = Open();
  ASSERT_TRUE(device->Create(SlabId(0)).ok());
  const auto old = device->Descriptors(SlabId(0));
  const SlabDevice::Identity old_identity = device->IdentityOf(SlabId(0));
  {
    const Mapping mapping = MapSlab(*device, SlabId(0));
    std::memset(mapping.data(), 0xab, mapping.size());
  }
  ASSERT_TRUE(device->Retire(SlabId(0)).ok());
  EXPECT_NE(device->IdentityOf(SlabId(0)), old_identity);
  EXPECT_NE(device->Descriptors(SlabId(0))->front().get(), old->front().get());
  EXPECT_TRUE(AllZero(MapSlab(*device, SlabId(0))));
  struct stat file;
  ASSERT_EQ(::fstat(old->front().get(), &file), 0);
  EXPECT_EQ(file.st_size, 0);
  EXPECT_EQ(file.st_blocks, 0);
  EXPECT_NE(::ftruncate(old->front().get(), kSlab.count()), 0);
}

TEST(HostSlabDevice, StaleAccessDiesBySigbusAndSeesNothing) {
  auto device = Open();
  ASSERT_TRUE(device->Create(SlabId(0)).ok());
  int ready[2], go[2];
  ASSERT_EQ(::pipe(ready), 0);
  ASSERT_EQ(::pipe(go), 0);
  const pid_t liar = ::fork();
  if (liar == 0) {
    ::signal(SIGBUS, SIG_DFL);  // a sanitizer may have installed its own
    const int fd = device->Descriptors(SlabId(0))->front().get();
    void* data = ::mmap(nullptr, kSlab.count(), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (data == MAP_FAILED) ::_exit(1);
    volatile char* memory = static_cast<volatile char*>(data);
    memory[kSlab.count() - 1] = 1;
    char byte = 0;
    if (::write(ready[1], &byte, 1) != 1 || ::read(go[0], &byte, 1) != 1) ::_exit(2);
    memory[kSlab.count() - 1] = 2;
    ::_exit(3);
  }
  char byte;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  ASSERT_TRUE(device->Retire(SlabId(0)).ok());
  ASSERT_EQ(::write(go[1], &byte, 1), 1);
  int status;
  ASSERT_EQ(::waitpid(liar, &status, 0), liar);
  ASSERT_TRUE(WIFSIGNALED(status)) << WEXITSTATUS(status);
  EXPECT_EQ(WTERMSIG(status), SIGBUS);
  EXPECT_TRUE(AllZero(MapSlab(*device, SlabId(0))));
}

TEST(HostSlabDevice, RetiringManySlabsOnThreadsKeepsThemApart) {
  constexpr uint32_t kSlabs = 16;
  auto device = Open(kSlabs);
  for (uint32_t i = 0; i < kSlabs; ++i) ASSERT_TRUE(device->Create(SlabId(i)).ok());
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (uint32_t i = t; i < kSlabs; i += 4) {
        for (int n = 0; n < 3; ++n) EXPECT_TRUE(device->Retire(SlabId(i)).ok());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<uint64_t> inodes;
  for (uint32_t i = 0; i < kSlabs; ++i) inodes.push_back(device->IdentityOf(SlabId(i)).inode);
  std::sort(inodes.begin(), inodes.end());
  EXPECT_EQ(std::unique(inodes.begin(), inodes.end()), inodes.end());
}

TEST(HostSlabDevice, ReturnedSlabIsAdoptedWithItsContent) {
  auto old_broker = Open();
  ASSERT_TRUE(old_broker->Create(SlabId(2)).ok());
  std::memset(MapSlab(*old_broker, SlabId(2)).data(), 7, 100);
  const SlabDevice::Identity identity = old_broker->IdentityOf(SlabId(2));
  absl::StatusOr<UniqueFd> kept = old_broker->Descriptors(SlabId(2))->front().Duplicate();
  ASSERT_TRUE(kept.ok());
  old_broker.reset();

  auto device = Open();
  ASSERT_TRUE(device->Adopt(SlabId(2), OneDescriptor(*std::move(kept)), identity).ok());
  EXPECT_EQ(device->IdentityOf(SlabId(2)), identity);
  EXPECT_EQ(MapSlab(*device, SlabId(2)).data()[99], std::byte{7});
  EXPECT_TRUE(absl::IsAlreadyExists(device->Create(SlabId(2))));
  EXPECT_TRUE(device->Retire(SlabId(2)).ok());
  EXPECT_TRUE(AllZero(MapSlab(*device, SlabId(2))));
}

UniqueFd Memfd(Bytes size, int seals) {
  UniqueFd fd(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_EQ(::ftruncate(fd.get(), size.count()), 0);
  EXPECT_EQ(::fcntl(fd.get(), F_ADD_SEALS, seals), 0);
  return fd;
}

TEST(HostSlabDevice, ReturnedDescriptorsThatAreNoSlabsAreRefused) {
  auto device = Open();
  const auto refusal = [&](UniqueFd fd) {
    const SlabDevice::Identity identity = Fstat(fd.get());
    const absl::Status status = device->Adopt(SlabId(0), OneDescriptor(std::move(fd)), identity);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_EQ(device->Descriptors(SlabId(0)), nullptr);
    return std::string(status.message());
  };
  constexpr int kSeals = F_SEAL_GROW | F_SEAL_SEAL;
  EXPECT_THAT(refusal(Memfd(kSlab, F_SEAL_GROW)), HasSubstr("seals"));
  EXPECT_THAT(refusal(Memfd(kSlab, kSeals | F_SEAL_SHRINK)), HasSubstr("seals"));
  EXPECT_THAT(refusal(Memfd(kSlab * 2, kSeals)), HasSubstr("bytes"));
  EXPECT_THAT(refusal(Memfd(Bytes(0), kSeals)), HasSubstr("bytes"));
  EXPECT_THAT(refusal(UniqueFd(::open("/dev/zero", O_RDWR | O_CLOEXEC))), HasSubstr("memfd"));
  EXPECT_THAT(refusal(UniqueFd(::open("/proc/self/exe", O_RDONLY | O_CLOEXEC))),
              HasSubstr("memfd"));
  const UniqueFd writable = Memfd(kSlab, kSeals);
  const std::string path = "/proc/self/fd/" + std::to_string(writable.get());
  EXPECT_THAT(refusal(UniqueFd(::open(path.c_str(), O_RDONLY | O_CLOEXEC))), HasSubstr("open for"));
}

TEST(HostSlabDevice, OtherMemoryThanWasGrantedIsRefused) {
  auto device = Open();
  constexpr int kSeals = F_SEAL_GROW | F_SEAL_SEAL;
  const UniqueFd granted = Memfd(kSlab, kSeals);
  const SlabDevice::Identity identity = Fstat(granted.get());
  absl::Status status = device->Adopt(SlabId(0), OneDescriptor(Memfd(kSlab, kSeals)), identity);
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("other memory"));
  status = device->Adopt(SlabId(0), {}, identity);
  EXPECT_THAT(std::string(status.message()), HasSubstr("0 descriptors"));
}

TEST(HostSlabDevice, IdsOutsideThePoolAndOddSizesAreRefused) {
  auto device = Open(4);
  EXPECT_TRUE(absl::IsInvalidArgument(device->Create(SlabId(4))));
  EXPECT_TRUE(absl::IsInvalidArgument(device->Retire(SlabId(4))));
  EXPECT_FALSE(HostSlabDevice::Open({.slabs = 0}).ok());
  EXPECT_FALSE(HostSlabDevice::Open({.slabs = 1, .slab_bytes = MiB(1)}).ok());
}

TEST(HostSlabDevice, RetireWithoutDescriptorsLeavesNoMemoryAndCanBeRepeated) {
  auto device = Open();
  ASSERT_TRUE(device->Create(SlabId(0)).ok());
  const auto shared = device->Descriptors(SlabId(0));  // keeps its number taken
  rlimit limit;
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  const UniqueFd next(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  const rlimit none_left = {static_cast<rlim_t>(next.get()), limit.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none_left), 0);
  EXPECT_FALSE(device->Retire(SlabId(0)).ok());
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_EQ(device->Descriptors(SlabId(0)), nullptr);
  EXPECT_TRUE(device->Retire(SlabId(0)).ok());
  EXPECT_NE(device->Descriptors(SlabId(0)), nullptr);
}

TEST(ReserveDescriptors, SaysWhatIsMissing) {
  EXPECT_TRUE(ReserveDescriptors(64).ok());
  const absl::Status status = ReserveDescriptors(uint64_t{1} << 40);
  EXPECT_TRUE(absl::IsFailedPrecondition(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("LimitNOFILE"));
}

}  // namespace
}  // namespace palimpsest
