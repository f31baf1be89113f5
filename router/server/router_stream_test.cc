// What a client gets: text, limits, identities.
#include <gmock/gmock.h>

#include <atomic>
#include <cmath>
#include <filesystem>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/clock.h"
#include "common/grpc_time.h"
#include "common/monotonic_time.h"
#include "router/server/testing/router_fixture.h"

namespace palimpsest::router::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

// Both of alpha's workers answer every request with these messages.
class RouterStream : public RouterFixture {
 protected:
  void Answer(const std::vector<v1::WorkerGenerateResponse>& messages) {
    const auto handler = [messages](FakeStream& stream) {
      for (const v1::WorkerGenerateResponse& message : messages) stream.Send(message);
      stream.End(grpc::Status::OK);
    };
    for (FakeWorker* worker : {&alpha0_, &alpha1_, &beta0_, &beta1_}) worker->SetHandler(handler);
  }

  void ExpectInvalid(const v1::GenerateRequest& request, const std::string& says) {
    const Outcome outcome = Generate(request);
    EXPECT_EQ(outcome.status.error_code(), grpc::StatusCode::INVALID_ARGUMENT)
        << outcome.status.error_message();
    EXPECT_THAT(outcome.status.error_message(), HasSubstr(says));
  }
};

TEST_F(RouterStream, TextTokensAndUsageArrive) {
  Answer({Tokens("Hel"), Tokens("lo"), LastTokens("!", v1::FINISH_REASON_LENGTH)});
  StartRouter();
  v1::GenerateRequest request = Text("say hello");
  request.set_request_id("my-request");
  const Outcome outcome = Generate(request);
  ASSERT_TRUE(outcome.status.ok()) << outcome.status.error_message();
  EXPECT_EQ(outcome.text, "Hello!");
  EXPECT_THAT(outcome.token_ids, ElementsAre('H', 'e', 'l', 'l', 'o', '!'));
  EXPECT_EQ(outcome.first.request_id(), "my-request");
  EXPECT_EQ(outcome.last.finish_reason(), v1::FINISH_REASON_LENGTH);
  EXPECT_EQ(outcome.last.usage().prompt_tokens(), 9);
  EXPECT_EQ(outcome.last.usage().cached_tokens(), 2);
  EXPECT_EQ(outcome.last.usage().output_tokens(), 6);
  EXPECT_EQ(outcome.last.usage().preemptions(), 1);
}

TEST_F(RouterStream, WorkerGetsIdsSeedAndTheRoutersToken) {
  StartRouter();
  v1::GenerateRequest request;
  request.mutable_tokens()->add_ids(7);
  request.mutable_tokens()->add_ids(8);
  grpc::ClientContext context;
  Authorize(context, kAlphaToken);
  const auto stream = stub_->Generate(&context, request);
  ASSERT_TRUE(Eventually([&] { return alpha0_.calls() + alpha1_.calls() == 1; }));
  FakeWorker& worker = alpha0_.calls() == 1 ? alpha0_ : alpha1_;
  const std::shared_ptr<FakeStream> call = worker.AwaitCall();
  EXPECT_THAT(call->request().prompt_token_ids(), ElementsAre(7, 8));
  EXPECT_TRUE(call->request().sampling().has_seed());
  EXPECT_EQ(call->request().sampling().max_tokens(), 46u) << "48 positions less the prompt";
  EXPECT_EQ(call->request().output_offset(), 0);
  EXPECT_FALSE(call->request().request_id().empty());
  EXPECT_EQ(worker.last_authorization(), "Bearer router-secret-token-0123");
  call->Send(LastTokens("x", v1::FINISH_REASON_STOP_TOKEN));
  call->End(grpc::Status::OK);
  EXPECT_TRUE(Read(context, *stream).status.ok());
}

