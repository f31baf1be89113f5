// A worker's gRPC service on a fake model in this process, and a client of it, for tests.
#ifndef PALIMPSEST_WORKER_SERVER_WORKER_SERVICE_FIXTURE_H_
#define PALIMPSEST_WORKER_SERVER_WORKER_SERVICE_FIXTURE_H_

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/clock.h"
#include "common/file.h"
#include "common/grpc_time.h"
#include "common/metrics.h"
#include "common/monotonic_time.h"
#include "common/mutex.h"
#include "gtest/gtest.h"
#include "worker/compute/cpu/host_block_copier.h"
#include "worker/core/fake_model.h"
#include "worker/memory/fake_memory_client.h"
#include "worker/server/worker_server.h"
#include "worker/server/worker_service.h"

namespace palimpsest {

class NoBytes : public TokenBytes {
 public:
  absl::string_view BytesOf(TokenId) const override { return "x"; }
};

inline EngineOptions ServiceOptions() {
  EngineOptions options;
  SchedulerConfig& scheduler = options.scheduler;
  scheduler.geometry.block_tokens = 4;
  scheduler.geometry.block_bytes = Bytes(4 * FakeModel::kEntryBytes);
  scheduler.geometry.slab_bytes = Bytes(256);
  scheduler.geometry.region_slabs = 400;
  scheduler.max_kv_slabs = 400;
  scheduler.vocab_size = 50;
  scheduler.max_sequence_tokens = 1000;
  scheduler.max_batch_sequences = 4;
  scheduler.max_step_tokens = 64;
  scheduler.queue_capacity = 4;
  options.kv_target = {.low_water_slabs = 1, .high_water_slabs = 4, .max_slabs = 400};
  return options;
}

// Answers at once.
class FakeHints : public ConversationHints {
 public:
  void Hint(uint64_t about, const CacheAction& action,
            std::function<void(absl::StatusOr<uint64_t>)> done) override {
    conversation = about;
    EXPECT_EQ(action.kind, CacheAction::Kind::kPrefetch);
    EXPECT_EQ(action.time, absl::Seconds(3));
    done(answer);
  }

  absl::StatusOr<uint64_t> answer = 3;
  std::atomic<uint64_t> conversation = 0;
};

class WorkerServiceTest : public ::testing::Test {
 protected:
  WorkerServiceTest()
      : options_(ServiceOptions()),
        memory_(options_.scheduler.geometry.slab_bytes, options_.scheduler.geometry.region_slabs),
        model_({options_.scheduler.geometry, options_.scheduler.vocab_size, 0}, memory_.kv()),
        runner_(&model_, &memory_.gate()),
        copier_({nullptr, memory_.kv(), options_.scheduler.geometry.block_bytes}),
        metrics_(MetricProcess::kWorker),
        engine_metrics_(metrics_),
        engine_(options_, Parts()),
        token_path_(std::string(std::getenv("TEST_TMPDIR")) + "/router_token"),
        tokens_(OpenTokens("secret\n")),
        service_({.tenant = "alpha",
                  .model = "fake",
                  .router_tokens = tokens_,
                  .on_drain = [this] { server_.SetDraining(); },
                  .hints = &hints_},
                 &engine_, &memory_, &engine_metrics_) {
    memory_.GrantKv(400);
    EXPECT_TRUE(server_.Start("127.0.0.1:0", &service_).ok());
    channel_ = grpc::CreateChannel(server_.address(), grpc::InsecureChannelCredentials());
    stub_ = v1::Worker::NewStub(channel_);
    engine_.Start();
  }

  ~WorkerServiceTest() override {
    engine_.Stop();
    server_.Shutdown(absl::Seconds(5));
  }

  void WriteTokens(const std::string& text) {
    EXPECT_TRUE(WriteFileAtomically(token_path_, text, 0600).ok());
  }
  std::shared_ptr<SecretFile> OpenTokens(const std::string& text) {
    WriteTokens(text);
    return SecretFile::Open(token_path_).value();
  }

  EngineParts Parts() {
    EngineParts parts;
    parts.memory = &memory_;
    parts.runner = &runner_;
    parts.copier = &copier_;
    parts.token_bytes = &token_bytes_;
    parts.metrics = &engine_metrics_;
    parts.clock = &Clock::Real();
    parts.on_connection = [this](bool connected) { server_.SetConnected(connected); };
    return parts;
  }

