// From what a client asked for to SamplingParams, with every bound of
// proto/palimpsest/v1/sampling.proto checked. Pure; thread-safe.
#ifndef PALIMPSEST_WORKER_CORE_SAMPLING_VALIDATION_H_
#define PALIMPSEST_WORKER_CORE_SAMPLING_VALIDATION_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/ids.h"
#include "worker/core/sampling.h"

namespace palimpsest {

// The fields of the request as they came; absent ones take their defaults.
struct SamplingFields {
  std::optional<uint32_t> max_tokens;
  std::optional<float> temperature;
  std::optional<uint32_t> top_k;
  std::optional<float> top_p;
  std::optional<float> min_p;
  std::optional<float> repetition_penalty;
  std::optional<uint64_t> seed;
  std::vector<std::string> stop;
  std::vector<TokenId> stop_token_ids;
  bool ignore_eos = false;
  std::optional<uint32_t> logprobs;
};

// InvalidArgument names the field, its range and what came. `drawn_seed` is taken where the request
// has none.
absl::StatusOr<SamplingParams> ValidateSampling(const SamplingFields& fields, int32_t vocab_size,
                                                uint64_t drawn_seed);

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_CORE_SAMPLING_VALIDATION_H_
