// Workers that forge, flood, steal, say nothing or hang up: they are refused with the reason,
// nothing leaks, and the other tenant is served.
#include <sys/stat.h>

#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "broker/server/testing/broker_fixture.h"
#include "common/file_lock.h"
#include "common/monotonic_time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

using ::testing::HasSubstr;

constexpr int kAlphaUid = 54321;
constexpr int kBetaUid = 54322;

class BrokerHostileTest : public BrokerFixture {
 protected:
  void Restart(const std::string& yaml) {
    server_->Shutdown();
    server_.reset();
    StartBroker(yaml);
  }

  // Over a new descriptor connection.
  void Return(WorkerProcess& worker, const std::string& tenant) {
    Must(worker, "await-lost");
    Must(worker, "drop");
    Must(worker, node_.Hello(tenant));
  }

  // A round of KV to the tenant and back, as a sign of life.
  void ExpectServed(WorkerProcess& worker) {
    Must(worker, "kv 1 1");
    Must(worker, "await-slabs kv 1");
  }

  int DescriptorsOfThisProcess() {
    int count = 0;
    for ([[maybe_unused]] const auto& fd : std::filesystem::directory_iterator("/proc/self/fd")) {
      ++count;
    }
    return count;
  }
};

TEST_F(BrokerHostileTest, ForgedDescriptorsAreNotTakenBack) {
  StartBroker(node_.Config(14));
  auto alpha = Activated("alpha");
  auto beta = Activated("beta");
  const std::vector<std::string> own = SlabsOf(*alpha, "parameter");
  const std::string betas = SlabsOf(*beta, "parameter").front();
  const std::string epoch = Must(*alpha, "epoch " + own[0]);
  Must(*alpha, absl::StrCat("write ", own[0], " 65"));
  Must(*beta, absl::StrCat("write ", betas, " 66"));
  Restart(node_.Config(14));
  Return(*alpha, "alpha");
  const auto returning = [&](const std::string& slab, const std::string& its_epoch,
                             const std::string& memory) {
    return Fails(*alpha, absl::StrCat("return-slab ", slab, " ", its_epoch, " ", memory));
  };
  EXPECT_THAT(returning(own[0], epoch, "forged"), HasSubstr("other memory than was granted"));
  EXPECT_THAT(returning(own[0], epoch, own[1]), HasSubstr("other memory than was granted"));
  EXPECT_THAT(returning(own[0], absl::StrCat(epoch, "0"), own[0]), HasSubstr("under that epoch"));
  EXPECT_THAT(returning(betas, Must(*beta, "epoch " + betas), own[0]),
              HasSubstr("this process does not hold it"));
  EXPECT_THAT(returning("4000", epoch, own[0]), HasSubstr("no such slab"));
  EXPECT_THAT(Fails(*alpha, "return-image forged"), HasSubstr("other memory than was handed out"));
  EXPECT_EQ(Status().granted_slabs(), 0);

  Must(*alpha, "reattach " + node_.control());
  Return(*beta, "beta");
  Must(*beta, "reattach " + node_.control());
  EXPECT_EQ(Status().granted_slabs(), 2 * kImage);
  EXPECT_EQ(Must(*alpha, "read " + own[0]), "65");
  EXPECT_EQ(Must(*beta, "read " + betas), "66");
}

TEST_F(BrokerHostileTest, SlabsClaimedWithoutTheirMemoryAreRefused) {
  StartBroker(node_.Config(12));
  auto alpha = Activated("alpha");
  Restart(node_.Config(12));
  Return(*alpha, "alpha");
  EXPECT_THAT(Fails(*alpha, "claim " + node_.control()),
              HasSubstr("descriptor was not returned over the descriptor socket"));
  EXPECT_EQ(Status().quarantined_slabs(), kImage);
  Must(*alpha, node_.Hello("alpha"));
  Must(*alpha, "reattach " + node_.control());
  EXPECT_EQ(Status().granted_slabs(), kImage);
}

