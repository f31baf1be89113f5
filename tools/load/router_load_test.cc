// The load of a router, against a router's service in this process.
#include "tools/load/router_load.h"

#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <gtest/gtest.h>

#include <memory>

#include "absl/strings/str_cat.h"

namespace palimpsest::load {
namespace {

using ::testing::HasSubstr;

// Answers with the prompt's last token, again and again, and says that all but one was cached.
// Prompts of one token are not answered.
class FakeRouter : public v1::Router::CallbackService {
 public:
  grpc::ServerWriteReactor<v1::GenerateResponse>* Generate(
      grpc::CallbackServerContext* context, const v1::GenerateRequest* request) override {
    return new Stream(*context, *request);
  }

 private:
  class Stream : public grpc::ServerWriteReactor<v1::GenerateResponse> {
   public:
    Stream(const grpc::CallbackServerContext& context, const v1::GenerateRequest& request) {
      const auto authorization = context.client_metadata().find("authorization");
      if (authorization == context.client_metadata().end() || authorization->second != "Bearer t" ||
          request.model() != "m" || request.conversation_id() != "c" ||
          !request.hints().last_turn()) {
        Finish({grpc::StatusCode::UNAUTHENTICATED, "who are you?"});
        return;
      }
      const auto& ids = request.tokens().ids();
      waits_ = ids.size() == 1;
      if (waits_) return;
      for (uint32_t i = 0; i < request.sampling().max_tokens(); ++i) {
        response_.add_token_ids(ids[ids.size() - 1]);
      }
      response_.mutable_usage()->set_cached_tokens(static_cast<uint32_t>(ids.size() - 1));
      StartWriteAndFinish(&response_, {}, grpc::Status::OK);
    }
    void OnCancel() override {
      if (waits_) Finish(grpc::Status::CANCELLED);
    }
    void OnDone() override { delete this; }

   private:
    bool waits_ = false;
    v1::GenerateResponse response_;
  };
};

class RouterLoadTest : public ::testing::Test {
 protected:
  RouterLoadTest() {
    int port = 0;
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&service_);
    server_ = builder.BuildAndStart();
    stub_ = v1::Router::NewStub(
        grpc::CreateChannel(absl::StrCat("127.0.0.1:", port), grpc::InsecureChannelCredentials()));
  }

  RouterTarget Target(const std::string& token = "t") {
    return {.stub = stub_.get(), .token = token, .model = "m", .vocabulary = 10};
  }

  static PromptRequest Request(absl::Duration due, std::vector<int32_t> prompt) {
    PromptRequest request{.due = due, .prompt = std::move(prompt), .output_tokens = 2};
    request.conversation = "c";
    request.hints.set_last_turn(true);
    return request;
  }

  FakeRouter service_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<v1::Router::Stub> stub_;
};

TEST_F(RouterLoadTest, NotesWhatComesAndWhen) {
  const std::vector<PromptRequest> requests = {Request(absl::ZeroDuration(), {5, 6, 7}),
                                               Request(absl::Milliseconds(30), {5, 6})};
  const auto records = RunRouterLoad(Target(), requests, absl::Seconds(30));
  ASSERT_EQ(records.size(), 2u);
  for (const RequestRecord& record : records) {
    EXPECT_EQ(record.outcome, Outcome::kFinished) << record.error;
    EXPECT_EQ(record.tokens.size(), 2u);
    EXPECT_GE(record.sent, record.due);
    EXPECT_GE(record.tokens.front(), record.sent);
    EXPECT_GE(record.end, record.tokens.back());
  }
  EXPECT_EQ(records[0].prompt_tokens, 3u);
  EXPECT_EQ(records[0].cached_tokens, 2u);
  EXPECT_EQ(records[0].digest, AddToDigest(AddToDigest(kEmptyDigest, 7), 7));
  EXPECT_EQ(records[1].due, absl::Milliseconds(30));
}

// The loop is open: the second one is sent though the first one is never answered.
TEST_F(RouterLoadTest, GivesUpWhatIsNotAnswered) {
  const std::vector<PromptRequest> requests = {Request(absl::ZeroDuration(), {5}),
                                               Request(absl::Milliseconds(1), {5, 6})};
  const auto records = RunRouterLoad(Target(), requests, absl::Milliseconds(500));
  EXPECT_EQ(records[0].outcome, Outcome::kUnfinished);
  EXPECT_GE(records[0].end, absl::Milliseconds(500));
  EXPECT_EQ(records[1].outcome, Outcome::kFinished) << records[1].error;
}

TEST_F(RouterLoadTest, RefusedRequestsFail) {
  const auto records = RunRouterLoad(
      Target("another"), std::vector<PromptRequest>{Request(absl::ZeroDuration(), {5, 6})},
      absl::Seconds(30));
  EXPECT_EQ(records[0].outcome, Outcome::kFailed);
  EXPECT_THAT(records[0].error, HasSubstr("who are you?"));
}

TEST_F(RouterLoadTest, ReportsProgress) {
  const std::vector<PromptRequest> requests = {Request(absl::ZeroDuration(), {5, 6}),
                                               Request(absl::Milliseconds(1200), {5, 6})};
  std::vector<LoadProgress> seen;
  RunRouterLoad(Target(), requests, absl::Seconds(30),
                [&](const LoadProgress& now) { seen.push_back(now); });
  ASSERT_FALSE(seen.empty());
  EXPECT_EQ(seen[0].requests, 2);
  EXPECT_EQ(seen[0].sent, 1);
}

}  // namespace
}  // namespace palimpsest::load
