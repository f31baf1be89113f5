// The broker's executable: killed and started again under running workers, its command line, its
// signals, and what it needs of the machine.
#include <fcntl.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <memory>
#include <optional>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "broker/server/testing/broker_process_fixture.h"
#include "broker/server/testing/memory_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

using ::testing::HasSubstr;

constexpr int kImage = TestNode::kImageSlabs;

class BrokerProcessTest : public BrokerProcessFixture {
 protected:
  void StartBroker(int pool_slabs, const std::string& shell = "exec \"$@\"") {
    BrokerProcessFixture::StartBroker(node_.Config(pool_slabs), shell);
  }
  // The broker leaves the control group before it is removed.
  void TearDown() override { broker_.reset(); }

  absl::StatusOr<MemoryGroup> group_ = absl::NotFoundError("none");
};

TEST_F(BrokerProcessTest, AKilledBrokersSuccessorFindsEverySlab) {
  StartBroker(14);
  auto alpha = WorkerProcess::Start();
  auto beta = WorkerProcess::Start();
  ASSERT_TRUE(alpha.ok() && beta.ok());
  for (auto& [worker, tenant] : {std::pair{&*alpha, "alpha"}, std::pair{&*beta, "beta"}}) {
    Must(*worker, node_.Hello(tenant));
    Must(*worker, "attach " + node_.control());
    Must(*worker, "activate");
    Must(*worker, absl::StrCat("await-slabs parameter ", kImage));
    Must(*worker, "kv 2 1");
    Must(*worker, "await-slabs kv 2");
  }
  KillBroker();
  Must(*alpha, "await-lost");
  ASSERT_TRUE(beta->Kill().ok());
  ASSERT_TRUE(beta->AwaitExit(kPatience).ok());

  StartBroker(14);
  // Beta died with the old broker: its slabs are fresh and free. Alpha's wait for alpha.
  ASSERT_TRUE(Eventually([&] {
    const auto status = Status();
    return status && status->free_slabs() == 14 - kImage - 2;
  }));
  EXPECT_EQ(Status()->quarantined_slabs(), kImage + 2);
  Must(*alpha, "drop");
  Must(*alpha, node_.Hello("alpha"));
  Must(*alpha, "reattach " + node_.control());
  const auto status = Status();
  EXPECT_EQ(status->broker_generation(), 2);
  EXPECT_EQ(status->granted_slabs(), kImage + 2);
  EXPECT_EQ(status->quarantined_slabs(), 0);
  ASSERT_TRUE(alpha->Kill().ok());
  EXPECT_TRUE(Eventually([&] { return Status()->free_slabs() == 14; }));
}

TEST_F(BrokerProcessTest, SigtermIsACleanEnd) {
  StartBroker(12);
  ASSERT_TRUE(broker_->handle().Signal(SIGTERM).ok());
  EXPECT_TRUE(broker_->Wait(kPatience).ok());
  EXPECT_FALSE(std::filesystem::exists(node_.descriptors()));
}

TEST_F(BrokerProcessTest, AWrongConfigurationEndsItAtOnce) {
  SpawnBroker("node: x\nsurprise: 1\n");
  EXPECT_THAT(std::string(broker_->Wait(kPatience).message()), HasSubstr("status 2"));
  EXPECT_THAT(Said(), HasSubstr("broker.yaml:2"));
}

TEST_F(BrokerProcessTest, TooFewFileDescriptorsAreToldAtStart) {
  // Without the capability root could raise the limit.
  SpawnBroker(node_.Config(48),
              "ulimit -n 64; exec /usr/bin/setpriv --bounding-set -sys_resource \"$@\"");
  EXPECT_THAT(std::string(broker_->Wait(kPatience).message()), HasSubstr("status 1"));
  EXPECT_THAT(Said(), HasSubstr("file descriptors, but at most 64 are allowed"));
  EXPECT_FALSE(std::filesystem::exists(node_.control()));
}

TEST_F(BrokerProcessTest, APoolBeyondTheControlGroupsLimitIsRefusedBeforeAnythingIsAllocated) {
  absl::StatusOr<MemoryGroup>& group = group_ = MemoryGroup::Create(MiB(64));
  if (!group.ok()) GTEST_SKIP() << group.status();
  SpawnBroker(node_.Config(48), absl::StrCat(group->EnterCommand(), "exec \"$@\""));
  EXPECT_THAT(std::string(broker_->Wait(kPatience).message()), HasSubstr("status 1"));
  EXPECT_THAT(Said(), HasSubstr("104 MiB are needed, but the control group's limit"));
  EXPECT_LT(group->Used(), MiB(32));
  EXPECT_FALSE(std::filesystem::exists(node_.control()));
}

