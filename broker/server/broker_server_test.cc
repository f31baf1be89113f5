// Life with well-behaved and badly behaved workers; hostile ones: broker_hostile_test.cc.
#include "broker/server/broker_server.h"

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "broker/blocks/testing/socket_block_worker.h"
#include "broker/server/testing/broker_fixture.h"
#include "common/grpc_time.h"
#include "common/monotonic_time.h"
#include "common/yaml_config.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

using ::testing::HasSubstr;

using BrokerServerTest = BrokerFixture;

TEST_F(BrokerServerTest, AWorkerGetsItsParametersAndKv) {
  StartBroker(node_.Config(12));
  auto alpha = Activated("alpha");
  Must(*alpha, "kv 3 1");
  Must(*alpha, "await-slabs kv 3");
  ASSERT_TRUE(Eventually([&] { return Status().tenants(0).grants_in_flight() == 0; }));
  const v1::GetStatusResponse status = Status();
  EXPECT_EQ(status.tenants(0).parameter_slabs(), kImage);
  EXPECT_EQ(status.tenants(0).kv_slabs(), 3);
  EXPECT_EQ(status.tenants(0).pid(), alpha->pid());
  EXPECT_EQ(status.tenants(0).fingerprint().size(), 64);
  EXPECT_EQ(status.free_slabs(), 12 - kImage - 3);
  EXPECT_GE(status.transfers_size(), 2);
}

TEST_F(BrokerServerTest, TenantsWithTheSameModelShareOneImage) {
  StartBroker(node_.Config(12));
  auto alpha = Attached("alpha");
  auto beta = Attached("beta");
  const v1::GetStatusResponse status = Status();
  EXPECT_EQ(status.tenants(0).fingerprint(), status.tenants(1).fingerprint());
  EXPECT_THAT(server_->metrics().Text(), HasSubstr("palimpsest_broker_image_pack_seconds_count{"
                                                   "phase=\"pack\"} 1"));
}

TEST_F(BrokerServerTest, MetricsTellWhatHintsRetain) {
  StartBroker(absl::StrCat(node_.Config(12),
                           "tiers:\n  dram: {bytes: 16 MiB, chunk_bytes: 2 MiB}\n"
                           "  policy: lru\n"));
  const auto retained = [&](const std::string& tenant, int64_t bytes) {
    return Eventually([&] {
      return absl::StrContains(
          server_->metrics().Text(),
          absl::StrCat("palimpsest_broker_block_bytes{kind=\"retained\",tenant=\"", tenant,
                       "\",tier=\"dram\"} ", bytes, "\n"));
    });
  };
  EXPECT_TRUE(retained("alpha", 0));
  SocketBlockWorker worker(64 << 10);
  ASSERT_TRUE(worker.Hello(node_.descriptors(), "alpha", TestNode::Secret("alpha")).ok());
  ASSERT_TRUE(worker.Attach(node_.control()).ok());
  ASSERT_TRUE(Eventually([&] { return worker.Put(1, 4).value_or(0) == 4; }));
  v1::HintRequest hint;
  *hint.mutable_session() = worker.session();
  *hint.mutable_chain() = worker.Chain(1, 3);
  hint.mutable_action()->mutable_retain();
  grpc::ClientContext context;
  context.set_deadline(GrpcTimeout(kPatience));
  v1::HintResponse response;
  ASSERT_TRUE(worker.stub().Hint(&context, hint, &response).ok());
  EXPECT_EQ(response.blocks(), 3u);
  EXPECT_TRUE(retained("alpha", 3 * (64 << 10))) << server_->metrics().Text();
  EXPECT_TRUE(retained("beta", 0));
  ASSERT_TRUE(server_->blocks()->Purge("alpha", kPatience).ok());
  EXPECT_TRUE(retained("alpha", 0)) << server_->metrics().Text();
}

TEST_F(BrokerServerTest, ATokenWorksOnce) {
  StartBroker(node_.Config(12));
  auto alpha = Activated("alpha");
  const std::string token = Must(*alpha, "token");
  EXPECT_THAT(Fails(*alpha, "fetch " + token), HasSubstr("used already"));
  EXPECT_EQ(server_->descriptors().stats().token_refusals.load(), 1);
}

TEST_F(BrokerServerTest, ATokenIsWorthNothingToAnotherProcess) {
  StartBroker(node_.Config(16));
  auto alpha = Attached("alpha");
  auto beta = Attached("beta");
  Must(*alpha, "maps no");
  Must(*alpha, "activate");
  Must(*alpha, "await-grants 1");
  const std::string token = Must(*alpha, "token");
  EXPECT_THAT(Fails(*beta, "fetch " + token), HasSubstr("another connection"));
  Must(*alpha, "fetch " + token);
}

