#include "worker/server/doorman.h"

#include <grpc/grpc.h>

#include <atomic>
#include <cstdlib>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/file.h"
#include "common/grpc_status.h"
#include "common/grpc_time.h"
#include "common/monotonic_time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

using ::testing::HasSubstr;

// Answers each request with three messages.
class AwakeWorker final : public v1::Worker::Service {
 public:
  explicit AwakeWorker(int socket) {
    grpc::ServerBuilder builder;
    taker_ = std::make_unique<ConnectionTaker>(socket, builder);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    EXPECT_TRUE(taker_->Start().ok());
  }
  ~AwakeWorker() override {
    taker_->Stop();
    server_->Shutdown(GrpcTimeout(absl::ZeroDuration()));
  }

  grpc::Status Generate(grpc::ServerContext* context, const v1::WorkerGenerateRequest* request,
                        grpc::ServerWriter<v1::WorkerGenerateResponse>* writer) override {
    const auto token = context->client_metadata().find("authorization");
    if (token == context->client_metadata().end() || token->second != "Bearer secret") {
      return {grpc::StatusCode::UNAUTHENTICATED, "the token was not passed on"};
    }
    if (request->prompt_token_ids().empty()) {
      context->AddTrailingMetadata(kRetryAfterMetadata, "1234");
      return {grpc::StatusCode::INVALID_ARGUMENT, "no prompt"};
    }
    for (int32_t i = 0; i < 3; ++i) {
      v1::WorkerGenerateResponse response;
      response.add_token_ids(request->prompt_token_ids(0) + i);
      writer->Write(response);
    }
    return grpc::Status::OK;
  }
  grpc::Status Drain(grpc::ServerContext*, const v1::DrainRequest*,
                     v1::DrainResponse* response) override {
    response->set_remaining_requests(7);
    return grpc::Status::OK;
  }

 private:
  std::unique_ptr<ConnectionTaker> taker_;
  std::unique_ptr<grpc::Server> server_;
};

struct Answer {
  grpc::Status status;
  std::vector<int32_t> tokens;
};

class DoormanTest : public ::testing::Test {
 protected:
  DoormanTest() : listen_(Listen("127.0.0.1:0").value()) {
    const std::string path = std::string(std::getenv("TEST_TMPDIR")) + "/router_token";
    EXPECT_TRUE(WriteFileAtomically(path, "secret\n", 0600).ok());
    tokens_ = SecretFile::Open(path).value();
    stub_ = Connect();
  }

  void Start(int max_requests = 8, bool draining = false) {
    Doorman::Options options;
    options.stats.set_tenant("alpha");
    options.stats.set_queue_capacity(5);
    options.stats.set_draining(draining);
    options.router_tokens = tokens_;
    options.address = listen_.address;
    options.wake = [this] { ++woken_; };
    options.max_requests = max_requests;
    doorman_ = std::make_unique<Doorman>(std::move(options));
    ASSERT_TRUE(doorman_->Start(listen_.socket.get()).ok());
  }

  std::unique_ptr<v1::Worker::Stub> Connect() {
    grpc::ChannelArguments own;
    own.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    return v1::Worker::NewStub(
        grpc::CreateCustomChannel(listen_.address, grpc::InsecureChannelCredentials(), own));
  }

  static std::unique_ptr<grpc::ClientContext> Context(const std::string& token = "secret") {
    auto context = std::make_unique<grpc::ClientContext>();
    context->AddMetadata("authorization", "Bearer " + token);
    context->set_deadline(GrpcTimeout(absl::Seconds(30)));
    return context;
  }

