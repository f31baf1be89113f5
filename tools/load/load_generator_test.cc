// The load generator against a worker service in this process.
#include "tools/load/load_generator.h"

#include <gmock/gmock.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <gtest/gtest.h>

#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/mutex.h"

namespace palimpsest::load {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Answers with tokens 0, 1, 2 ..., each in a message of its own. Prompts of one token are refused;
// those of two get one token and then nothing; those of three wait until `together` of them run.
class FakeWorker : public v1::Worker::CallbackService {
 public:
  explicit FakeWorker(int together = 0) : together_(together) {}

  grpc::ServerWriteReactor<v1::WorkerGenerateResponse>* Generate(
      grpc::CallbackServerContext* context, const v1::WorkerGenerateRequest* request) override {
    std::vector<Stream*> released;
    auto* stream = new Stream(*request);
    {
      MutexLock lock(&mu_);
      authorized_ = authorized_ && context->client_metadata().count("authorization") == 1;
      ids_.insert(request->request_id());
      conversations_.push_back(request->conversation_id());
      prompts_.emplace_back(request->prompt_token_ids().begin(), request->prompt_token_ids().end());
      if (request->prompt_token_ids_size() != 3) {
        released.push_back(stream);
      } else {
        waiting_.push_back(stream);
        if (static_cast<int>(waiting_.size()) == together_) released.swap(waiting_);
      }
    }
    for (Stream* ready : released) ready->Begin();
    return stream;
  }

  size_t requests() {
    MutexLock lock(&mu_);
    return authorized_ ? ids_.size() : 0;
  }
  // These in the order in which they came.
  std::vector<std::string> conversations() {
    MutexLock lock(&mu_);
    return conversations_;
  }
  std::vector<std::vector<int32_t>> prompts() {
    MutexLock lock(&mu_);
    return prompts_;
  }

 private:
  class Stream : public grpc::ServerWriteReactor<v1::WorkerGenerateResponse> {
   public:
    explicit Stream(const v1::WorkerGenerateRequest& request)
        : prompt_(request.prompt_token_ids_size()),
          tokens_(static_cast<int32_t>(request.sampling().max_tokens())) {}

    void Begin() {
      if (prompt_ == 1) {
        Finish({grpc::StatusCode::RESOURCE_EXHAUSTED, "the queue is full"});
      } else {
        Next();
      }
    }

    void OnWriteDone(bool ok) override {
      if (!ok || prompt_ == 2) return;
      sent_ == tokens_ ? Finish(grpc::Status::OK) : Next();
    }
    void OnCancel() override {
      if (prompt_ == 2) Finish(grpc::Status::CANCELLED);
    }
    void OnDone() override { delete this; }

   private:
    void Next() {
      response_.Clear();
      response_.add_token_ids(sent_++);
      if (sent_ == tokens_) {
        response_.mutable_usage()->set_preemptions(2);
        response_.mutable_usage()->set_cached_tokens(3);
      }
      StartWrite(&response_);
    }

    const int32_t prompt_, tokens_;
    int32_t sent_ = 0;
    v1::WorkerGenerateResponse response_;
  };

  const int together_;
  Mutex mu_;
  std::vector<Stream*> waiting_ ABSL_GUARDED_BY(mu_);
  std::set<std::string> ids_ ABSL_GUARDED_BY(mu_);
  std::vector<std::vector<int32_t>> prompts_ ABSL_GUARDED_BY(mu_);
  std::vector<std::string> conversations_ ABSL_GUARDED_BY(mu_);
  bool authorized_ ABSL_GUARDED_BY(mu_) = true;
};

class LoadGeneratorTest : public ::testing::Test {
 protected:
  LoadTarget Serve(FakeWorker& worker) {
    int port = 0;
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&worker);
    servers_.push_back(builder.BuildAndStart());
    return {.address = absl::StrCat("127.0.0.1:", port), .token = "t", .vocabulary = 10};
  }