  static std::unique_ptr<grpc::ClientContext> Context(const std::string& token = "secret") {
    auto context = std::make_unique<grpc::ClientContext>();
    if (!token.empty()) context->AddMetadata("authorization", "Bearer " + token);
    context->set_deadline(GrpcTimeout(absl::Seconds(30)));
    return context;
  }

  static v1::WorkerGenerateRequest Request(int max_tokens = 8) {
    v1::WorkerGenerateRequest request;
    request.set_request_id("test-1");
    for (int i = 1; i < 8; ++i) request.add_prompt_token_ids(i);
    request.mutable_sampling()->set_max_tokens(max_tokens);
    request.mutable_sampling()->set_seed(5);
    return request;
  }

  struct Answer {
    std::vector<TokenId> tokens;
    v1::WorkerGenerateResponse last;
    grpc::Status status;
  };

  Answer Generate(grpc::ClientContext& context, const v1::WorkerGenerateRequest& request) {
    Answer answer;
    auto reader = stub_->Generate(&context, request);
    v1::WorkerGenerateResponse response;
    while (reader->Read(&response)) {
      answer.tokens.insert(answer.tokens.end(), response.token_ids().begin(),
                           response.token_ids().end());
      answer.last = response;
    }
    answer.status = reader->Finish();
    return answer;
  }

  grpc::Status StatusOf(const v1::WorkerGenerateRequest& request) {
    return Generate(*Context(), request).status;
  }

  std::vector<TokenId> Expected(const v1::WorkerGenerateRequest& request) const {
    SamplingParams params;
    params.seed = request.sampling().seed();
    return FakeModel::Reference(
        {options_.scheduler.geometry, options_.scheduler.vocab_size, 0},
        {request.prompt_token_ids().begin(), request.prompt_token_ids().end()},
        static_cast<int32_t>(request.output_offset()), params,
        static_cast<int32_t>(request.sampling().max_tokens() - request.output_offset()));
  }

  // Waits until `condition` holds for the engine's statistics.
  void Await(const std::function<bool(const EngineStats&)>& condition) {
    const absl::Time deadline = MonotonicNow() + absl::Seconds(20);
    while (!condition(engine_.Stats())) {
      ASSERT_LT(MonotonicNow(), deadline);
      std::this_thread::yield();
    }
  }

  // grpc.health.v1.Health/Check of the worker service: request and answer are one field each, so
  // the bytes are written by hand.
  bool Serving() {
    const std::string name = "palimpsest.v1.Worker";
    const grpc::Slice request_slice(std::string{0x0a, static_cast<char>(name.size())} + name);
    const grpc::ByteBuffer request(&request_slice, 1);
    grpc::ByteBuffer response;
    auto context = Context("");
    grpc::GenericStub stub(channel_);
    Notification done;
    grpc::Status status;
    stub.UnaryCall(context.get(), "/grpc.health.v1.Health/Check", grpc::StubOptions(), &request,
                   &response, [&](grpc::Status result) {
                     status = std::move(result);
                     done.Notify();
                   });
    done.WaitForNotification();
    EXPECT_TRUE(status.ok()) << status.error_message();
    std::vector<grpc::Slice> slices;
    EXPECT_TRUE(response.Dump(&slices).ok());
    std::string bytes;
    for (const grpc::Slice& slice : slices) bytes.append(slice.begin(), slice.end());
    return bytes == std::string({0x08, 0x01});
  }

  void AwaitServing(bool serving) {
    const absl::Time deadline = MonotonicNow() + absl::Seconds(20);
    while (Serving() != serving) ASSERT_LT(MonotonicNow(), deadline);
  }

  const EngineOptions options_;
  FakeMemoryClient memory_;
  FakeModel model_;
  FakeRunner runner_;
  HostBlockCopier copier_;
  Metrics metrics_;
  EngineMetrics engine_metrics_;
  NoBytes token_bytes_;
  WorkerServer server_;
  Engine engine_;
  FakeHints hints_;
  const std::string token_path_;
  const std::shared_ptr<SecretFile> tokens_;
  WorkerService service_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Worker::Stub> stub_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_SERVER_WORKER_SERVICE_FIXTURE_H_
