// What goes wrong: clients that leave, workers that die, queues that fill, drains.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <thread>

#include "absl/strings/str_cat.h"
#include "common/fd.h"
#include "common/grpc_time.h"
#include "common/monotonic_time.h"
#include "router/server/health_probe.h"
#include "router/server/testing/router_fixture.h"

namespace palimpsest::router::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class RouterFault : public RouterFixture {
 protected:
  // Only one worker of alpha, so that the test knows where a call goes.
  void UseOneWorker() { config_.tenants[0].models[0].workers = {alpha0_.address()}; }

  struct Call {
    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientReader<v1::GenerateResponse>> reader;
  };
  std::unique_ptr<Call> Open(const v1::GenerateRequest& request) {
    auto call = std::make_unique<Call>();
    Authorize(call->context, kAlphaToken);
    call->reader = stub_->Generate(&call->context, request);
    return call;
  }

  static v1::GenerateRequest TextWithLogprobs() {
    v1::GenerateRequest request = Text("x");
    request.mutable_sampling()->set_logprobs(20);
    return request;
  }

  // 40 messages of 400 KB are far more than the connections buffer.
  static constexpr int kMessages = 40;
  static void SendMoreThanFits(FakeStream& stream) {
    v1::WorkerGenerateResponse message = Tokens("a");
    v1::TokenLogprob* logprob = message.add_logprobs();
    for (int i = 0; i < 40'000; ++i) logprob->add_top()->set_token_id(1'000'000);
    for (int i = 0; i < kMessages; ++i) stream.Send(message);
  }

  bool NothingInFlight() {
    return Eventually([&] {
      const v1::GetTenantStatusResponse status = Status(kAlphaToken);
      uint32_t busy = status.requests_in_flight() + status.requests_waiting();
      for (const v1::WorkerStatus& worker : status.workers()) busy += worker.requests_in_flight();
      return busy == 0;
    });
  }
};

TEST_F(RouterFault, CancellationReachesTheWorker) {
  UseOneWorker();
  StartRouter(1);
  const std::unique_ptr<Call> call = Open(Text("x"));
  const std::shared_ptr<FakeStream> stream = alpha0_.AwaitCall();
  stream->Send(Tokens("a"));
  v1::GenerateResponse response;
  ASSERT_TRUE(call->reader->Read(&response));
  call->context.TryCancel();
  EXPECT_TRUE(stream->AwaitCancelled());
  EXPECT_EQ(call->reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_TRUE(NothingInFlight());
}

TEST_F(RouterFault, TheClientsDeadlineEndsTheWorkersCall) {
  UseOneWorker();
  StartRouter(1);
  grpc::ClientContext context;
  Authorize(context, kAlphaToken);
  context.set_deadline(GrpcTimeout(absl::Milliseconds(300)));
  const auto reader = stub_->Generate(&context, Text("x"));
  const std::shared_ptr<FakeStream> stream = alpha0_.AwaitCall();
  ASSERT_NE(stream, nullptr);
  EXPECT_TRUE(stream->AwaitCancelled());
  EXPECT_EQ(Read(context, *reader).status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_TRUE(NothingInFlight());
}

TEST_F(RouterFault, AClientThatVanishesCancelsTheWorker) {
  UseOneWorker();
  StartRouter(1);
  CuttableProxy proxy(router_->port());
  const auto stub =
      v1::Router::NewStub(grpc::CreateChannel(proxy.address(), grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  Authorize(context, kAlphaToken);
  const auto reader = stub->Generate(&context, Text("x"));
  const std::shared_ptr<FakeStream> stream = alpha0_.AwaitCall();
  stream->Send(Tokens("a"));
  v1::GenerateResponse response;
  ASSERT_TRUE(reader->Read(&response));
  proxy.Cut();
  EXPECT_TRUE(stream->AwaitCancelled());
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_TRUE(NothingInFlight());
}

TEST_F(RouterFault, ASlowClientStopsTheWorkerAndIsGivenUp) {
  UseOneWorker();
  config_.stall_timeout = absl::Milliseconds(300);
  StartRouter(1);
  const std::unique_ptr<Call> call = Open(TextWithLogprobs());
  const std::shared_ptr<FakeStream> stream = alpha0_.AwaitCall();
  SendMoreThanFits(*stream);
  EXPECT_TRUE(stream->AwaitCancelled());
  EXPECT_LT(stream->written(), kMessages);
  EXPECT_TRUE(NothingInFlight());
}

TEST_F(RouterFault, AClientThatStopsReadingDelaysADrainForItsPatienceOnly) {
  UseOneWorker();
  StartRouter(1);
  const std::unique_ptr<Call> call = Open(TextWithLogprobs());
  const std::shared_ptr<FakeStream> stream = alpha0_.AwaitCall();
  SendMoreThanFits(*stream);
  const absl::Time begin = MonotonicNow();
  router_->Drain(absl::Milliseconds(200));
  EXPECT_LT(MonotonicNow() - begin, absl::Seconds(10));
  EXPECT_TRUE(stream->AwaitCancelled());
  EXPECT_FALSE(Read(call->context, *call->reader).status.ok());
}

TEST_F(RouterFault, AWorkerThatDiesBeforeItsFirstTokenIsReplacedUnseen) {
  CuttableProxy proxy(std::stoi(alpha0_.address().substr(10)));
  config_.tenants[0].models[0].workers = {proxy.address(), alpha1_.address()};
  StartRouter();
  alpha1_.SetHandler([](FakeStream& stream) {
    stream.Send(LastTokens("fine", v1::FINISH_REASON_LENGTH));
    stream.End(grpc::Status::OK);
  });
  // Requests alternate, so one of two reaches the worker that will die.
  std::thread killer([&] {
    if (alpha0_.AwaitCall() != nullptr) proxy.Cut();
  });
  for (int i = 0; i < 2; ++i) {
    const Outcome outcome = Generate(Text("x"));
    EXPECT_TRUE(outcome.status.ok()) << outcome.status.error_message();
    EXPECT_EQ(outcome.text, "fine");
  }
  killer.join();
  EXPECT_EQ(alpha0_.calls(), 1);
  EXPECT_TRUE(NothingInFlight());
}

TEST_F(RouterFault, AStreamWhoseWorkerDiesGoesOnAtAnother) {
  CuttableProxy proxy(std::stoi(alpha0_.address().substr(10)));
  config_.tenants[0].models[0].workers = {proxy.address(), alpha1_.address()};
  StartRouter();
  v1::GenerateRequest request = Text("pq");
  request.mutable_sampling()->add_stop("cd");
  // One of the first two requests, opened together, goes to the worker that will die.
  const std::unique_ptr<Call> one = Open(request);
  const std::unique_ptr<Call> two = Open(request);
  const std::shared_ptr<FakeStream> doomed = alpha0_.AwaitCall();
  const std::shared_ptr<FakeStream> healthy = alpha1_.AwaitCall();
  ASSERT_TRUE(doomed != nullptr && healthy != nullptr);
  healthy->Send(Tokens("Z"));
  doomed->Send(Tokens("abc"));
  v1::GenerateResponse first_of_one;
  v1::GenerateResponse first_of_two;
  ASSERT_TRUE(one->reader->Read(&first_of_one) && two->reader->Read(&first_of_two));
  Call& cut = first_of_one.text() == "Z" ? *two : *one;
  EXPECT_EQ((&cut == one.get() ? first_of_one : first_of_two).text(), "ab") << "c may begin a stop";
  proxy.Cut();

  const std::shared_ptr<FakeStream> resumed = alpha1_.AwaitCall();
  ASSERT_NE(resumed, nullptr);
  EXPECT_THAT(resumed->request().prompt_token_ids(), ElementsAre('p', 'q', 'a', 'b', 'c'));
  EXPECT_EQ(resumed->request().output_offset(), 3);
  EXPECT_EQ(resumed->request().sampling().seed(), doomed->request().sampling().seed());
  EXPECT_EQ(resumed->request().sampling().max_tokens(), doomed->request().sampling().max_tokens());
  resumed->Send(Tokens("d"));
  const Outcome outcome = Read(cut.context, *cut.reader);
  EXPECT_TRUE(outcome.status.ok()) << outcome.status.error_message();
  EXPECT_EQ(outcome.text, "") << "cd is a stop string over the border of two workers";
  EXPECT_EQ(outcome.last.finish_reason(), v1::FINISH_REASON_STOP_STRING);
  EXPECT_EQ(outcome.last.usage().prompt_tokens(), 2);
  EXPECT_EQ(outcome.last.usage().output_tokens(), 4);
  EXPECT_TRUE(resumed->AwaitCancelled());
  healthy->Send(LastTokens("", v1::FINISH_REASON_LENGTH));
  healthy->End(grpc::Status::OK);
}

TEST_F(RouterFault, NoOtherWorkerMeansUnavailableAndSaysSo) {
  CuttableProxy proxy(std::stoi(alpha0_.address().substr(10)));
  config_.tenants[0].models[0].workers = {proxy.address()};
  StartRouter(1);
  const std::unique_ptr<Call> call = Open(Text("x"));
  const std::shared_ptr<FakeStream> stream = alpha0_.AwaitCall();
  stream->Send(Tokens("abc"));
  v1::GenerateResponse response;
  ASSERT_TRUE(call->reader->Read(&response));
  proxy.Cut();
  const Outcome outcome = Read(call->context, *call->reader);
  EXPECT_EQ(outcome.status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(outcome.status.error_message(), HasSubstr("lost after 3 tokens"));
  EXPECT_TRUE(Eventually([&] { return Healthy(kAlphaToken) == 0; }));
  EXPECT_EQ(Generate(Text("x")).status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_TRUE(NothingInFlight());
}

TEST_F(RouterFault, AStreamWhoseWorkerHangsGoesOnAtAnother) {
  CuttableProxy proxy(std::stoi(alpha0_.address().substr(10)));
  config_.tenants[0].models[0].workers = {proxy.address(), alpha1_.address()};
  config_.health_timeout = absl::Seconds(1);
  config_.silence_timeout = absl::Seconds(1);
  StartRouter();
  const std::unique_ptr<Call> one = Open(Text("pq"));
  const std::unique_ptr<Call> two = Open(Text("pq"));
  const std::shared_ptr<FakeStream> doomed = alpha0_.AwaitCall();
  const std::shared_ptr<FakeStream> healthy = alpha1_.AwaitCall();
  ASSERT_TRUE(doomed != nullptr && healthy != nullptr);
  healthy->Send(Tokens("Z"));
  doomed->Send(Tokens("ab"));
  v1::GenerateResponse first_of_one;
  v1::GenerateResponse first_of_two;
  ASSERT_TRUE(one->reader->Read(&first_of_one) && two->reader->Read(&first_of_two));
  Call& hung = first_of_one.text() == "Z" ? *two : *one;
  Call& undisturbed = first_of_one.text() == "Z" ? *one : *two;
  proxy.Freeze();

  const std::shared_ptr<FakeStream> resumed = alpha1_.AwaitCall();
  ASSERT_NE(resumed, nullptr);
  EXPECT_THAT(resumed->request().prompt_token_ids(), ElementsAre('p', 'q', 'a', 'b'));
  EXPECT_EQ(resumed->request().output_offset(), 2);
  resumed->Send(LastTokens("c", v1::FINISH_REASON_LENGTH));
  resumed->End(grpc::Status::OK);
  EXPECT_EQ(Read(hung.context, *hung.reader).text, "c");
  // Silent for as long, but at a worker that answers its health checks.
  healthy->Send(LastTokens("Y", v1::FINISH_REASON_LENGTH));
  healthy->End(grpc::Status::OK);
  const Outcome outcome = Read(undisturbed.context, *undisturbed.reader);
  EXPECT_TRUE(outcome.status.ok()) << outcome.status.error_message();
  EXPECT_EQ(outcome.text, "Y");
}

TEST_F(RouterFault, AHungWorkerWithoutAnotherEndsTheStreamWithTheReason) {
  CuttableProxy proxy(std::stoi(alpha0_.address().substr(10)));
  config_.tenants[0].models[0].workers = {proxy.address()};
  config_.health_timeout = absl::Seconds(1);
  config_.silence_timeout = absl::Seconds(1);
  StartRouter(1);
  const std::unique_ptr<Call> call = Open(Text("x"));
  const std::shared_ptr<FakeStream> stream = alpha0_.AwaitCall();
  stream->Send(Tokens("abc"));
  v1::GenerateResponse response;
  ASSERT_TRUE(call->reader->Read(&response));
  proxy.Freeze();
  const Outcome outcome = Read(call->context, *call->reader);
  EXPECT_EQ(outcome.status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(outcome.status.error_message(),
              HasSubstr("lost after 3 tokens and no other worker can continue: the worker has "
                        "answered neither this request nor a health check for 1s"));
  EXPECT_TRUE(NothingInFlight());
}

TEST_F(RouterFault, AnOutputThatWasCompleteNeedsNoOtherWorker) {
  UseOneWorker();
  StartRouter(1);
  v1::GenerateRequest request = Text("x");
  request.mutable_sampling()->set_max_tokens(2);
  alpha0_.SetHandler([](FakeStream& stream) {
    stream.Send(Tokens("ab"));
    stream.End({grpc::StatusCode::UNAVAILABLE, "died before its last word"});
  });
  const Outcome outcome = Generate(request);
  EXPECT_TRUE(outcome.status.ok()) << outcome.status.error_message();
  EXPECT_EQ(outcome.text, "ab");
  EXPECT_EQ(outcome.last.finish_reason(), v1::FINISH_REASON_LENGTH);
  EXPECT_EQ(outcome.last.usage().output_tokens(), 2);
}

TEST_F(RouterFault, AHintOfTheWorkerReachesTheClient) {
  UseOneWorker();
  StartRouter(1);
  alpha0_.SetHandler([](FakeStream& stream) {
    stream.End({grpc::StatusCode::UNAVAILABLE, "no memory for the model"}, 1234);
  });
  const Outcome outcome = Generate(Text("x"));
  EXPECT_EQ(outcome.status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(outcome.status.error_message(), HasSubstr("no memory for the model"));
  EXPECT_EQ(outcome.retry_after_ms, "1234");
  EXPECT_EQ(Healthy(kAlphaToken), 1) << "a worker without memory is well";
}

TEST_F(RouterFault, AttemptsAreBounded) {
  config_.worker_attempts = 2;
  StartRouter();
  const auto refuse = [](FakeStream& stream) {
    stream.End({grpc::StatusCode::RESOURCE_EXHAUSTED, "queue full"});
  };
  alpha0_.SetHandler(refuse);
  alpha1_.SetHandler(refuse);
  EXPECT_EQ(Generate(Text("x")).status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(alpha0_.calls() + alpha1_.calls(), 2);
}

TEST_F(RouterFault, AWorkerThatRefusesTheRouterIsNotTheClientsFault) {
  UseOneWorker();
  StartRouter(1);
  alpha0_.SetToken("another token");
  EXPECT_EQ(Generate(Text("x")).status.error_code(), grpc::StatusCode::INTERNAL);
}

TEST_F(RouterFault, ARotatedWorkerTokenIsPresented) {
  UseOneWorker();
  StartRouter(1);
  alpha0_.SetHandler([](FakeStream& stream) {
    stream.Send(LastTokens("a", v1::FINISH_REASON_LENGTH));
    stream.End(grpc::Status::OK);
  });
  EXPECT_TRUE(Generate(Text("x")).status.ok());
  EXPECT_EQ(alpha0_.last_authorization(), "Bearer router-secret-token-0123");
  folder_.Write("router", "next-secret-token-0123\nrouter-secret-token-0123\n");
  EXPECT_TRUE(Eventually([&] {
    return Generate(Text("x")).status.ok() &&
           alpha0_.last_authorization() == "Bearer next-secret-token-0123";
  }));
}

TEST_F(RouterFault, AFullQueueIsResourceExhaustedWithAHint) {
  UseOneWorker();
  config_.tenants[0].limits = {1, 1, absl::Seconds(60)};
  StartRouter(1);
  const std::unique_ptr<Call> running = Open(Text("x"));
  const std::shared_ptr<FakeStream> stream = alpha0_.AwaitCall();
  const std::unique_ptr<Call> waiting = Open(Text("x"));
  ASSERT_TRUE(Eventually([&] { return Status(kAlphaToken).requests_waiting() == 1; }));
  const Outcome refused = Generate(Text("x"));
  EXPECT_EQ(refused.status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(refused.retry_after_ms, "1000");

  stream->Send(LastTokens("a", v1::FINISH_REASON_LENGTH));
  stream->End(grpc::Status::OK);
  EXPECT_TRUE(Read(running->context, *running->reader).status.ok());
  const std::shared_ptr<FakeStream> second = alpha0_.AwaitCall();
  second->Send(LastTokens("b", v1::FINISH_REASON_LENGTH));
  second->End(grpc::Status::OK);
  EXPECT_EQ(Read(waiting->context, *waiting->reader).text, "b");
}

TEST_F(RouterFault, AWaitingRequestExpiresOrIsAbandoned) {
  UseOneWorker();
  config_.tenants[0].limits = {1, 2, absl::Milliseconds(200)};
  StartRouter(1);
  const std::unique_ptr<Call> running = Open(Text("x"));
  const std::shared_ptr<FakeStream> stream = alpha0_.AwaitCall();
  EXPECT_EQ(Generate(Text("x")).status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  const std::unique_ptr<Call> abandoned = Open(Text("x"));
  ASSERT_TRUE(Eventually([&] { return Status(kAlphaToken).requests_waiting() == 1; }));
  abandoned->context.TryCancel();
  EXPECT_EQ(Read(abandoned->context, *abandoned->reader).status.error_code(),
            grpc::StatusCode::CANCELLED);
  // The client knows of its cancellation before the router does.
  ASSERT_TRUE(Eventually([&] { return Status(kAlphaToken).requests_waiting() == 0; }));
  running->context.TryCancel();
  EXPECT_TRUE(stream->AwaitCancelled());
  EXPECT_TRUE(NothingInFlight());
  EXPECT_EQ(alpha0_.calls(), 1);
}

TEST_F(RouterFault, ADrainedTenantTakesNothingAndTheOtherIsUnaffected) {
  StartRouter();
  beta0_.SetHandler([](FakeStream& stream) {
    stream.Send(LastTokens("b", v1::FINISH_REASON_LENGTH));
    stream.End(grpc::Status::OK);
  });
  grpc::ClientContext context;
  Authorize(context, kAlphaToken);
  v1::DrainTenantResponse response;
  ASSERT_TRUE(stub_->DrainTenant(&context, {}, &response).ok());
  EXPECT_EQ(response.remaining_requests(), 0);
  EXPECT_TRUE(alpha0_.draining() && alpha1_.draining());
  EXPECT_FALSE(beta0_.draining() || beta1_.draining());
  const Outcome refused = Generate(Text("x"));
  EXPECT_EQ(refused.status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(refused.status.error_message(), HasSubstr("draining"));
  EXPECT_TRUE(Generate(Text("x"), kBetaToken).status.ok());
}

TEST_F(RouterFault, AServerThatDrainsFinishesWhatRuns) {
  UseOneWorker();
  StartRouter(1);
  const std::unique_ptr<Call> call = Open(Text("x"));
  const std::shared_ptr<FakeStream> stream = alpha0_.AwaitCall();
  stream->Send(Tokens("a"));
  v1::GenerateResponse response;
  ASSERT_TRUE(call->reader->Read(&response));
  std::thread drain([&] { router_->Drain(kPatience); });
  const auto fresh = v1::Router::NewStub(grpc::CreateChannel(
      absl::StrCat("127.0.0.1:", router_->port()), grpc::InsecureChannelCredentials()));
  EXPECT_TRUE(Eventually([&] {
    grpc::ClientContext context;
    Authorize(context, kAlphaToken);
    v1::ListModelsResponse models;
    return !fresh->ListModels(&context, {}, &models).ok();
  }));
  stream->Send(LastTokens("b", v1::FINISH_REASON_LENGTH));
  stream->End(grpc::Status::OK);
  const Outcome outcome = Read(call->context, *call->reader);
  EXPECT_TRUE(outcome.status.ok()) << outcome.status.error_message();
  EXPECT_EQ(outcome.text, "b");
  drain.join();
}

// What an HTTP server answers to a GET of `path`.
std::string HttpGet(const std::string& address, const std::string& path) {
  const size_t colon = address.rfind(':');
  sockaddr_in server = {};
  server.sin_family = AF_INET;
  server.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  server.sin_port = htons(static_cast<uint16_t>(std::stoi(address.substr(colon + 1))));
  const UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(connect(fd.get(), reinterpret_cast<const sockaddr*>(&server), sizeof server), 0);
  const std::string request = absl::StrCat("GET ", path, " HTTP/1.0\r\n\r\n");
  EXPECT_EQ(send(fd.get(), request.data(), request.size(), 0), request.size());
  std::string answer;
  char buffer[4096];
  ssize_t count = 0;
  while ((count = recv(fd.get(), buffer, sizeof buffer, 0)) > 0) {
    answer.append(buffer, static_cast<size_t>(count));
  }
  return answer;
}

TEST_F(RouterFault, MetricsCountWhatHappened) {
  UseOneWorker();
  config_.metrics_listen = "127.0.0.1:0";
  StartRouter(1);
  alpha0_.SetHandler([](FakeStream& stream) {
    stream.Send(LastTokens("abc", v1::FINISH_REASON_LENGTH));
    stream.End(grpc::Status::OK);
  });
  EXPECT_TRUE(Generate(Text("x")).status.ok());
  EXPECT_FALSE(Generate(Text("")).status.ok());
  ASSERT_TRUE(NothingInFlight());
  const std::string text = HttpGet(router_->metrics_address(), "/metrics");
  for (const char* line :
       {"palimpsest_router_requests_total{code=\"OK\",tenant=\"alpha\"} 1",
        "palimpsest_router_requests_total{code=\"INVALID_ARGUMENT\",tenant=\"alpha\"} 1",
        "palimpsest_router_tokens_total{kind=\"generated\",tenant=\"alpha\"} 3",
        "palimpsest_router_time_to_first_token_seconds_count{tenant=\"alpha\"} 1"}) {
    EXPECT_THAT(text, HasSubstr(line));
  }
}

TEST_F(RouterFault, HealthServiceSaysServing) {
  StartRouter();
  grpc::ClientContext context;
  context.set_deadline(GrpcTimeout(kPatience));
  HealthProbe probe(channel_);
  Notification done;
  absl::Status health = absl::UnknownError("not answered");
  probe.Check(&context, [&](absl::Status status) {
    health = std::move(status);
    done.Notify();
  });
  ASSERT_TRUE(done.WaitForNotificationWithTimeout(kPatience));
  EXPECT_TRUE(health.ok()) << health;
}

}  // namespace
}  // namespace palimpsest::router::testing