TEST_F(BrokerServerTest, ATokenExpires) {
  StartBroker(absl::StrCat("token_lifetime: 100ms\n", node_.Config(12)));
  auto alpha = Attached("alpha");
  Must(*alpha, "maps no");
  const absl::Time before = MonotonicNow();
  Must(*alpha, "activate");
  Must(*alpha, "await-grants 1");
  ASSERT_TRUE(Eventually([&] { return MonotonicNow() > before + absl::Seconds(1); }));
  EXPECT_THAT(Fails(*alpha, "fetch " + Must(*alpha, "token")), HasSubstr("expired"));
}

TEST_F(BrokerServerTest, StrangersAreRefusedWithTheReason) {
  StartBroker(node_.Config(12));
  auto worker = StartWorker();
  EXPECT_THAT(Fails(*worker, absl::StrCat("hello ", node_.descriptors(), " alpha wrong")),
              HasSubstr("wrong secret"));
  EXPECT_THAT(Fails(*worker, absl::StrCat("hello ", node_.descriptors(), " gamma wrong")),
              HasSubstr("no tenant"));
  EXPECT_THAT(Fails(*worker, "attach " + node_.control()), HasSubstr("UNAUTHENTICATED"));
  EXPECT_TRUE(
      Eventually([&] { return server_->descriptors().stats().secret_refusals.load() == 2; }));
}

TEST_F(BrokerServerTest, ATenantWithAUidNeedsThatUid) {
  StartBroker(node_.Config(12, "", "    uid: 54321\n"));
  auto worker = StartWorker();
  EXPECT_THAT(Fails(*worker, node_.Hello("alpha")), HasSubstr("runs as another uid"));
}

TEST_F(BrokerServerTest, ASecondSessionWaitsForTheFirstOnesEnd) {
  StartBroker(node_.Config(12));
  auto first = Attached("alpha");
  auto second = StartWorker();
  Must(*second, node_.Hello("alpha"));
  EXPECT_THAT(Fails(*second, "attach " + node_.control()), HasSubstr("ALREADY_EXISTS"));
  ASSERT_TRUE(first->Kill().ok());
  ASSERT_TRUE(Eventually([&] { return server_->broker().sessions() == 0; }));
  Must(*second, node_.Hello("alpha"));
  Must(*second, "attach " + node_.control());
}

TEST_F(BrokerServerTest, AWorkerKilledInAGrantLosesNoSlab) {
  StartBroker(node_.Config(12));
  auto alpha = Attached("alpha");
  Must(*alpha, "maps no");
  Must(*alpha, "activate");
  Must(*alpha, "await-grants 1");
  EXPECT_EQ(Status().free_slabs(), 12 - kImage);
  ASSERT_TRUE(alpha->Kill().ok());
  EXPECT_TRUE(EventuallyFree(12));
  EXPECT_EQ(Status().quarantined_slabs(), 0);
}

TEST_F(BrokerServerTest, ParametersOfAnIdleTenantGoToAnActiveOne) {
  StartBroker(node_.Config(6, Hasty()));
  auto alpha = Activated("alpha");
  Must(*alpha, "report idle");
  auto beta = Attached("beta");
  Must(*beta, "report active");
  Must(*beta, "activate");
  Must(*beta, absl::StrCat("await-slabs parameter ", kImage));
  ASSERT_TRUE(Eventually([&] { return Status().tenants(1).parameter_slabs() == kImage; }));
  EXPECT_LE(Status().tenants(0).parameter_slabs(), 2);
  v1::GetRemapLogRequest about_beta;
  about_beta.set_tenant("beta");
  const v1::GetRemapLogResponse log = server_->broker().RemapDecisions(about_beta);
  ASSERT_GT(log.decisions_size(), 0);
  const v1::RemapDecision& decision = log.decisions(log.decisions_size() - 1);
  EXPECT_EQ(decision.tenant(), "beta");
  EXPECT_EQ(decision.reason(), "activation");
  ASSERT_EQ(decision.candidates_size(), 1) << decision.ShortDebugString();
  EXPECT_EQ(decision.candidates(0).tenant(), "alpha");
  EXPECT_EQ(decision.candidates(0).rule(), "inactive_parameters");
  EXPECT_EQ(decision.candidates(0).outcome(), "taken");
  EXPECT_EQ(decision.candidates(0).slabs(), decision.planned_slabs());
}

