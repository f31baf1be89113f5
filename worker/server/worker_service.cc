#include "worker/server/worker_service.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/grpc_status.h"
#include "common/grpc_time.h"
#include "common/log.h"
#include "common/monotonic_time.h"
#include "common/random.h"
#include "worker/server/generate_call.h"
#include "worker/server/hint_conversion.h"
#include "worker/server/router_token.h"
#include "worker/server/sampling_conversion.h"

namespace palimpsest {
namespace {

// A drain answers so long before its caller would give up.
constexpr absl::Duration kDrainMargin = absl::Milliseconds(100);
// A drain without a deadline waits so long.
constexpr absl::Duration kLongestDrain = absl::Minutes(10);

void FillSteps(const StepTotals& totals, v1::StepTotals& out) {
  out.set_steps(totals.steps);
  out.set_graph_steps(totals.graph_steps);
  out.set_schedule_seconds(absl::ToDoubleSeconds(totals.schedule));
  out.set_launch_seconds(absl::ToDoubleSeconds(totals.launch));
  out.set_wait_seconds(absl::ToDoubleSeconds(totals.wait));
  out.set_commit_seconds(absl::ToDoubleSeconds(totals.commit));
  out.set_stream_seconds(absl::ToDoubleSeconds(totals.stream));
  out.set_device_steps(totals.device_steps);
  out.set_device_seconds(absl::ToDoubleSeconds(totals.device));
  out.set_sampling_steps(totals.sampling_steps);
  out.set_sampling_seconds(absl::ToDoubleSeconds(totals.sampling));
}

}  // namespace

WorkerService::WorkerService(WorkerServiceOptions options, Engine* engine,
                             const MemoryClient* memory, EngineMetrics* metrics)
    : options_(std::move(options)), engine_(engine), memory_(memory), metrics_(metrics) {}

absl::Status WorkerService::Authorize(const grpc::ServerContextBase& context) const {
  return CheckRouterToken(context, *options_.router_tokens);
}

absl::StatusOr<SequenceRequest> WorkerService::Convert(
    const v1::WorkerGenerateRequest& request) const {
  if (absl::Status status = CheckName("request_id", request.request_id()); !status.ok()) {
    return status;
  }
  auto params = ValidateSampling(ToSamplingFields(request.sampling()),
                                 engine_->scheduler_config().vocab_size, RandomSeed());
  if (!params.ok()) return params.status();
  const int64_t size = request.prompt_token_ids_size();
  if (size == 0) return absl::InvalidArgumentError("the prompt is empty; send at least one token");
  if (request.output_offset() >= size) {
    return absl::InvalidArgumentError(absl::StrCat("output_offset must be below the prompt's ",
                                                   size, " tokens; got ", request.output_offset()));
  }
  auto hints = ConvertHints(request);
  if (!hints.ok()) return hints.status();
  SequenceRequest result;
  result.prompt.assign(request.prompt_token_ids().begin(), request.prompt_token_ids().end());
  result.output_offset = static_cast<int32_t>(request.output_offset());
  result.params = *std::move(params);
  result.hints = *std::move(hints);
  return result;
}

absl::StatusOr<RequestHints> WorkerService::ConvertHints(
    const v1::WorkerGenerateRequest& request) const {
  auto hints = ToRequestHints(request.hints(), request.conversation_id());
  if (!hints.ok()) return hints.status();
  auto parts = ToPromptParts(request.parts(), static_cast<size_t>(request.prompt_token_ids_size()));
  if (!parts.ok()) return parts.status();
  hints->parts = *std::move(parts);
  const auto& tokens = request.tool_call_token_ids();
  const int32_t vocabulary = engine_->scheduler_config().vocab_size;
  if (tokens.size() > kMaxToolCallTokens ||
      std::any_of(tokens.begin(), tokens.end(),
                  [&](int32_t id) { return id < 0 || id >= vocabulary; })) {
    return absl::InvalidArgumentError(absl::StrCat("tool_call_token_ids has ", tokens.size(),
                                                   " ids: expected at most ", kMaxToolCallTokens,
                                                   ", each from 0 to ", vocabulary - 1));
  }
  hints->tool_call_tokens.assign(tokens.begin(), tokens.end());
  return hints;
}

grpc::ServerWriteReactor<v1::WorkerGenerateResponse>* WorkerService::Generate(
    grpc::CallbackServerContext* context, const v1::WorkerGenerateRequest* request) {
  const std::shared_ptr<GenerateCall> call = GenerateCall::Create(context, engine_);
  absl::Status status = Authorize(*context);
  if (status.ok()) {
    auto converted = Convert(*request);
    if (converted.ok()) {
      const bool logprobs = converted->params.logprobs >= 0;
      status = call->Begin(*std::move(converted), logprobs);
      if (status.ok()) return call.get();
    } else {
      status = converted.status();
      call->Refuse(status);
    }
  } else {
    call->Refuse(status);
  }
  metrics_->OnFailure(status);
  Log(LogLevel::kDebug, "request refused",
      {{"request", request->request_id()}, {"status", status}});
  return call.get();
}

grpc::ServerUnaryReactor* WorkerService::HintConversation(grpc::CallbackServerContext* context,
                                                          const v1::WorkerHintRequest* request,
                                                          v1::WorkerHintResponse* response) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  absl::Status status = Authorize(*context);
  status.Update(CheckName("conversation_id", request->conversation_id()));
  const auto action = ToCacheAction(request->action());
  status.Update(action.status());
  if (status.ok() && options_.hints == nullptr) {
    status = absl::FailedPreconditionError("this worker's node keeps no KV blocks below T0");
  }
  if (!status.ok()) {
    reactor->Finish(ToGrpcStatus(status));
    return reactor;
  }
  options_.hints->Hint(ConversationNumber(request->conversation_id()), *action,
                       [reactor, response](const absl::StatusOr<uint64_t>& blocks) {
                         if (blocks.ok()) response->set_blocks(*blocks);
                         reactor->Finish(ToGrpcStatus(blocks.status()));
                       });
  return reactor;
}