TEST_F(BrokerProcessTest, SlabsAreChargedToTheBrokerWhoeverTouchesThem) {
  absl::StatusOr<MemoryGroup>& of_broker = group_ = MemoryGroup::Create(MiB(256));
  auto of_worker = MemoryGroup::Create(MiB(64));
  if (!of_broker.ok()) GTEST_SKIP() << of_broker.status();
  ASSERT_TRUE(of_worker.ok()) << of_worker.status();
  StartBroker(48, absl::StrCat(of_broker->EnterCommand(), "exec \"$@\""));
  auto alpha = WorkerProcess::Start();
  ASSERT_TRUE(alpha.ok());
  ASSERT_TRUE(of_worker->Enter(alpha->pid()).ok());
  Must(*alpha, node_.Hello("alpha"));
  Must(*alpha, "attach " + node_.control());
  Must(*alpha, "activate");
  Must(*alpha, absl::StrCat("await-slabs parameter ", kImage));
  Must(*alpha, absl::StrCat("kv ", 48 - kImage, " ", 48 - kImage));
  Must(*alpha, absl::StrCat("await-slabs kv ", 48 - kImage));
  Must(*alpha, "fill 7");
  EXPECT_GE(of_broker->Used(), MiB(96));
  EXPECT_LT(of_worker->Used(), MiB(48));
}

// The journal lies on a file system of 64 KiB, which the test fills up.
class FullDiskTest : public BrokerProcessTest {
 protected:
  static constexpr int kPool = 128;
  // So many records do not fit the rest of the journal's last page.
  static constexpr int kKv = kPool - kImage;

  void SetUp() override {
    const std::string state = node_.folder() + "/state";
    ASSERT_EQ(mkdir(state.c_str(), 0700), 0);
    if (mount("tmpfs", state.c_str(), "tmpfs", 0, "size=64k") != 0) {
      GTEST_SKIP() << "needs the right to mount: " << ErrnoStatus("mount");
    }
    mounted_ = state;
    StartBroker(kPool);
    auto alpha = WorkerProcess::Start();
    ASSERT_TRUE(alpha.ok());
    alpha_.emplace(*std::move(alpha));
    Must(*alpha_, node_.Hello("alpha"));
    Must(*alpha_, "attach " + node_.control());
    Must(*alpha_, "activate");
    Must(*alpha_, absl::StrCat("await-slabs parameter ", kImage));
    const UniqueFd filler(open(Filler().c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
    const std::string page(4096, 'x');
    while (write(filler.get(), page.data(), page.size()) > 0) {
    }
    Must(*alpha_, absl::StrCat("kv ", kKv, " ", kKv));
    ASSERT_TRUE(
        Eventually([&] { return absl::StrContains(Said(), "the journal cannot be written"); }));
  }
  void TearDown() override {
    alpha_.reset();
    broker_.reset();
    if (!mounted_.empty()) umount2(mounted_.c_str(), MNT_DETACH);
  }

  std::string Filler() const { return mounted_ + "/filler"; }

  std::string mounted_;
  std::optional<WorkerProcess> alpha_;
};

TEST_F(FullDiskTest, ABrokerWaitsForRoomAndGoesOn) {
  ASSERT_EQ(unlink(Filler().c_str()), 0);
  Must(*alpha_, absl::StrCat("await-slabs kv ", kKv));
  EXPECT_EQ(Status()->free_slabs(), 0);
}

TEST_F(FullDiskTest, ABrokerThatCannotRecordEndsAndItsSuccessorLosesNothing) {
  EXPECT_THAT(std::string(broker_->Wait(kPatience).message()), HasSubstr("status 1"));
  EXPECT_THAT(Said(), HasSubstr("No space left on device"));
  Must(*alpha_, "await-lost");
  Must(*alpha_, "fill 7");  // the worker keeps its memory
  ASSERT_EQ(unlink(Filler().c_str()), 0);
  StartBroker(kPool);
  Must(*alpha_, "drop");
  Must(*alpha_, node_.Hello("alpha"));
  Must(*alpha_, "reattach " + node_.control());
  EXPECT_EQ(Status()->granted_slabs(), kImage);
  EXPECT_EQ(Status()->free_slabs(), kKv);
  Must(*alpha_, absl::StrCat("kv ", kKv, " ", kKv));
  Must(*alpha_, absl::StrCat("await-slabs kv ", kKv));
}

}  // namespace
}  // namespace palimpsest