TEST_F(BrokerServerTest, AWorkerKilledInARevokeLosesNoSlab) {
  StartBroker(node_.Config(6));
  auto alpha = Activated("alpha");
  Must(*alpha, "report idle");
  Must(*alpha, "manners silent");
  auto beta = Attached("beta");
  Must(*beta, "activate");
  Must(*alpha, "await-revokes 1");
  EXPECT_GT(Status().revoking_slabs(), 0);
  ASSERT_TRUE(alpha->Kill().ok());
  Must(*beta, absl::StrCat("await-slabs parameter ", kImage));
  EXPECT_TRUE(EventuallyFree(6 - kImage));
}

TEST_F(BrokerServerTest, AWorkerThatNeverAnswersIsKilledAtTheDeadline) {
  StartBroker(node_.Config(6, "  revoke_deadline: 300ms\n"));
  auto alpha = Activated("alpha");
  Must(*alpha, "report idle");
  Must(*alpha, "manners silent");
  auto beta = Attached("beta");
  Must(*beta, "activate");
  Must(*beta, absl::StrCat("await-slabs parameter ", kImage));
  const absl::Status ended = alpha->Wait(kPatience);
  EXPECT_THAT(std::string(ended.message()), HasSubstr("killed by signal 9"));
  EXPECT_TRUE(EventuallyFree(6 - kImage));
}

TEST_F(BrokerServerTest, ALiarDiesOfItsOwnAccessAndNobodyElseNotices) {
  StartBroker(node_.Config(kImage + 1, Hasty()));
  auto alpha = Activated("alpha");
  Must(*alpha, "report idle");
  const std::vector<std::string> had = SlabsOf(*alpha, "parameter");
  for (const std::string& slab : had) Must(*alpha, absl::StrCat("write ", slab, " 65"));
  Must(*alpha, "manners liar");
  auto beta = Attached("beta");
  Must(*beta, "report active");
  Must(*beta, "activate");
  Must(*beta, absl::StrCat("await-slabs parameter ", kImage));
  const std::vector<std::string> left = SlabsOf(*alpha, "parameter");
  std::string stolen;
  for (const std::string& slab : SlabsOf(*beta, "parameter")) {
    EXPECT_EQ(Must(*beta, "read " + slab), "0") << "a slab comes clean";
    Must(*beta, absl::StrCat("write ", slab, " 66"));
    const bool was_alphas = std::find(had.begin(), had.end(), slab) != had.end();
    if (was_alphas && std::find(left.begin(), left.end(), slab) == left.end()) stolen = slab;
  }
  ASSERT_FALSE(stolen.empty());
  EXPECT_THAT(Fails(*alpha, absl::StrCat("write ", stolen, " 67")), HasSubstr("the process died"));
  EXPECT_THAT(std::string(alpha->Wait(kPatience).message()), HasSubstr("killed by signal 7"));
  for (const std::string& slab : SlabsOf(*beta, "parameter")) {
    EXPECT_EQ(Must(*beta, "read " + slab), "66");
  }
}

TEST_F(BrokerServerTest, OfTwoActivationsInAPoolForOneTheSecondIsRefused) {
  StartBroker(node_.Config(kImage + 2, Hasty()));
  auto alpha = Attached("alpha");
  auto beta = Attached("beta");
  for (auto* worker : {alpha.get(), beta.get()}) Must(*worker, "report active");
  Must(*alpha, "activate");
  // Of two that ask at once the broker may hear either first.
  Must(*alpha, absl::StrCat("await-slabs parameter ", kImage));
  Must(*beta, "activate");
  Must(*beta, "await-refused");
  const v1::GetStatusResponse status = Status();
  EXPECT_EQ(status.tenants(0).parameter_slabs(), kImage);
  EXPECT_EQ(status.tenants(1).parameter_slabs(), 0) << "nobody holds half a model";
}

TEST_F(BrokerServerTest, AFullPoolIsPressure) {
  StartBroker(node_.Config(kImage + 2));
  auto alpha = Activated("alpha");
  Must(*alpha, absl::StrCat("kv ", kImage + 2, " 1"));
  Must(*alpha, "await-pressure");
  EXPECT_EQ(Status().free_slabs(), 0);
}

