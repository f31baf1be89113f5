// What palctl asks of the block store, against one in this process, and how it shows tiers.
#include <gmock/gmock.h>
#include <grpc/grpc.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tools/palctl/commands.h"
#include "tools/palctl/status_view.h"

namespace palimpsest::palctl {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;

class FakeBlockAdmin : public v1::BlockAdmin::Service {
 public:
  grpc::Status SetLimit(grpc::ServerContext*, const v1::SetLimitRequest* request,
                        v1::SetLimitResponse* response) override {
    if (request->tier() != v1::TIER_DRAM) return {grpc::StatusCode::NOT_FOUND, "no such tier"};
    response->set_limit_bytes(request->bytes());
    response->set_used_bytes(3 << 20);
    return grpc::Status::OK;
  }
  grpc::Status Trim(grpc::ServerContext*, const v1::TrimRequest* request,
                    v1::TrimResponse* response) override {
    response->set_blocks(request->tier() == v1::TIER_UNSPECIFIED ? 9 : 4);
    response->set_bytes(request->keep_bytes() + (1 << 20));
    return grpc::Status::OK;
  }
  grpc::Status Purge(grpc::ServerContext*, const v1::PurgeRequest* request,
                     v1::PurgeResponse* response) override {
    if (request->tenant() != "alpha") return {grpc::StatusCode::NOT_FOUND, "no tenant"};
    response->set_blocks(7);
    return grpc::Status::OK;
  }
  grpc::Status CheckTiers(grpc::ServerContext*, const v1::CheckTiersRequest* request,
                          v1::CheckTiersResponse* response) override {
    v1::CheckedTier& tier = *response->add_tiers();
    tier.set_tier(v1::TIER_NVME);
    tier.set_name("nvme");
    tier.set_blocks(request->blocks());
    tier.set_store_bytes_per_second(1.5e9);
    tier.set_load_bytes_per_second(2.5e9);
    if (request->block_bytes() == 1) tier.set_error("a block came back with other bytes");
    return grpc::Status::OK;
  }
  grpc::Status WatchBlocks(grpc::ServerContext* context, const v1::WatchBlocksRequest* request,
                           grpc::ServerWriter<v1::WatchBlocksResponse>* writer) override {
    if (request->tenant() == "gamma") return {grpc::StatusCode::NOT_FOUND, "no tenant gamma"};
    v1::WatchBlocksResponse message;
    message.set_sequence(7);
    message.mutable_snapshot()->set_begins(true);
    message.mutable_snapshot()->set_missed_events(2);
    message.mutable_snapshot()->set_ends(true);
    v1::BlockEvent& event = *message.add_events();
    event.set_sequence(7);
    event.set_kind(v1::BlockEvent::KIND_STORED);
    event.set_tenant("alpha");
    event.set_tier(v1::TIER_NVME);
    event.mutable_key()->set_high(0xab);
    event.mutable_key()->set_low(0x12);
    writer->Write(message);
    message.clear_snapshot();
    for (uint64_t i = 8; !context->IsCancelled(); ++i) {
      message.mutable_events(0)->set_sequence(i);
      message.mutable_events(0)->set_kind(v1::BlockEvent::KIND_REMOVED);
      if (!writer->Write(message)) break;
    }
    return grpc::Status::CANCELLED;
  }
};

class TiersCommands : public ::testing::Test {
 protected:
  // gRPC stays until the process ends: taking it down waits up to 10 s for a thread that polls.
  static void SetUpTestSuite() { grpc_init(); }

  TiersCommands() {
    std::string pattern = "/tmp/palctl_tiers_XXXXXX";
    folder_ = mkdtemp(pattern.data());
    grpc::ServerBuilder builder;
    builder.AddListeningPort("unix:" + folder_ + "/operator.sock",
                             grpc::InsecureServerCredentials());
    builder.RegisterService(&admin_);
    server_ = builder.BuildAndStart();
  }
  ~TiersCommands() override {
    server_->Shutdown();
    std::filesystem::remove_all(folder_);
  }

  int Run(const std::vector<std::string>& arguments) {
    const std::string socket = folder_ + "/operator.sock";
    std::vector<const char*> argv = {"palctl", "--operator", socket.c_str()};
    for (const std::string& argument : arguments) argv.push_back(argument.c_str());
    out_.str("");
    err_.str("");
    return RunPalctl(static_cast<int>(argv.size()), argv.data(), {out_, err_});
  }

