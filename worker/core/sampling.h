// Choosing the next token from logits. Pure and reproducible: the result depends on nothing but the
// arguments, in particular not on what else is in the batch.
#ifndef PALIMPSEST_WORKER_CORE_SAMPLING_H_
#define PALIMPSEST_WORKER_CORE_SAMPLING_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "common/ids.h"

namespace palimpsest {

// Validated sampling parameters of one request; see proto/palimpsest/v1/sampling.proto.
struct SamplingParams {
  int32_t max_tokens = 0;  // 0: until the context is full
  float temperature = 1.0f;
  int32_t top_k = 0;
  float top_p = 1.0f;
  float min_p = 0.0f;
  float repetition_penalty = 1.0f;
  uint64_t seed = 0;
  std::vector<std::string> stop;
  std::vector<TokenId> stop_token_ids;
  bool ignore_eos = false;
  int32_t logprobs = -1;  // alternatives to report per token; -1: no log-probabilities at all
};

// What a runner needs to sample one token.
struct SamplingRequest {
  SamplingParams params;
  // Prompt and output so far (but see SequenceChunk::token_from); read only if
  // params.repetition_penalty != 1.
  absl::Span<const TokenId> history;
  // Index of the token in the output, from 0: the counter of the random stream keyed by the seed.
  int64_t output_index = 0;
};

struct SampledToken {
  TokenId token = 0;
  // Natural logarithms of the softmax of the raw logits (before penalty, temperature, filters).
  // Filled if params.logprobs >= 0.
  float logprob = 0;
  std::vector<std::pair<TokenId, float>> top;
};

// Memory that Sample reuses between calls; one for each thread that samples.
struct SamplingScratch {
  std::vector<float> values;
  std::vector<float> weights;
  std::vector<std::pair<float, TokenId>> candidates;
};

// Samples from `logits` (one float per token of the vocabulary, at least one; NaN counts as minus
// infinity). Order: repetition penalty, temperature, top-k, top-p, min-p. temperature == 0 takes
// the largest logit, the smallest id among equals. Every token of `request.history` must be within
// the vocabulary.
SampledToken Sample(absl::Span<const float> logits, const SamplingRequest& request,
                    SamplingScratch& scratch);

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_CORE_SAMPLING_H_