TEST_F(BrokerServerTest, AfterARestartWorkersBringTheirSlabsBack) {
  StartBroker(node_.Config(12));
  auto alpha = Activated("alpha");
  Must(*alpha, "kv 2 1");
  Must(*alpha, "await-slabs kv 2");
  const std::string slab = SlabsOf(*alpha, "kv").front();
  Must(*alpha, absl::StrCat("write ", slab, " 42"));
  server_->Shutdown();
  server_.reset();
  EXPECT_EQ(Must(*alpha, "read " + slab), "42") << "memory outlives the broker";

  StartBroker(node_.Config(12));
  EXPECT_EQ(Status().broker_generation(), 2);
  EXPECT_EQ(Status().quarantined_slabs(), kImage + 2) << "held until the worker returns";
  Must(*alpha, "await-lost");
  Must(*alpha, "drop");
  Must(*alpha, node_.Hello("alpha"));
  Must(*alpha, "reattach " + node_.control());
  EXPECT_EQ(Must(*alpha, "read " + slab), "42");
  EXPECT_EQ(Status().granted_slabs(), kImage + 2);
  EXPECT_EQ(Status().free_slabs(), 12 - kImage - 2);
  EXPECT_THAT(server_->metrics().Text(), ::testing::Not(HasSubstr("phase=\"pack\"")))
      << "the image came back with the worker";
  ASSERT_TRUE(alpha->Kill().ok());
  EXPECT_TRUE(EventuallyFree(12));
}

TEST_F(BrokerServerTest, ASessionThatDoesNotReturnIsEnded) {
  StartBroker(node_.Config(12, Hasty()));
  auto alpha = Activated("alpha");
  server_->Shutdown();
  server_.reset();
  StartBroker(node_.Config(12, Hasty()));
  EXPECT_EQ(Status().quarantined_slabs(), kImage);
  EXPECT_THAT(std::string(alpha->Wait(kPatience).message()), HasSubstr("killed by signal 9"));
  EXPECT_TRUE(EventuallyFree(12));
}

TEST_F(BrokerServerTest, ABrokenConnectionToALivingBrokerIsMended) {
  StartBroker(node_.Config(12));
  auto alpha = Activated("alpha");
  Must(*alpha, "drop");
  Must(*alpha, node_.Hello("alpha"));
  Must(*alpha, "reattach " + node_.control());
  EXPECT_EQ(Status().tenants(0).parameter_slabs(), kImage);
  Must(*alpha, "kv 1 1");
  Must(*alpha, "await-slabs kv 1");
}

TEST_F(BrokerServerTest, ASessionCannotBeTakenOverByAnotherProcess) {
  StartBroker(node_.Config(12));
  auto alpha = Activated("alpha");
  auto thief = StartWorker();
  Must(*thief, node_.Hello("beta"));
  // It has no session of its own: number 0 is nobody's.
  EXPECT_THAT(Fails(*thief, "reattach " + node_.control()), HasSubstr("NOT_FOUND"));
  EXPECT_EQ(Status().tenants(0).parameter_slabs(), kImage);
}

TEST_F(BrokerServerTest, AMissingModelIsAnErrorAtStart) {
  std::filesystem::remove_all(node_.model());
  auto yaml = YamlConfig::Parse(node_.Config(12), "broker.yaml");
  auto config = ReadBrokerConfig(*yaml, "");
  ASSERT_TRUE(config.ok());
  const auto server = BrokerServer::Start(*config, [](const absl::Status&) {});
  EXPECT_THAT(std::string(server.status().message()), HasSubstr("tenant alpha"));
}

TEST_F(BrokerServerTest, AFailingPackerIsTheWorkersError) {
  StartBroker(absl::StrCat("pack_at_start: false\n", node_.Config(12)));
  std::filesystem::remove(node_.model() + "/model.safetensors");
  auto alpha = StartWorker();
  Must(*alpha, node_.Hello("alpha"));
  EXPECT_THAT(Fails(*alpha, "attach " + node_.control()), HasSubstr("no parameter image"));
}

TEST_F(BrokerServerTest, AModelThatChangesWhileItIsPackedIsRefused) {
  const std::string packer = node_.folder() + "/packer";
  ASSERT_TRUE(WriteFileAtomically(packer,
                                  absl::StrCat("#!/bin/sh\n/bin/touch ", node_.model(),
                                               "/config.json\nexec worker/model/packer \"$@\"\n"),
                                  0700)
                  .ok());
  StartBroker(absl::StrReplaceAll(node_.Config(12), {{"worker/model/packer", packer}}));
  auto alpha = StartWorker();
  Must(*alpha, node_.Hello("alpha"));
  EXPECT_THAT(Fails(*alpha, "attach " + node_.control()), HasSubstr("changed each of the 3 times"));
}

TEST_F(BrokerServerTest, TwoBrokersDoNotShareASocket) {
  StartBroker(node_.Config(12));
  auto yaml = YamlConfig::Parse(node_.Config(12), "broker.yaml");
  auto config = ReadBrokerConfig(*yaml, "");
  config->state_dir += "2";
  const auto second = BrokerServer::Start(*config, [](const absl::Status&) {});
  EXPECT_EQ(second.status().code(), absl::StatusCode::kAlreadyExists) << second.status();
  auto alpha = Attached("alpha");
}

}  // namespace
}  // namespace palimpsest