  std::vector<std::unique_ptr<grpc::Server>> servers_;
};

ScheduledRequest At(absl::Duration due, int32_t prompt, int32_t tokens) {
  return {.due = due, .lengths = {prompt, tokens}, .seed = 1};
}

TEST_F(LoadGeneratorTest, NotesEveryTokenOfEveryTenant) {
  FakeWorker first, second;
  LoadGenerator generator({Serve(first), Serve(second)});
  const std::vector<std::vector<ScheduledRequest>> schedule = {
      {At(absl::ZeroDuration(), 4, 5), At(absl::Milliseconds(20), 4, 1)},
      {At(absl::Milliseconds(10), 4, 7)}};
  const auto records = generator.Run(schedule, {.cutoff = absl::Seconds(30)});
  ASSERT_EQ(records.size(), 2u);
  ASSERT_EQ(records[0].size(), 2u);
  ASSERT_EQ(records[1].size(), 1u);
  for (const auto& tenant : records) {
    for (const RequestRecord& record : tenant) {
      EXPECT_EQ(record.outcome, Outcome::kFinished) << record.error;
      EXPECT_GE(record.sent, record.due);
      EXPECT_GE(record.tokens.front(), record.sent);
      EXPECT_TRUE(std::is_sorted(record.tokens.begin(), record.tokens.end()));
      EXPECT_GE(record.end, record.tokens.back());
      EXPECT_EQ(record.preemptions, 2u);
    }
  }
  EXPECT_EQ(records[0][0].tokens.size(), 5u);
  EXPECT_EQ(records[0][1].tokens.size(), 1u);
  EXPECT_EQ(records[1][0].tokens.size(), 7u);
  uint64_t digest = kEmptyDigest;
  for (uint64_t id = 0; id < 7; ++id) digest = AddToDigest(digest, id);
  EXPECT_EQ(records[1][0].digest, digest);
  EXPECT_EQ(first.requests(), 2u);
  EXPECT_EQ(second.requests(), 1u);
}

// The loop is open: a request is answered only when all others run too.
TEST_F(LoadGeneratorTest, DoesNotWaitForAnswers) {
  constexpr int kStreams = 2000;
  FakeWorker worker(kStreams);
  LoadGenerator generator({Serve(worker)});
  std::vector<std::vector<ScheduledRequest>> schedule(1);
  for (int i = 0; i < kStreams; ++i) {
    schedule[0].push_back(At(absl::Microseconds(10 * i), 3, 2));
  }
  const auto records = generator.Run(schedule, {.cutoff = absl::Seconds(60)});
  for (const RequestRecord& record : records[0]) {
    ASSERT_EQ(record.outcome, Outcome::kFinished) << record.error;
  }
  EXPECT_EQ(worker.requests(), static_cast<size_t>(kStreams));
}

TEST_F(LoadGeneratorTest, ATurnContinuesPromptAndAnswerOfTheOneBefore) {
  FakeWorker worker;
  LoadGenerator generator({Serve(worker)});
  std::vector<std::vector<ScheduledRequest>> schedule(1);
  ScheduledRequest first = At(absl::ZeroDuration(), 4, 5);
  first.system_tokens = 6;
  first.system_seed = 9;
  ScheduledRequest second = At(absl::Milliseconds(30), 7, 2);
  second.seed = 8;
  second.continues = 0;
  schedule[0] = {first, second};
  const auto records = generator.Run(schedule, {.cutoff = absl::Seconds(30)});
  ASSERT_EQ(records[0].size(), 2u);
  EXPECT_EQ(records[0][1].outcome, Outcome::kFinished) << records[0][1].error;
  EXPECT_EQ(records[0][1].due, records[0][0].end + absl::Milliseconds(30));
  EXPECT_GE(records[0][1].sent, records[0][1].due);
  EXPECT_EQ(records[0][1].request, 1u);
  EXPECT_EQ(records[0][1].cached_tokens, 3u);
  EXPECT_EQ(records[0][1].prompt_tokens, 22u);
  std::vector<int32_t> text = RandomPrompt(9, 6, 10);
  const auto add = [&text](const std::vector<int32_t>& more) {
    text.insert(text.end(), more.begin(), more.end());
  };
  add(RandomPrompt(1, 4, 10));
  EXPECT_EQ(worker.prompts()[0], text);
  add({0, 1, 2, 3, 4});
  add(RandomPrompt(8, 7, 10));
  EXPECT_EQ(worker.prompts()[1], text);
  EXPECT_NE(worker.conversations()[0], "");
  EXPECT_EQ(worker.conversations()[0], worker.conversations()[1]);
}