TEST_F(BrokerHostileTest, AConnectionClosedWhileTheImageIsPackedLeavesNoSession) {
  const std::string packer = node_.folder() + "/packer";
  const std::string go = node_.folder() + "/go";
  ASSERT_TRUE(WriteFileAtomically(packer,
                                  absl::StrCat("#!/bin/sh\nwhile [ ! -e ", go,
                                               " ]; do /bin/sleep 0.01; done\n"
                                               "exec worker/model/packer \"$@\"\n"),
                                  0700)
                  .ok());
  StartBroker(absl::StrReplaceAll(node_.Config(12), {{"worker/model/packer", packer}}));
  auto alpha = StartWorker();
  Must(*alpha, "hangs-up yes");
  Must(*alpha, node_.Hello("alpha"));
  EXPECT_THAT(Fails(*alpha, "attach " + node_.control()), HasSubstr("CANCELLED"));
  ASSERT_TRUE(WriteFileAtomically(go, "").ok());
  Must(*alpha, "hangs-up no");
  Must(*alpha, node_.Hello("alpha"));
  Must(*alpha, "attach " + node_.control());
  Must(*alpha, "activate");
  Must(*alpha, absl::StrCat("await-slabs parameter ", kImage));
  EXPECT_EQ(server_->broker().sessions(), 1);
}

TEST_F(BrokerHostileTest, AWorkerThatReadsNothingIsGivenUp) {
  StartBroker(node_.Config(kImage + 2, Hasty()));
  auto alpha = Activated("alpha");
  Must(*alpha, "report active");
  Must(*alpha, "kv 2 2");
  Must(*alpha, "await-slabs kv 2");
  auto beta = StartWorker();
  Must(*beta, "reads no");
  Must(*beta, node_.Hello("beta"));
  Must(*beta, "attach " + node_.control());
  // Each target is met by a message that says how little there is.
  EXPECT_THAT(Fails(*beta, "flood 1000000"), HasSubstr("the stream has ended"));
  EXPECT_THAT(std::string(beta->Wait(kPatience).message()), HasSubstr("killed by signal 9"));
  ASSERT_TRUE(Eventually([&] { return server_->broker().sessions() == 1; }));
  const v1::GetStatusResponse status = Status();
  EXPECT_EQ(status.tenants(0).parameter_slabs(), kImage);
  EXPECT_EQ(status.tenants(0).kv_slabs(), 2);
}

TEST_F(BrokerHostileTest, AFloodOfMessagesLeavesTheOtherTenantServed) {
  StartBroker(node_.Config(2 * kImage + 8));
  auto alpha = Activated("alpha");
  auto beta = Activated("beta");
  ASSERT_TRUE(beta->Tell("flood 100000000").ok());
  absl::Duration longest;
  for (int slabs = 1; slabs <= 4; ++slabs) {
    const absl::Time start = MonotonicNow();
    Must(*alpha, absl::StrCat("kv ", slabs, " ", slabs));
    Must(*alpha, absl::StrCat("await-slabs kv ", slabs));
    longest = std::max(longest, MonotonicNow() - start);
  }
  EXPECT_LT(longest, absl::Seconds(5));
  ASSERT_TRUE(beta->Kill().ok());
  EXPECT_TRUE(EventuallyFree(kImage + 8 - 4));
}

TEST_F(BrokerHostileTest, SilentCallsLockNobodyOut) {
  StartBroker(node_.Config(12));
  auto beta = StartWorker();
  Must(*beta, absl::StrCat("silent-calls ", node_.control(), " 300"));
  auto alpha = Activated("alpha");
  ExpectServed(*alpha);
}

TEST_F(BrokerHostileTest, NoDescriptorIsLeftOfWorkersThatCameAndDied) {
  StartBroker(node_.Config(12));
  const auto live = [&] {
    auto alpha = Attached("alpha");
    Must(*alpha, "maps no");
    Must(*alpha, "activate");
    Must(*alpha, "await-grants 1");
    ASSERT_TRUE(alpha->Kill().ok());
    ASSERT_TRUE(EventuallyFree(12));
    ASSERT_TRUE(Eventually([&] { return server_->broker().sessions() == 0; }));
  };
  live();
  const int before = DescriptorsOfThisProcess();
  for (int i = 0; i < 5; ++i) live();
  EXPECT_TRUE(Eventually([&] { return DescriptorsOfThisProcess() <= before + 2; }))
      << DescriptorsOfThisProcess() << " descriptors, " << before << " before";
}