  Answer Generate(std::vector<int32_t> prompt, grpc::ClientContext* context) {
    v1::WorkerGenerateRequest request;
    request.mutable_prompt_token_ids()->Add(prompt.begin(), prompt.end());
    const auto reader = stub_->Generate(context, request);
    Answer answer;
    v1::WorkerGenerateResponse response;
    while (reader->Read(&response)) answer.tokens.push_back(response.token_ids(0));
    answer.status = reader->Finish();
    return answer;
  }
  std::future<Answer> GenerateAsync(int32_t first) {
    return std::async(std::launch::async, [this, first] {
      const auto context = Context();
      return Generate({first}, context.get());
    });
  }

  v1::WorkerStats Stats() {
    v1::WorkerStats stats;
    const grpc::Status status = stub_->GetStats(Context().get(), {}, &stats);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return stats;
  }
  grpc::Status Drain(v1::DrainResponse* response) {
    return stub_->Drain(Context().get(), {}, response);
  }

  void AwaitWoken() {
    const absl::Time deadline = MonotonicNow() + absl::Seconds(20);
    while (woken_ == 0 && MonotonicNow() < deadline) std::this_thread::yield();
    ASSERT_EQ(woken_, 1);
  }

  ListenSocket listen_;
  std::shared_ptr<const SecretFile> tokens_;
  std::atomic<int> woken_ = 0;
  std::unique_ptr<Doorman> doorman_;
  std::unique_ptr<v1::Worker::Stub> stub_;
};

TEST_F(DoormanTest, StatisticsAreAnsweredWithoutWaking) {
  Start();
  const v1::WorkerStats stats = Stats();
  EXPECT_EQ(stats.tenant(), "alpha");
  EXPECT_EQ(stats.queue_capacity(), 5u);
  EXPECT_FALSE(stats.draining());
  EXPECT_EQ(woken_, 0);
}