TEST_F(LoadGeneratorTest, TurnsThatComeTooLateOrBehindAFailureAreNotSent) {
  FakeWorker worker;
  LoadGenerator generator({Serve(worker)});
  std::vector<std::vector<ScheduledRequest>> schedule(1);
  for (const auto& [prompt, wait] :
       {std::pair(1, absl::ZeroDuration()), std::pair(4, absl::Seconds(20)),
        std::pair(5, absl::ZeroDuration())}) {
    schedule[0].push_back(At(absl::ZeroDuration(), prompt, 2));
    schedule[0].push_back(At(wait, 8, 2));
    schedule[0].back().continues = schedule[0].size() - 2;
  }
  const auto records =
      generator.Run(schedule, {.cutoff = absl::Seconds(30), .last_turn = absl::Seconds(10)});
  std::vector<size_t> sent;
  for (const RequestRecord& record : records[0]) sent.push_back(record.request);
  EXPECT_THAT(sent, ElementsAre(0, 2, 4, 5));
  EXPECT_EQ(records[0][0].outcome, Outcome::kFailed);
}

TEST_F(LoadGeneratorTest, TellsRefusedAndGivenUpRequestsApart) {
  FakeWorker worker;
  LoadGenerator generator({Serve(worker)});
  const std::vector<std::vector<ScheduledRequest>> schedule = {
      {At(absl::ZeroDuration(), 1, 5), At(absl::ZeroDuration(), 2, 5)}};
  const auto records = generator.Run(schedule, {.cutoff = absl::Milliseconds(500)});
  EXPECT_EQ(records[0][0].outcome, Outcome::kFailed);
  EXPECT_THAT(records[0][0].error, HasSubstr("the queue is full"));
  EXPECT_EQ(records[0][1].outcome, Outcome::kUnfinished);
  EXPECT_EQ(records[0][1].tokens.size(), 1u);
  EXPECT_GE(records[0][1].end, absl::Milliseconds(500));
}

TEST_F(LoadGeneratorTest, AWorkerThatIsNotThereFailsTheRequests) {
  LoadGenerator generator({{.address = "unix:/nowhere.sock", .token = "t", .vocabulary = 10}});
  const std::vector<std::vector<ScheduledRequest>> schedule = {{At(absl::ZeroDuration(), 4, 5)}};
  EXPECT_EQ(generator.Run(schedule, {.cutoff = absl::Seconds(20)})[0][0].outcome, Outcome::kFailed);
}

TEST_F(LoadGeneratorTest, ReportsProgress) {
  FakeWorker worker;
  LoadGenerator generator({Serve(worker)});
  const std::vector<std::vector<ScheduledRequest>> schedule = {
      {At(absl::ZeroDuration(), 4, 5), At(absl::Milliseconds(1500), 4, 5)}};
  std::vector<LoadProgress> seen;
  generator.Run(schedule, {.cutoff = absl::Seconds(20)},
                [&](const LoadProgress& now) { seen.push_back(now); });
  ASSERT_FALSE(seen.empty());
  EXPECT_EQ(seen[0].requests, 2);
  EXPECT_EQ(seen[0].sent, 1);
  EXPECT_GE(seen[0].now, absl::Seconds(1));
}

}  // namespace
}  // namespace palimpsest::load