// Each tenant has a uid and a folder of its own for its sockets.
class TenantSocketTest : public BrokerHostileTest {
 protected:
  void SetUp() override {
    ASSERT_EQ(geteuid(), 0) << "this test gives sockets to other users: run it as root";
    ASSERT_EQ(chmod(node_.folder().c_str(), 0711), 0);
    for (const auto& [tenant, uid] : {std::pair{"alpha", kAlphaUid}, std::pair{"beta", kBetaUid}}) {
      ASSERT_EQ(mkdir(Folder(tenant).c_str(), 0755), 0);
    }
    const auto tenant = [this](const char* name, int uid) {
      return absl::StrCat("  - name: ", name, "\n    uid: ", uid,
                          "\n    socket_dir: ", Folder(name), "\n    model: {path: ", node_.model(),
                          ", max_sequence_tokens: 256}\n");
    };
    StartBroker(absl::StrCat("node: test\nstate_dir: ", node_.folder(),
                             "/state\npacker: worker/model/packer\npool:\n  bytes: 24 MiB\n",
                             "tenants:\n", tenant("alpha", kAlphaUid), tenant("beta", kBetaUid)));
  }

  std::string Folder(const std::string& tenant) const { return node_.folder() + "/of-" + tenant; }
  std::string Hello(const std::string& folder_of, const std::string& tenant) const {
    return absl::StrCat("hello ", Folder(folder_of), "/descriptors.sock ", tenant, " ");
  }
};

TEST_F(TenantSocketTest, WorkersOfAllTenantsStartOneAtATime) {
  const auto join = [this](const std::string& tenant) {
    return FileLock::Join(StartLockPath(Folder(tenant) + "/broker.sock"), absl::ZeroDuration());
  };
  const absl::StatusOr<FileLock> alpha = join("alpha");
  ASSERT_TRUE(alpha.ok()) << alpha.status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(join("beta").status()));
  struct stat file;
  ASSERT_EQ(stat(StartLockPath(Folder("beta") + "/broker.sock").c_str(), &file), 0);
  EXPECT_EQ(file.st_mode & 07777, 0644) << "nobody but the broker may write it";
  EXPECT_EQ(file.st_uid, geteuid());
}

TEST_F(TenantSocketTest, SocketsBelongToTheirTenantAlone) {
  for (const auto& [tenant, uid] : {std::pair{"alpha", kAlphaUid}, std::pair{"beta", kBetaUid}}) {
    for (const char* name : {"/broker.sock", "/descriptors.sock"}) {
      struct stat file;
      ASSERT_EQ(stat((Folder(tenant) + name).c_str(), &file), 0);
      EXPECT_TRUE(S_ISSOCK(file.st_mode));
      EXPECT_EQ(file.st_mode & 07777, 0600) << tenant << name;
      EXPECT_EQ(file.st_uid, uid) << tenant << name;
    }
  }
  auto alpha = StartWorker();
  Must(*alpha, absl::StrCat("become ", kAlphaUid));
  Must(*alpha, Hello("alpha", "alpha"));
  Must(*alpha, absl::StrCat("attach ", Folder("alpha"), "/broker.sock"));
  Must(*alpha, "activate");
  Must(*alpha, absl::StrCat("await-slabs parameter ", kImage));

  auto thief = StartWorker();
  Must(*thief, absl::StrCat("become ", kBetaUid));
  EXPECT_THAT(Fails(*thief, Hello("alpha", "alpha")), HasSubstr("Permission denied"));
  EXPECT_THAT(Fails(*thief, Hello("beta", "alpha")), HasSubstr("not the one of tenant alpha"));
  auto root = StartWorker();
  EXPECT_THAT(Fails(*root, Hello("alpha", "alpha")), HasSubstr("another uid than 0"));
  EXPECT_EQ(Status().tenants(0).parameter_slabs(), kImage);
}

}  // namespace
}  // namespace palimpsest