TEST_F(RouterStream, ChatsAreRenderedWithTheModelsTemplate) {
  Answer({LastTokens("x", v1::FINISH_REASON_STOP_TOKEN)});
  StartRouter();
  grpc::ClientContext context;
  Authorize(context, kAlphaToken);
  v1::TokenizeRequest request;
  v1::ChatMessage* message = request.mutable_chat()->add_messages();
  message->set_role("user");
  message->set_content("hi<|end|>");
  v1::TokenizeResponse response;
  ASSERT_TRUE(stub_->Tokenize(&context, request, &response).ok());
  const std::string text(response.token_ids().begin(), response.token_ids().end());
  EXPECT_EQ(text, "<user>hi<|end|><assistant>") << "a message must not pose as a control token";
}

TEST_F(RouterStream, WhatTheClientTellsOfItsCacheReachesTheWorker) {
  StartRouter();
  v1::GenerateRequest request;
  const auto say = [&](const std::string& role, const std::string& content) {
    v1::ChatMessage* message = request.mutable_chat()->add_messages();
    message->set_role(role);
    message->set_content(content);
    return message;
  };
  say("system", "abc");
  say("user", "hello");
  say("user", "42")->set_type(v1::BLOCK_TYPE_TOOL_CONTEXT);
  request.set_conversation_id("chat-1");
  request.mutable_hints()->set_expected_idle_seconds(8);
  request.mutable_hints()->add_tool_call_markers("<|end|>");
  request.mutable_hints()->add_tool_call_markers("no token");
  grpc::ClientContext context;
  Authorize(context, kAlphaToken);
  const auto stream = stub_->Generate(&context, request);
  ASSERT_TRUE(Eventually([&] { return alpha0_.calls() + alpha1_.calls() == 1; }));
  FakeWorker& worker = alpha0_.calls() == 1 ? alpha0_ : alpha1_;
  const std::shared_ptr<FakeStream> call = worker.AwaitCall();
  const v1::WorkerGenerateRequest& got = call->request();
  EXPECT_EQ(got.conversation_id(), "chat-1");
  EXPECT_EQ(got.hints().SerializeAsString(), request.hints().SerializeAsString());
  EXPECT_THAT(got.tool_call_token_ids(), ElementsAre(kEndToken));
  // "<system>abc" "<user>hello" "<user>42", then "<assistant>".
  ASSERT_EQ(got.parts_size(), 3);
  EXPECT_EQ(got.parts(0).type(), v1::BLOCK_TYPE_SYSTEM_PROMPT);
  EXPECT_EQ(got.parts(0).length(), 11u);
  EXPECT_EQ(got.parts(1).type(), v1::BLOCK_TYPE_USER_CONTEXT);
  EXPECT_EQ(got.parts(1).length(), 11u);
  EXPECT_EQ(got.parts(2).type(), v1::BLOCK_TYPE_TOOL_CONTEXT);
  EXPECT_EQ(got.parts(2).length(), 8u);
  call->Send(LastTokens("x", v1::FINISH_REASON_STOP_TOKEN));
  call->End(grpc::Status::OK);
  EXPECT_TRUE(Read(context, *stream).status.ok());
}

TEST_F(RouterStream, PartsOfATextAreCountedInItsTokens) {
  StartRouter();
  v1::GenerateRequest request = Text("\u00e9<|end|>abcd");
  const auto part = [&](v1::BlockType type, uint32_t bytes) {
    v1::PromptPart* added = request.add_parts();
    added->set_type(type);
    added->set_length(bytes);
  };
  part(v1::BLOCK_TYPE_SYSTEM_PROMPT, 2);
  part(v1::BLOCK_TYPE_USER_CONTEXT, 9);
  grpc::ClientContext context;
  Authorize(context, kAlphaToken);
  const auto stream = stub_->Generate(&context, request);
  ASSERT_TRUE(Eventually([&] { return alpha0_.calls() + alpha1_.calls() == 1; }));
  const auto call = (alpha0_.calls() == 1 ? alpha0_ : alpha1_).AwaitCall();
  // Two bytes, each a token; one token of seven bytes and two letters; two letters.
  EXPECT_EQ(call->request().prompt_token_ids_size(), 7);
  ASSERT_EQ(call->request().parts_size(), 2);
  EXPECT_EQ(call->request().parts(0).length(), 2u);
  EXPECT_EQ(call->request().parts(1).length(), 3u);
  call->Send(LastTokens("x", v1::FINISH_REASON_STOP_TOKEN));
  call->End(grpc::Status::OK);
  EXPECT_TRUE(Read(context, *stream).status.ok());
}

