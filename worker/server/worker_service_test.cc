#include "worker/server/worker_service.h"

#include <atomic>
#include <cmath>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "common/grpc_status.h"
#include "common/grpc_time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/server/hint_conversion.h"
#include "worker/server/worker_service_fixture.h"

namespace palimpsest {
namespace {

using ::testing::HasSubstr;

TEST_F(WorkerServiceTest, StreamsTokensThenReasonAndUsage) {
  const auto request = Request(20);
  const Answer answer = Generate(*Context(), request);
  ASSERT_TRUE(answer.status.ok()) << answer.status.error_message();
  EXPECT_EQ(answer.tokens, Expected(request));
  EXPECT_EQ(answer.last.finish_reason(), v1::FINISH_REASON_LENGTH);
  EXPECT_EQ(answer.last.usage().prompt_tokens(), 7);
  EXPECT_EQ(answer.last.usage().output_tokens(), 20);
  EXPECT_EQ(answer.last.logprobs_size(), 0);
}

TEST_F(WorkerServiceTest, ContinuesTheOutputOfAnotherWorker) {
  const auto request = Request(20);
  const auto expected = Expected(request);
  auto rest = request;
  for (int i = 0; i < 6; ++i) rest.add_prompt_token_ids(expected[i]);
  rest.set_output_offset(6);
  const Answer answer = Generate(*Context(), rest);
  ASSERT_TRUE(answer.status.ok()) << answer.status.error_message();
  EXPECT_EQ(answer.tokens, std::vector<TokenId>(expected.begin() + 6, expected.end()));
}

TEST_F(WorkerServiceTest, StopStringReportsTheBytesToTrim) {
  auto request = Request(20);
  request.mutable_sampling()->add_stop("xxx");
  const Answer answer = Generate(*Context(), request);
  EXPECT_EQ(answer.last.finish_reason(), v1::FINISH_REASON_STOP_STRING);
  EXPECT_EQ(answer.last.stop_trim_bytes(), 3);
  EXPECT_EQ(answer.tokens.size(), 3);
}

TEST_F(WorkerServiceTest, LogprobsComeWithTheirTokens) {
  auto request = Request(3);
  request.mutable_sampling()->set_logprobs(0);
  auto context = Context();
  auto reader = stub_->Generate(context.get(), request);
  v1::WorkerGenerateResponse response;
  int tokens = 0;
  while (reader->Read(&response)) {
    ASSERT_EQ(response.logprobs_size(), response.token_ids_size());
    for (int i = 0; i < response.token_ids_size(); ++i, ++tokens) {
      EXPECT_EQ(response.logprobs(i).token_id(), response.token_ids(i));
    }
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(tokens, 3);
}

TEST_F(WorkerServiceTest, TheTokenCanBeExchangedWhileItRuns) {
  const auto accepted = [&](const std::string& token) {
    v1::WorkerStats stats;
    return stub_->GetStats(Context(token).get(), {}, &stats).ok();
  };
  WriteTokens("secret\nnext\n");
  EXPECT_TRUE(tokens_->ReloadIfChanged().ok());
  EXPECT_TRUE(accepted("secret") && accepted("next"));
  WriteTokens("next\n");
  EXPECT_TRUE(tokens_->ReloadIfChanged().ok());
  EXPECT_TRUE(accepted("next"));
  EXPECT_FALSE(accepted("secret"));
}

TEST_F(WorkerServiceTest, EveryMethodWantsTheToken) {
  for (const char* const token : {"", "secre", "secret2", "Secret"}) {
    EXPECT_EQ(Generate(*Context(token), Request()).status.error_code(),
              grpc::StatusCode::UNAUTHENTICATED);
    v1::DrainResponse drained;
    EXPECT_EQ(stub_->Drain(Context(token).get(), {}, &drained).error_code(),
              grpc::StatusCode::UNAUTHENTICATED);
    v1::WorkerStats stats;
    EXPECT_EQ(stub_->GetStats(Context(token).get(), {}, &stats).error_code(),
              grpc::StatusCode::UNAUTHENTICATED);
  }
  auto twice = Context();
  twice->AddMetadata("authorization", "Bearer other");
  EXPECT_EQ(Generate(*twice, Request()).status.error_code(), grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_FALSE(engine_.Stats().draining);
}

TEST_F(WorkerServiceTest, BadRequestsNameWhatIsWrong) {
  const auto expect_invalid = [&](const std::function<void(v1::WorkerGenerateRequest&)>& change,
                                  const std::string& word) {
    auto request = Request();
    change(request);
    const grpc::Status status = StatusOf(request);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << word;
    EXPECT_THAT(status.error_message(), HasSubstr(word));
  };
  expect_invalid([](auto& r) { r.set_request_id(""); }, "request_id");
  expect_invalid([](auto& r) { r.set_request_id("a b"); }, "request_id");
  expect_invalid([](auto& r) { r.set_request_id(std::string(129, 'a')); }, "request_id");
  expect_invalid([](auto& r) { r.clear_prompt_token_ids(); }, "empty");
  expect_invalid([](auto& r) { r.set_prompt_token_ids(2, 50); }, "token 2");
  expect_invalid([](auto& r) { r.set_prompt_token_ids(2, -1); }, "token 2");
  expect_invalid(
      [](auto& r) {
        for (int i = 0; i < 1000; ++i) r.add_prompt_token_ids(1);
      },
      "1007");
  expect_invalid([](auto& r) { r.set_output_offset(7); }, "output_offset");
  expect_invalid([](auto& r) { r.set_output_offset(4000000000u); }, "output_offset");
  expect_invalid([](auto& r) { r.mutable_sampling()->set_temperature(NAN); }, "temperature");
  expect_invalid([](auto& r) { r.mutable_sampling()->set_top_p(0); }, "top_p");
  expect_invalid([](auto& r) { r.mutable_sampling()->add_stop_token_ids(50); }, "stop_token_ids");
}

TEST_F(WorkerServiceTest, HintsAreCheckedAndPassedOn) {
  v1::WorkerHintRequest request;
  v1::WorkerHintResponse response;
  const auto hint = [&](const std::string& token = "secret") {
    return FromGrpcStatus(stub_->HintConversation(Context(token).get(), request, &response));
  };
  EXPECT_TRUE(absl::IsUnauthenticated(hint("")));
  EXPECT_THAT(hint().message(), HasSubstr("conversation_id must be"));
  request.set_conversation_id("chat-1");
  EXPECT_THAT(hint().message(), HasSubstr("no action"));
  request.mutable_action()->mutable_prefetch()->set_seconds(3);
  const absl::Status given = hint();
  ASSERT_TRUE(given.ok()) << given;
  EXPECT_EQ(response.blocks(), 3u);
  EXPECT_EQ(hints_.conversation, ConversationNumber("chat-1"));
  hints_.answer = absl::UnavailableError("no broker");
  EXPECT_TRUE(absl::IsUnavailable(hint()));

  v1::WorkerGenerateRequest generate = Request();
  generate.add_parts()->set_length(8);
  EXPECT_THAT(StatusOf(generate).error_message(), HasSubstr("ends at 8"));
  generate.mutable_parts(0)->set_length(7);
  generate.add_tool_call_token_ids(50);
  EXPECT_THAT(StatusOf(generate).error_message(), HasSubstr("tool_call_token_ids"));
  generate.set_tool_call_token_ids(0, 49);
  generate.mutable_hints()->set_expected_idle_seconds(-1);
  EXPECT_THAT(StatusOf(generate).error_message(), HasSubstr("expected_idle_seconds is -1"));
  generate.mutable_hints()->set_expected_idle_seconds(1);
  generate.set_conversation_id("chat 1");
  EXPECT_THAT(StatusOf(generate).error_message(), HasSubstr("conversation_id must be"));
  generate.set_conversation_id("chat-1");
  EXPECT_TRUE(StatusOf(generate).ok());
}

TEST_F(WorkerServiceTest, CancelledCallEndsItsSequence) {
  auto context = Context();
  auto reader = stub_->Generate(context.get(), Request(900));
  v1::WorkerGenerateResponse response;
  ASSERT_TRUE(reader->Read(&response));
  context->TryCancel();
  while (reader->Read(&response)) {
  }
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  Await([](const EngineStats& stats) { return stats.running == 0 && stats.blocks_used == 0; });
}

TEST_F(WorkerServiceTest, DeadlineEndsTheSequence) {
  memory_.RevokeParameters();  // so that nothing comes
  auto context = Context();
  context->set_deadline(GrpcTimeout(absl::Milliseconds(50)));
  EXPECT_EQ(Generate(*context, Request(900)).status.error_code(),
            grpc::StatusCode::DEADLINE_EXCEEDED);
  Await([](const EngineStats& stats) { return stats.running + stats.waiting == 0; });
  EXPECT_EQ(engine_.AwaitDrained(absl::Seconds(20)), 0);
}

TEST_F(WorkerServiceTest, RefusedActivationCarriesARetryHint) {
  memory_.RevokeParameters();
  auto context = Context();
  auto reader = stub_->Generate(context.get(), Request());
  while (memory_.activations().empty()) std::this_thread::yield();
  memory_.RefuseActivation("no memory", absl::Milliseconds(1500));
  v1::WorkerGenerateResponse response;
  while (reader->Read(&response)) {
  }
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  const auto hint = context->GetServerTrailingMetadata().find(kRetryAfterMetadata);
  ASSERT_NE(hint, context->GetServerTrailingMetadata().end());
  EXPECT_EQ(ParseRetryAfter({hint->second.data(), hint->second.size()}), absl::Milliseconds(1500));
}

TEST_F(WorkerServiceTest, FullQueueIsRefused) {
  memory_.RevokeParameters();
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<grpc::ClientReader<v1::WorkerGenerateResponse>>> readers;
  for (int i = 0; i < options_.scheduler.max_sequences(); ++i) {
    contexts.push_back(Context());
    readers.push_back(stub_->Generate(contexts.back().get(), Request()));
  }
  Await([&](const EngineStats& s) { return s.waiting == options_.scheduler.max_sequences(); });
  auto context = Context();
  EXPECT_EQ(Generate(*context, Request()).status.error_code(),
            grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(context->GetServerTrailingMetadata().count(kRetryAfterMetadata), 1);
  memory_.RestoreParameters();
  for (auto& reader : readers) {
    v1::WorkerGenerateResponse response;
    while (reader->Read(&response)) {
    }
    EXPECT_TRUE(reader->Finish().ok());
  }
}

TEST_F(WorkerServiceTest, StatsDescribeTheWorker) {
  const Answer answer = Generate(*Context(), Request(5));
  ASSERT_TRUE(answer.status.ok());
  Await([](const EngineStats& stats) { return stats.counters.generated_tokens == 5; });
  v1::WorkerStats stats;
  ASSERT_TRUE(stub_->GetStats(Context().get(), {}, &stats).ok());
  EXPECT_EQ(stats.tenant(), "alpha");
  EXPECT_EQ(stats.model(), "fake");
  EXPECT_EQ(stats.max_sequence_tokens(), 1000);
  EXPECT_EQ(stats.generated_tokens_total(), 5);
  EXPECT_EQ(stats.prompt_tokens_total(), 7);
  EXPECT_EQ(stats.parameter_slabs_total(), 1);
  EXPECT_FALSE(stats.draining());
}

TEST_F(WorkerServiceTest, HealthFollowsBrokerAndDrain) {
  EXPECT_FALSE(Serving());
  memory_.Connect();
  AwaitServing(true);
  memory_.Lose();
  AwaitServing(false);
  memory_.Connect(true);
  AwaitServing(true);
  v1::DrainResponse drained;
  ASSERT_TRUE(stub_->Drain(Context().get(), {}, &drained).ok());
  EXPECT_FALSE(Serving());
  memory_.Connect(true);
  EXPECT_FALSE(Serving());
}

TEST_F(WorkerServiceTest, DrainLetsRunningRequestsEnd) {
  auto context = Context();
  const auto request = Request(900);
  auto reader = stub_->Generate(context.get(), request);
  v1::WorkerGenerateResponse response;
  ASSERT_TRUE(reader->Read(&response));
  std::vector<TokenId> tokens(response.token_ids().begin(), response.token_ids().end());
  v1::DrainResponse drained;
  std::thread drain([&] { EXPECT_TRUE(stub_->Drain(Context().get(), {}, &drained).ok()); });
  Await([](const EngineStats& stats) { return stats.draining; });
  EXPECT_EQ(StatusOf(Request()).error_code(), grpc::StatusCode::UNAVAILABLE);
  while (reader->Read(&response)) {
    tokens.insert(tokens.end(), response.token_ids().begin(), response.token_ids().end());
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(tokens, Expected(request));
  drain.join();
  EXPECT_EQ(drained.remaining_requests(), 0);
}

TEST_F(WorkerServiceTest, DrainAnswersAtItsDeadline) {
  memory_.RevokeParameters();
  auto context = Context();
  auto reader = stub_->Generate(context.get(), Request());
  Await([](const EngineStats& stats) { return stats.waiting == 1; });
  auto drain = Context();
  drain->set_deadline(GrpcTimeout(absl::Milliseconds(400)));
  v1::DrainResponse drained;
  ASSERT_TRUE(stub_->Drain(drain.get(), {}, &drained).ok());
  EXPECT_EQ(drained.remaining_requests(), 1);
}

TEST_F(WorkerServiceTest, StormOfCancellationsLeavesNothingBehind) {
  std::vector<std::thread> clients;
  std::atomic<int> complete = 0;
  for (int client = 0; client < 4; ++client) {
    clients.emplace_back([&, client] {
      std::mt19937 random(client);
      for (int i = 0; i < 50; ++i) {
        auto context = Context();
        const auto request = Request(1 + random() % 60);
        auto reader = stub_->Generate(context.get(), request);
        v1::WorkerGenerateResponse response;
        std::vector<TokenId> tokens;
        int reads = random() % 5;
        const bool cancel = random() % 2;
        if (cancel && reads == 0) context->TryCancel();
        while (reader->Read(&response)) {
          tokens.insert(tokens.end(), response.token_ids().begin(), response.token_ids().end());
          if (cancel && --reads <= 0) context->TryCancel();
        }
        const grpc::Status status = reader->Finish();
        if (status.ok()) {
          EXPECT_EQ(tokens, Expected(request));
          ++complete;
        } else if (!cancel) {
          EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED)
              << status.error_message();
        }
      }
    });
  }
  for (std::thread& client : clients) client.join();
  EXPECT_GT(complete, 20);
  EXPECT_EQ(engine_.AwaitDrained(absl::Seconds(20)), 0);
  Await([](const EngineStats& stats) { return stats.blocks_used == 0; });
}

}  // namespace
}  // namespace palimpsest
