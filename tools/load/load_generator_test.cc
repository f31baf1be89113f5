// The load generator against a worker service in this process.
#include "tools/load/load_generator.h"

#include <gmock/gmock.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <gtest/gtest.h>

#include <set>

#include "absl/strings/str_cat.h"
#include "common/mutex.h"

namespace palimpsest::load {
namespace {

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
      if (sent_ == tokens_) response_.mutable_usage()->set_preemptions(2);
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
  const auto records = generator.Run(schedule, absl::Seconds(30));
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
  const auto records = generator.Run(schedule, absl::Seconds(60));
  for (const RequestRecord& record : records[0]) {
    ASSERT_EQ(record.outcome, Outcome::kFinished) << record.error;
  }
  EXPECT_EQ(worker.requests(), static_cast<size_t>(kStreams));
}

TEST_F(LoadGeneratorTest, TellsRefusedAndGivenUpRequestsApart) {
  FakeWorker worker;
  LoadGenerator generator({Serve(worker)});
  const std::vector<std::vector<ScheduledRequest>> schedule = {
      {At(absl::ZeroDuration(), 1, 5), At(absl::ZeroDuration(), 2, 5)}};
  const auto records = generator.Run(schedule, absl::Milliseconds(500));
  EXPECT_EQ(records[0][0].outcome, Outcome::kFailed);
  EXPECT_THAT(records[0][0].error, HasSubstr("the queue is full"));
  EXPECT_EQ(records[0][1].outcome, Outcome::kUnfinished);
  EXPECT_EQ(records[0][1].tokens.size(), 1u);
  EXPECT_GE(records[0][1].end, absl::Milliseconds(500));
}

TEST_F(LoadGeneratorTest, AWorkerThatIsNotThereFailsTheRequests) {
  LoadGenerator generator({{.address = "unix:/nowhere.sock", .token = "t", .vocabulary = 10}});
  const std::vector<std::vector<ScheduledRequest>> schedule = {{At(absl::ZeroDuration(), 4, 5)}};
  EXPECT_EQ(generator.Run(schedule, absl::Seconds(20))[0][0].outcome, Outcome::kFailed);
}

TEST_F(LoadGeneratorTest, ReportsProgress) {
  FakeWorker worker;
  LoadGenerator generator({Serve(worker)});
  const std::vector<std::vector<ScheduledRequest>> schedule = {
      {At(absl::ZeroDuration(), 4, 5), At(absl::Milliseconds(1500), 4, 5)}};
  std::vector<LoadProgress> seen;
  generator.Run(schedule, absl::Seconds(20), [&](const LoadProgress& now) { seen.push_back(now); });
  ASSERT_FALSE(seen.empty());
  EXPECT_EQ(seen[0].requests, 2);
  EXPECT_EQ(seen[0].sent, 1);
  EXPECT_GE(seen[0].now, absl::Seconds(1));
}

}  // namespace
}  // namespace palimpsest::load