TEST_F(RouterStream, HintsThatAreNoneAreRefused) {
  StartRouter();
  v1::GenerateRequest request = Text("abc");
  request.set_conversation_id("a b");
  ExpectInvalid(request, "conversation_id must be");
  request.set_conversation_id("a");
  request.add_parts()->set_length(4);
  ExpectInvalid(request, "no end behind the prompt's 3");
  request.clear_parts();
  request.mutable_hints()->mutable_then()->mutable_prefetch();
  ExpectInvalid(request, "hints.then is a prefetch");
  request.clear_hints();
  request.mutable_chat()->add_messages()->set_role("user");
  request.add_parts()->set_length(1);
  ExpectInvalid(request, "a chat has no parts");
}

TEST_F(RouterStream, AConversationsHintGoesToAllItsWorkers) {
  StartRouter();
  alpha0_.SetBlocksOfHints(3);
  alpha1_.SetBlocksOfHints(4);
  v1::HintConversationRequest request;
  v1::HintConversationResponse response;
  const auto hint = [&](const std::string& token = kAlphaToken) {
    grpc::ClientContext context;
    Authorize(context, token);
    return stub_->HintConversation(&context, request, &response);
  };
  EXPECT_EQ(hint().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  request.set_model("m");
  request.set_conversation_id("chat-1");
  EXPECT_THAT(hint().error_message(), HasSubstr("no action"));
  request.mutable_action()->mutable_prefetch()->set_seconds(2);
  ASSERT_TRUE(hint().ok());
  EXPECT_EQ(response.blocks(), 7u);
  for (const FakeWorker* worker : {&alpha0_, &alpha1_}) {
    EXPECT_EQ(worker->last_hint().conversation_id(), "chat-1");
    EXPECT_EQ(worker->last_hint().action().prefetch().seconds(), 2);
  }
  EXPECT_FALSE(beta0_.last_hint().has_action()) << "another tenant's";
  alpha0_.SetBlocksOfHints(std::nullopt);
  ASSERT_TRUE(hint().ok()) << "one that has no tiers";
  EXPECT_EQ(response.blocks(), 4u);
  alpha1_.SetBlocksOfHints(std::nullopt);
  EXPECT_EQ(hint().error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(hint("nobody's").error_code(), grpc::StatusCode::UNAUTHENTICATED);
}

// By which no worker takes too long for an answer before the client's deadline.
class ClockAhead : public Clock {
 public:
  absl::Time Now() const override { return MonotonicNow() + absl::Hours(1); }
};

TEST_F(RouterStream, HintsUnderWayAreBoundedForEachTenant) {
  constexpr size_t kMost = 256;
  struct Call {
    grpc::ClientContext context;
    v1::HintConversationResponse response;
    grpc::Status status;
  };
  static const ClockAhead clock{};
  clock_ = &clock;
  StartRouter();
  FakeWorker* const workers[] = {&alpha0_, &alpha1_};
  for (FakeWorker* worker : workers) worker->HoldHints();
  v1::HintConversationRequest request;
  request.set_model("m");
  request.set_conversation_id("chat-1");
  request.mutable_action()->mutable_demote();
  std::vector<Call> calls(kMost);
  std::atomic<size_t> ended = 0;
  for (Call& call : calls) {
    Authorize(call.context, kAlphaToken);
    stub_->async()->HintConversation(&call.context, &request, &call.response,
                                     [&call, &ended](grpc::Status status) {
                                       call.status = std::move(status);
                                       ++ended;
                                     });
  }
  const auto all_held = [&] {
    return alpha0_.held_hints() == kMost && alpha1_.held_hints() == kMost;
  };
  EXPECT_TRUE(Eventually(all_held)) << alpha0_.held_hints() << " and " << alpha1_.held_hints();

  const auto one_more = [&](const std::string& token, const std::string& model) {
    grpc::ClientContext context;
    Authorize(context, token);
    v1::HintConversationRequest another = request;
    another.set_model(model);
    v1::HintConversationResponse response;
    return stub_->HintConversation(&context, another, &response);
  };
  const grpc::Status refused = one_more(kAlphaToken, "m");
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(refused.error_message(), HasSubstr("256 hints of tenant 'alpha' are under way"));
  EXPECT_TRUE(all_held()) << "no worker hears of it";
  const grpc::Status others = one_more(kBetaToken, "private");
  EXPECT_TRUE(others.ok()) << others.error_message();
  EXPECT_TRUE(beta1_.last_hint().has_action());

  for (FakeWorker* worker : workers) worker->ReleaseHints();
  ASSERT_TRUE(Eventually([&] { return ended == kMost; }, 3 * kPatience));
  for (const Call& call : calls) ASSERT_TRUE(call.status.ok()) << call.status.error_message();
  EXPECT_TRUE(one_more(kAlphaToken, "m").ok());
}

TEST_F(RouterStream, CharactersAreWholeAlthoughTokensAreNot) {
  Answer({Tokens("a\xC3"), Tokens("\xA9 \xF0\x9F"), Tokens("\x98\x80"),
          LastTokens("\xE2\x82", v1::FINISH_REASON_LENGTH)});
  StartRouter();
  const Outcome outcome = Generate(Text("x"));
  ASSERT_TRUE(outcome.status.ok()) << outcome.status.error_message();
  EXPECT_EQ(outcome.first.text(), "a");
  EXPECT_EQ(outcome.text, "a\u00e9 \U0001F600\uFFFD");
}

TEST_F(RouterStream, NothingOfAStopStringIsShown) {
  Answer({Tokens("one EN"), LastTokens("D", v1::FINISH_REASON_STOP_STRING)});
  StartRouter();
  v1::GenerateRequest request = Text("x");
  request.mutable_sampling()->add_stop("END");
  const Outcome outcome = Generate(request);
  EXPECT_EQ(outcome.first.text(), "one ");
  EXPECT_EQ(outcome.text, "one ");
  EXPECT_EQ(outcome.last.finish_reason(), v1::FINISH_REASON_STOP_STRING);
}

TEST_F(RouterStream, BeginningsOfAStopStringAppearOnceTheyAreNone) {
  Answer({Tokens("EN"), LastTokens("TER", v1::FINISH_REASON_LENGTH)});
  StartRouter();
  v1::GenerateRequest request = Text("x");
  request.mutable_sampling()->add_stop("END");
  const Outcome outcome = Generate(request);
  EXPECT_EQ(outcome.first.text(), "");
  EXPECT_EQ(outcome.text, "ENTER");
}

TEST_F(RouterStream, LogprobsComeWithTheirTokens) {
  v1::WorkerGenerateResponse message = LastTokens("a", v1::FINISH_REASON_LENGTH);
  message.add_logprobs()->set_logprob(-0.5f);
  Answer({message});
  StartRouter();
  v1::GenerateRequest request = Text("x");
  request.mutable_sampling()->set_logprobs(0);
  const Outcome outcome = Generate(request);
  ASSERT_TRUE(outcome.status.ok()) << outcome.status.error_message();
  ASSERT_EQ(outcome.first.logprobs_size(), 1);
  EXPECT_EQ(outcome.first.logprobs(0).logprob(), -0.5f);
}

TEST_F(RouterStream, WorkersThatBreakTheirContractAreAnInternalError) {
  StartRouter();
  v1::WorkerGenerateResponse alien;
  alien.add_token_ids(kVocabSize);
  for (const std::vector<v1::WorkerGenerateResponse>& messages :
       {std::vector{alien}, std::vector{Tokens(std::string(60, 'x'))},
        std::vector<v1::WorkerGenerateResponse>{}}) {
    Answer(messages);
    EXPECT_EQ(Generate(Text("x")).status.error_code(), grpc::StatusCode::INTERNAL);
  }
}

TEST_F(RouterStream, BadPromptsAreRefusedWithTheNumbers) {
  StartRouter();
  ExpectInvalid(v1::GenerateRequest(), "must have a prompt");
  ExpectInvalid(Text(""), "empty");
  ExpectInvalid(Text(std::string(48, 'x')), "48 tokens: this model takes at most 47");
  ExpectInvalid(Text(std::string(1 << 20, 'x')), "1048576 bytes");
  v1::GenerateRequest ids;
  ids.mutable_tokens();
  ExpectInvalid(ids, "no tokens");
  ids.mutable_tokens()->add_ids(kVocabSize);
  ExpectInvalid(ids, "tokens.ids[0] is 257: expected a token id from 0 to 256");
  ids.mutable_tokens()->set_ids(0, -1);
  ExpectInvalid(ids, "tokens.ids[0] is -1");
  v1::GenerateRequest chat;
  chat.mutable_chat();
  ExpectInvalid(chat, "0 messages");
  v1::GenerateRequest id = Text("x");
  id.set_request_id("two words");
  ExpectInvalid(id, "request_id");
  EXPECT_EQ(alpha0_.calls() + alpha1_.calls(), 0);
}

TEST_F(RouterStream, TextThatIsNotUtf8IsRefusedAndHarmsNobody) {
  Answer({LastTokens("x", v1::FINISH_REASON_LENGTH)});
  StartRouter();
  for (const char* text : {"\xFF", "a\xC3", "\xED\xA0\x80", "\xF4\x90\x80\x80"}) {
    EXPECT_FALSE(Generate(Text(text)).status.ok());
    v1::GenerateRequest request = Text("x");
    request.mutable_sampling()->add_stop(text);
    EXPECT_FALSE(Generate(request).status.ok());
  }
  EXPECT_EQ(alpha0_.calls() + alpha1_.calls(), 0);
  EXPECT_TRUE(Generate(Text("x")).status.ok());
}

TEST_F(RouterStream, BadSamplingFieldsAreRefused) {
  StartRouter();
  const auto expect = [&](const std::string& field, auto set) {
    v1::GenerateRequest request = Text("x");
    set(*request.mutable_sampling());
    ExpectInvalid(request, field);
  };
  using S = v1::SamplingParams;
  expect("temperature", [](S& s) { s.set_temperature(std::nanf("")); });
  expect("temperature", [](S& s) { s.set_temperature(-0.1f); });
  expect("top_p", [](S& s) { s.set_top_p(0); });
  expect("top_p", [](S& s) { s.set_top_p(INFINITY); });
  expect("min_p", [](S& s) { s.set_min_p(1.5f); });
  expect("repetition_penalty", [](S& s) { s.set_repetition_penalty(0); });
  expect("max_tokens", [](S& s) { s.set_max_tokens(0); });
  expect("logprobs", [](S& s) { s.set_logprobs(21); });
  expect("stop", [](S& s) { s.add_stop(""); });
  expect("stop_token_ids", [](S& s) { s.add_stop_token_ids(kVocabSize); });
}

TEST_F(RouterStream, TokensThatBelongToNobodyAreUnauthenticated) {
  Answer({LastTokens("x", v1::FINISH_REASON_LENGTH)});
  StartRouter();
  for (const char* token : {"", "alpha", "alpha-token-0123456788", "router-secret-token-0123"}) {
    EXPECT_EQ(Generate(Text("x"), token).status.error_code(), grpc::StatusCode::UNAUTHENTICATED);
  }
  grpc::ClientContext context;
  v1::ListModelsResponse models;
  EXPECT_EQ(stub_->ListModels(&context, {}, &models).error_code(),
            grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_EQ(alpha0_.calls() + alpha1_.calls(), 0);
}

TEST_F(RouterStream, ARotatedTokenWorksWithoutARestart) {
  Answer({LastTokens("x", v1::FINISH_REASON_LENGTH)});
  StartRouter();
  folder_.Write("tenants", "alpha a-brand-new-token-0123\nbeta beta-token-0123456789\n");
  EXPECT_TRUE(
      Eventually([&] { return Generate(Text("x"), "a-brand-new-token-0123").status.ok(); }));
  EXPECT_EQ(Generate(Text("x")).status.error_code(), grpc::StatusCode::UNAUTHENTICATED);
}

TEST_F(RouterStream, OneTenantNeverReachesAnothersModelWorkersOrStatus) {
  Answer({LastTokens("x", v1::FINISH_REASON_LENGTH)});
  StartRouter();
  v1::GenerateRequest request = Text("x");
  request.set_model("private");
  const Outcome outcome = Generate(request, kAlphaToken);
  EXPECT_EQ(outcome.status.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_TRUE(Generate(Text("x"), kAlphaToken).status.ok());
  EXPECT_EQ(beta0_.calls() + beta1_.calls(), 0);

  const v1::GetTenantStatusResponse status = Status(kAlphaToken);
  EXPECT_EQ(status.tenant(), "alpha");
  EXPECT_THAT(status.DebugString(), Not(HasSubstr("beta")));
  EXPECT_THAT(status.DebugString(), Not(HasSubstr(beta0_.address())));
  grpc::ClientContext context;
  Authorize(context, kAlphaToken);
  v1::ListModelsResponse models;
  ASSERT_TRUE(stub_->ListModels(&context, {}, &models).ok());
  ASSERT_EQ(models.models_size(), 1);
  EXPECT_EQ(models.models(0).name(), "m");
  EXPECT_EQ(models.models(0).max_sequence_tokens(), 48u);
  EXPECT_EQ(models.models(0).vocabulary_size(), kVocabSize);
  EXPECT_TRUE(Generate(request, kBetaToken).status.ok());
}

TEST_F(RouterStream, AThousandStreamsNeedFewThreads) {
  StartRouter();
  constexpr int kStreams = 1000;
  struct Client {
    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientAsyncReader<v1::GenerateResponse>> reader;
  };
  grpc::CompletionQueue queue;
  std::vector<std::unique_ptr<Client>> clients;
  for (int i = 0; i < kStreams; ++i) {
    clients.push_back(std::make_unique<Client>());
    Authorize(clients.back()->context, kAlphaToken);
    clients.back()->context.set_deadline(GrpcTimeout(3 * kPatience));
    clients.back()->reader =
        stub_->AsyncGenerate(&clients.back()->context, Text("x"), &queue, clients.back().get());
  }
  std::vector<std::shared_ptr<FakeStream>> calls;
  ASSERT_TRUE(Eventually([&] { return alpha0_.calls() + alpha1_.calls() == kStreams; }));
  EXPECT_EQ(Status(kAlphaToken).requests_in_flight(), kStreams);
  EXPECT_EQ(alpha0_.calls(), alpha1_.calls());
  size_t threads = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
    threads += entry.path().empty() ? 0 : 1;
  }
  EXPECT_LT(threads, 100);
  for (auto& client : clients) client->context.TryCancel();
  ASSERT_TRUE(Eventually([&] { return Status(kAlphaToken).requests_in_flight() == 0; }));
  queue.Shutdown();
  void* tag = nullptr;
  bool ok = false;
  while (queue.Next(&tag, &ok)) {
  }
}

}  // namespace
}  // namespace palimpsest::router::testing
