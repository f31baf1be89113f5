#include "worker/server/sampling_conversion.h"

namespace palimpsest {

SamplingFields ToSamplingFields(const v1::SamplingParams& params) {
  SamplingFields fields;
  if (params.has_max_tokens()) fields.max_tokens = params.max_tokens();
  if (params.has_temperature()) fields.temperature = params.temperature();
  if (params.has_top_k()) fields.top_k = params.top_k();
  if (params.has_top_p()) fields.top_p = params.top_p();
  if (params.has_min_p()) fields.min_p = params.min_p();
  if (params.has_repetition_penalty()) fields.repetition_penalty = params.repetition_penalty();
  if (params.has_seed()) fields.seed = params.seed();
  if (params.has_logprobs()) fields.logprobs = params.logprobs();
  fields.stop.assign(params.stop().begin(), params.stop().end());
  fields.stop_token_ids.assign(params.stop_token_ids().begin(), params.stop_token_ids().end());
  fields.ignore_eos = params.ignore_eos();
  return fields;
}

v1::FinishReason ToProto(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStopToken:
      return v1::FINISH_REASON_STOP_TOKEN;
    case FinishReason::kStopString:
      return v1::FINISH_REASON_STOP_STRING;
    case FinishReason::kLength:
      return v1::FINISH_REASON_LENGTH;
    case FinishReason::kCancelled:
      return v1::FINISH_REASON_CANCELLED;
  }
  return v1::FINISH_REASON_UNSPECIFIED;
}

void FillUsage(const SequenceUsage& usage, v1::Usage& proto) {
  proto.set_prompt_tokens(usage.prompt_tokens);
  proto.set_cached_tokens(usage.cached_tokens);
  proto.set_output_tokens(usage.output_tokens);
  proto.set_preemptions(usage.preemptions);
}

void FillLogprob(const SampledToken& token, v1::TokenLogprob& proto) {
  proto.set_token_id(token.token);
  proto.set_logprob(token.logprob);
  for (const auto& [id, logprob] : token.top) {
    v1::TopLogprob& top = *proto.add_top();
    top.set_token_id(id);
    top.set_logprob(logprob);
  }
}

}  // namespace palimpsest