  std::string folder_;
  FakeBlockAdmin admin_;
  std::unique_ptr<grpc::Server> server_;
  std::ostringstream out_, err_;
};

TEST_F(TiersCommands, DoctorShowsRatesAndFailsWhereBytesDiffer) {
  EXPECT_EQ(Run({"doctor"}), kDone) << err_.str();
  EXPECT_THAT(out_.str(), AllOf(HasSubstr("nvme"), HasSubstr("1500"), HasSubstr("2500"),
                                HasSubstr("the same bytes came back")));
  EXPECT_EQ(Run({"doctor", "--block", "1", "--blocks", "3", "--json"}), kFailed);
  const json tier = json::parse(out_.str())["tiers"][0];
  EXPECT_EQ(tier["error"], "a block came back with other bytes");
  EXPECT_EQ(tier["blocks"], 3);
}

TEST_F(TiersCommands, LimitAndTrimSayWhatIsLeft) {
  EXPECT_EQ(Run({"limit", "--tier", "dram", "--bytes", "64 MiB", "--tenant", "alpha"}), kDone);
  EXPECT_EQ(out_.str(), "limit 64 MiB, used 3 MiB\n");
  EXPECT_EQ(Run({"limit", "--tier", "cxl", "--bytes", "64 MiB"}), kFailed);
  EXPECT_EQ(Run({"limit", "--tier", "tape", "--bytes", "64 MiB"}), kUsage);
  EXPECT_EQ(Run({"trim"}), kDone);
  EXPECT_EQ(out_.str(), "9 blocks (1 MiB) leave or have left\n");
  EXPECT_EQ(Run({"trim", "--tier", "nvme", "--keep", "1 MiB"}), kDone);
  EXPECT_EQ(out_.str(), "4 blocks (2 MiB) leave or have left\n");
}

TEST_F(TiersCommands, PurgeNeedsATenantThatThereIs) {
  EXPECT_EQ(Run({"purge"}), kUsage);
  EXPECT_EQ(Run({"purge", "--tenant", "gamma"}), kFailed);
  EXPECT_EQ(Run({"purge", "--tenant", "alpha"}), kDone);
  EXPECT_THAT(out_.str(), HasSubstr("7 blocks of tenant alpha"));
}

TEST_F(TiersCommands, EventsFollowTheSnapshot) {
  EXPECT_EQ(Run({"events", "--count", "2"}), kDone) << err_.str();
  const std::string key = "00000000000000ab0000000000000012";
  EXPECT_THAT(out_.str(),
              AllOf(HasSubstr("2 events were missed"), HasSubstr("snapshot, up to event 7"),
                    HasSubstr("7 present"), HasSubstr("8 removed"), HasSubstr("9 removed"),
                    ::testing::Not(HasSubstr("10 removed")), HasSubstr(key)));
  EXPECT_EQ(Run({"events", "--snapshot", "--json"}), kDone) << err_.str();
  std::istringstream lines(out_.str());
  std::string line;
  ASSERT_TRUE(std::getline(lines, line));
  EXPECT_EQ(json::parse(line)["event"], "snapshot");
  EXPECT_EQ(json::parse(line)["missed_events"], 2);
  ASSERT_TRUE(std::getline(lines, line));
  EXPECT_EQ(json::parse(line), json({{"event", "present"},
                                     {"sequence", 7},
                                     {"tenant", "alpha"},
                                     {"tier", "nvme"},
                                     {"key", key}}));
  EXPECT_EQ(Run({"events", "--tenant", "gamma"}), kFailed);
}

TEST_F(TiersCommands, AMissingSocketIsExplained) {
  server_->Shutdown();
  EXPECT_EQ(Run({"purge", "--tenant", "alpha"}), kUnreachable);
  EXPECT_THAT(err_.str(), HasSubstr("operator.sock in the broker's state_dir"));
}

TEST(StatusView, ShowsTiersWithTheirTenants) {
  NodeStatus status;
  v1::TierMemory& tier = *status.broker.add_tiers();
  tier.set_tier("cxl");
  tier.set_name("cxl (emulated)");
  tier.set_capacity_bytes(1 << 30);
  tier.set_last_failure("it hung");
  v1::TenantTier& tenant = *tier.add_tenants();
  tenant.set_tenant("alpha");
  tenant.set_blocks(42);
  v1::TierRefusals& refusals = *tenant.add_refusals();
  refusals.set_reason("late");
  refusals.set_blocks(3);
  EXPECT_THAT(StatusTable(status), AllOf(HasSubstr("cxl (emulated)"), HasSubstr("1 GiB"),
                                         HasSubstr("left alone: it hung"), HasSubstr("42")));
  const json shown = StatusJson(status)["tiers"][0];
  EXPECT_EQ(shown["tenants"][0]["refusals"]["late"], 3);
  EXPECT_EQ(shown["serving"], false);
}

}  // namespace
}  // namespace palimpsest::palctl
