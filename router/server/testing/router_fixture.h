// A whole router in this process, in front of fake workers: tenant alpha with model "m" on two
// workers, tenant beta with models "m" and "private" on one worker each.
#ifndef PALIMPSEST_ROUTER_SERVER_TESTING_ROUTER_FIXTURE_H_
#define PALIMPSEST_ROUTER_SERVER_TESTING_ROUTER_FIXTURE_H_

#include <grpcpp/create_channel.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "common/clock.h"
#include "common/grpc_time.h"
#include "proto/palimpsest/v1/router.grpc.pb.h"
#include "router/server/router_server.h"
#include "router/server/testing/fake_worker.h"
#include "router/server/testing/model_folder.h"

namespace palimpsest::router::testing {

inline constexpr char kAlphaToken[] = "alpha-token-0123456789";
inline constexpr char kBetaToken[] = "beta-token-0123456789";

// What a client saw of one Generate call.
struct Outcome {
  std::string text;
  std::vector<int32_t> token_ids;
  v1::GenerateResponse first;
  v1::GenerateResponse last;
  grpc::Status status;
  std::string retry_after_ms;
};

class RouterFixture : public ::testing::Test {
 protected:
  RouterFixture() {
    WriteModelFolder(folder_.path());
    config_.listen = "127.0.0.1:0";
    config_.auth_file = folder_.Write(
        "tenants", std::string("alpha ") + kAlphaToken + "\nbeta " + kBetaToken + "\n");
    config_.worker_token_file = folder_.Write("router", "router-secret-token-0123\n");
    config_.request_limit = 4096;
    config_.worker_attempts = 3;
    config_.stall_timeout = absl::Seconds(60);
    config_.health_interval = absl::Milliseconds(20);
    config_.health_timeout = absl::Seconds(10);
    config_.silence_timeout = absl::Seconds(30);
    config_.resolve_interval = absl::Seconds(1);
    const AdmissionLimits limits{2048, 16, absl::Seconds(60)};
    config_.tenants = {
        {"alpha", limits, {{"m", folder_.path(), {alpha0_.address(), alpha1_.address()}}}},
        {"beta",
         limits,
         {{"m", folder_.path(), {beta0_.address()}},
          {"private", folder_.path(), {beta1_.address()}}}}};
  }

  // Starts the router and waits until it has seen every worker healthy.
  void StartRouter(size_t expected_alpha = 2) {
    absl::StatusOr<std::unique_ptr<RouterServer>> started = RouterServer::Start(config_, *clock_);
    ASSERT_TRUE(started.ok()) << started.status();
    router_ = *std::move(started);
    channel_ = grpc::CreateChannel("127.0.0.1:" + std::to_string(router_->port()),
                                   grpc::InsecureChannelCredentials());
    stub_ = v1::Router::NewStub(channel_);
    ASSERT_TRUE(Eventually([&] { return Healthy(kAlphaToken) == expected_alpha; }));
    ASSERT_TRUE(Eventually([&] { return Healthy(kBetaToken) == 2; }));
  }

  static void Authorize(grpc::ClientContext& context, const std::string& token) {
    context.AddMetadata("authorization", "Bearer " + token);
    context.set_deadline(GrpcTimeout(kPatience));
  }

  v1::GetTenantStatusResponse Status(const std::string& token) {
    grpc::ClientContext context;
    Authorize(context, token);
    v1::GetTenantStatusResponse response;
    const grpc::Status status = stub_->GetTenantStatus(&context, {}, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response;
  }

  size_t Healthy(const std::string& token) {
    size_t healthy = 0;
    const v1::GetTenantStatusResponse status = Status(token);
    for (const v1::WorkerStatus& worker : status.workers()) healthy += worker.healthy();
    return healthy;
  }

  static v1::GenerateRequest Text(const std::string& text) {
    v1::GenerateRequest request;
    request.set_text(text);
    request.set_model("m");
    return request;
  }

  Outcome Generate(const v1::GenerateRequest& request, const std::string& token = kAlphaToken) {
    grpc::ClientContext context;
    Authorize(context, token);
    return Read(context, *stub_->Generate(&context, request));
  }

  static Outcome Read(grpc::ClientContext& context,
                      grpc::ClientReader<v1::GenerateResponse>& stream) {
    Outcome outcome;
    v1::GenerateResponse response;
    for (bool first = true; stream.Read(&response); first = false) {
      if (first) outcome.first = response;
      outcome.text += response.text();
      outcome.token_ids.insert(outcome.token_ids.end(), response.token_ids().begin(),
                               response.token_ids().end());
      outcome.last = response;
    }
    outcome.status = stream.Finish();
    const auto& trailers = context.GetServerTrailingMetadata();
    const auto found = trailers.find("retry-after-ms");
    if (found != trailers.end()) {
      outcome.retry_after_ms.assign(found->second.data(), found->second.size());
    }
    return outcome;
  }

  TempFolder folder_;
  RouterConfig config_;
  const Clock* clock_ = &Clock::Real();  // the router's
  FakeWorker alpha0_{"alpha", "m"};
  FakeWorker alpha1_{"alpha", "m"};
  FakeWorker beta0_{"beta", "m"};
  FakeWorker beta1_{"beta", "private"};
  std::unique_ptr<RouterServer> router_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Router::Stub> stub_;
};

}  // namespace palimpsest::router::testing

#endif  // PALIMPSEST_ROUTER_SERVER_TESTING_ROUTER_FIXTURE_H_
