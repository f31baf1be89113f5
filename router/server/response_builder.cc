#include "router/server/response_builder.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"

namespace palimpsest::router {
namespace {

absl::Status Check(const v1::WorkerGenerateResponse& message, const PreparedRequest& request) {
  const bool wants_logprobs = request.sampling.has_logprobs();
  if (message.logprobs_size() != (wants_logprobs ? message.token_ids_size() : 0)) {
    return absl::InternalError(absl::StrCat("the worker sent ", message.token_ids_size(),
                                            " tokens with ", message.logprobs_size(),
                                            " log-probabilities"));
  }
  for (const TokenId id : message.token_ids()) {
    if (id >= 0 && id < request.model->folder->vocab_size) continue;
    return absl::InternalError(
        absl::StrCat("the worker sent token ", id, ", which is not in the vocabulary"));
  }
  return absl::OkStatus();
}

}  // namespace

ResponseBuilder::ResponseBuilder(const PreparedRequest& request)
    : request_(request),
      detokenizer_(request.model->folder->tokenizer.get(),
                   {request.sampling.stop().begin(), request.sampling.stop().end()}) {}

absl::StatusOr<v1::GenerateResponse> ResponseBuilder::Add(
    const v1::WorkerGenerateResponse& message) {
  const absl::Status valid = Check(message, request_);
  if (!valid.ok()) return valid;
  v1::GenerateResponse response;
  if (first_) response.set_request_id(request_.request_id);
  first_ = false;
  const size_t limit = request_.sampling.max_tokens();
  v1::FinishReason reason = message.finish_reason();
  std::string* text = response.mutable_text();
  for (int i = 0; i < message.token_ids_size() && !detokenizer_.stop(); ++i) {
    if (output_.size() >= limit) {
      return absl::InternalError(
          absl::StrCat("the worker sent more than the ", limit, " tokens that were asked for"));
    }
    output_.push_back(message.token_ids(i));
    text->append(detokenizer_.Push(message.token_ids(i)));
    response.add_token_ids(message.token_ids(i));
    if (request_.sampling.has_logprobs()) *response.add_logprobs() = message.logprobs(i);
  }
  usage_.set_cached_tokens(std::max(usage_.cached_tokens(), message.usage().cached_tokens()));
  usage_.set_preemptions(usage_.preemptions() + message.usage().preemptions());
  if (detokenizer_.stop()) reason = v1::FINISH_REASON_STOP_STRING;
  if (reason != v1::FINISH_REASON_UNSPECIFIED) Finish(reason, &response);
  return response;
}

bool ResponseBuilder::EndsOutput(TokenId id) const {
  const auto& stops = request_.sampling.stop_token_ids();
  if (std::find(stops.begin(), stops.end(), id) != stops.end()) return true;
  const std::vector<TokenId>& eos = request_.model->folder->eos_token_ids;
  return !request_.sampling.ignore_eos() && std::find(eos.begin(), eos.end(), id) != eos.end();
}

bool ResponseBuilder::FinishIfComplete(v1::GenerateResponse* last) {
  if (output_.empty()) return false;
  if (EndsOutput(output_.back())) {
    Finish(v1::FINISH_REASON_STOP_TOKEN, last);
  } else if (output_.size() >= request_.sampling.max_tokens()) {
    Finish(v1::FINISH_REASON_LENGTH, last);
  }
  return finished_;
}

void ResponseBuilder::Finish(v1::FinishReason reason, v1::GenerateResponse* response) {
  finished_ = true;
  response->mutable_text()->append(detokenizer_.Finish());
  response->set_finish_reason(reason);
  usage_.set_prompt_tokens(static_cast<uint32_t>(request_.prompt.size()));
  usage_.set_cached_tokens(std::min(usage_.cached_tokens(), usage_.prompt_tokens()));
  usage_.set_output_tokens(static_cast<uint32_t>(output_.size()));
  *response->mutable_usage() = usage_;
}

}  // namespace palimpsest::router