TEST_F(DoormanTest, HintsAreForWhoIsAwake) {
  Start();
  v1::WorkerHintRequest request;
  v1::WorkerHintResponse response;
  const grpc::Status status = stub_->HintConversation(Context().get(), request, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(status.error_message(), ::testing::HasSubstr("sleeps"));
  EXPECT_EQ(stub_->HintConversation(Context("guess").get(), request, &response).error_code(),
            grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_EQ(woken_, 0);
}

TEST_F(DoormanTest, StrangersNeitherWakeNorLearnAnything) {
  Start();
  EXPECT_EQ(Generate({1}, Context("guess").get()).status.error_code(),
            grpc::StatusCode::UNAUTHENTICATED);
  v1::WorkerStats stats;
  EXPECT_EQ(stub_->GetStats(Context("guess").get(), {}, &stats).error_code(),
            grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_EQ(stats.tenant(), "");
  v1::DrainResponse drained;
  EXPECT_EQ(stub_->Drain(Context("guess").get(), {}, &drained).error_code(),
            grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_EQ(woken_, 0);
  EXPECT_FALSE(Stats().draining());
}

TEST_F(DoormanTest, RequestsThatWaitArePassedThroughOnceItServes) {
  Start();
  std::vector<std::future<Answer>> answers;
  for (int32_t i = 0; i < 4; ++i) answers.push_back(GenerateAsync(10 * i));
  AwaitWoken();
  AwakeWorker worker(listen_.socket.get());
  doorman_->Open();
  for (int32_t i = 0; i < 4; ++i) {
    const Answer answer = answers[i].get();
    EXPECT_TRUE(answer.status.ok()) << answer.status.error_message();
    EXPECT_THAT(answer.tokens, ::testing::ElementsAre(10 * i, 10 * i + 1, 10 * i + 2));
  }
  EXPECT_EQ(woken_, 1);
  // On the connection to the doorman, or on a new one.
  EXPECT_TRUE(Generate({5}, Context().get()).status.ok());
}

TEST_F(DoormanTest, ErrorsAndHintsComeThroughAsTheyAre) {
  Start();
  auto first = GenerateAsync(1);
  AwaitWoken();
  AwakeWorker worker(listen_.socket.get());
  doorman_->Open();
  EXPECT_TRUE(first.get().status.ok());
  const auto context = Context();
  const Answer answer = Generate({}, context.get());
  EXPECT_EQ(answer.status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(answer.status.error_message(), "no prompt");
  EXPECT_EQ(context->GetServerTrailingMetadata().count(kRetryAfterMetadata), 1u);
}

TEST_F(DoormanTest, WorkerThatDoesNotComeFailsThoseWhoWait) {
  Start();
  auto waits = GenerateAsync(1);
  AwaitWoken();
  doorman_->Fail(absl::UnavailableError("it cannot start"));
  const Answer answer = waits.get();
  EXPECT_EQ(answer.status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(answer.status.error_message(), HasSubstr("it cannot start"));
  EXPECT_EQ(Generate({1}, Context().get()).status.error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(DoormanTest, EndOfTheDoormanIsToldToThoseWhoWait) {
  Start();
  auto waits = GenerateAsync(1);
  AwaitWoken();
  doorman_.reset();
  const Answer answer = waits.get();
  EXPECT_EQ(answer.status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(answer.status.error_message(), HasSubstr("shutting down"));
}

TEST_F(DoormanTest, NoMoreWaitThanMay) {
  Start(/*max_requests=*/1);
  auto waits = GenerateAsync(1);
  AwaitWoken();
  const Answer refused = Generate({2}, Context().get());
  EXPECT_EQ(refused.status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(refused.status.error_message(), HasSubstr("the queue is full"));
  AwakeWorker worker(listen_.socket.get());
  doorman_->Open();
  EXPECT_TRUE(waits.get().status.ok());
}

TEST_F(DoormanTest, CallerThatGivesUpLeavesItsPlace) {
  Start(/*max_requests=*/1);
  const auto context = Context();
  auto waits = std::async(std::launch::async, [&] { return Generate({1}, context.get()).status; });
  AwaitWoken();
  context->TryCancel();
  EXPECT_EQ(waits.get().error_code(), grpc::StatusCode::CANCELLED);
  AwakeWorker worker(listen_.socket.get());
  const absl::Time deadline = MonotonicNow() + absl::Seconds(20);
  std::future<Answer> next = GenerateAsync(2);
  doorman_->Open();
  Answer answer = next.get();
  // Its place is free within a look of the doorman.
  while (answer.status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED &&
         MonotonicNow() < deadline) {
    answer = Generate({2}, Context().get());
  }
  EXPECT_TRUE(answer.status.ok()) << answer.status.error_message();
}

TEST_F(DoormanTest, DrainedSleeperIsNotWoken) {
  Start();
  v1::DrainResponse drained;
  EXPECT_TRUE(Drain(&drained).ok());
  EXPECT_EQ(drained.remaining_requests(), 0u);
  EXPECT_TRUE(Stats().draining());
  const Answer refused = Generate({1}, Context().get());
  EXPECT_EQ(refused.status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(refused.status.error_message(), HasSubstr("draining"));
  EXPECT_EQ(woken_, 0);
}

TEST_F(DoormanTest, WorkerThatWasDrainedBeforeItSleptStaysSo) {
  Start(8, /*draining=*/true);
  EXPECT_TRUE(Stats().draining());
  EXPECT_EQ(Generate({1}, Context().get()).status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(woken_, 0);
}

TEST_F(DoormanTest, DrainThatComesWhileItWakesReachesTheWorker) {
  Start();
  auto waits = GenerateAsync(1);
  AwaitWoken();
  auto drain = std::async(std::launch::async, [this] {
    v1::DrainResponse drained;
    const grpc::Status status = Drain(&drained);
    return std::pair(status.error_code(), drained.remaining_requests());
  });
  AwakeWorker worker(listen_.socket.get());
  doorman_->Open();
  EXPECT_EQ(drain.get(), std::pair(grpc::StatusCode::OK, 7u));
  EXPECT_TRUE(waits.get().status.ok());
}

}  // namespace
}  // namespace palimpsest