grpc::Status WorkerService::Drain(grpc::ServerContext* context, const v1::DrainRequest*,
                                  v1::DrainResponse* response) {
  if (absl::Status status = Authorize(*context); !status.ok()) return ToGrpcStatus(status);
  Log(LogLevel::kInfo, "draining");
  engine_->StartDrain();
  if (options_.on_drain) options_.on_drain();
  const absl::Time now = MonotonicNow();
  const absl::Time deadline =
      std::min(FromGrpcDeadline(context->raw_deadline()), now + kLongestDrain) - kDrainMargin;
  response->set_remaining_requests(engine_->AwaitDrained(deadline - now));
  return grpc::Status::OK;
}

grpc::Status WorkerService::GetStats(grpc::ServerContext* context, const v1::GetWorkerStatsRequest*,
                                     v1::WorkerStats* response) {
  if (absl::Status status = Authorize(*context); !status.ok()) return ToGrpcStatus(status);
  *response = Stats();
  return grpc::Status::OK;
}

v1::WorkerStats WorkerService::Stats() const {
  v1::WorkerStats stats_out;
  v1::WorkerStats* const response = &stats_out;
  const EngineStats stats = engine_->Stats();
  const MappedSlabs mapped = memory_->Mapped();
  response->set_tenant(options_.tenant);
  response->set_model(options_.model);
  response->set_max_sequence_tokens(engine_->longest_sequence());
  response->set_running_sequences(stats.running);
  response->set_waiting_sequences(stats.waiting);
  response->set_queue_capacity(engine_->scheduler_config().queue_capacity);
  response->set_kv_blocks_used(stats.blocks_used);
  response->set_kv_blocks_cached(stats.blocks_cached);
  response->set_kv_blocks_free(stats.blocks_free);
  response->set_parameter_slabs_mapped(mapped.parameters);
  response->set_parameter_slabs_total(mapped.image);
  response->set_generated_tokens_total(stats.counters.generated_tokens);
  response->set_prompt_tokens_total(stats.counters.prompt_tokens);
  response->set_cached_tokens_total(stats.counters.cached_tokens);
  response->set_preemptions_total(stats.counters.preemptions);
  response->set_draining(stats.draining);
  response->set_broker_connected(stats.broker_connected);
  FillSteps(stats.steps, *response->mutable_steps());
  return stats_out;
}

}  // namespace palimpsest
