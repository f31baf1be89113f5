#include "worker/core/sampling_validation.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace palimpsest {
namespace {

constexpr float kMaxTemperature = 100.0f;
constexpr float kMaxRepetitionPenalty = 10.0f;
constexpr uint32_t kMaxLogprobs = 20;
constexpr size_t kMaxStops = 16;
constexpr size_t kMaxStopBytes = 256;
constexpr size_t kMaxStopTokens = 64;

absl::Status Wrong(absl::string_view field, absl::string_view expected,
                   const absl::AlphaNum& came) {
  return absl::InvalidArgumentError(absl::StrCat(field, " must be ", expected, "; got ", came));
}

// Comparisons with NaN are false, so a range check that must be true refuses it.
absl::Status CheckRanges(const SamplingFields& fields) {
  const float temperature = fields.temperature.value_or(1);
  if (!(temperature >= 0 && temperature <= kMaxTemperature)) {
    return Wrong("temperature", absl::StrCat("from 0 to ", kMaxTemperature), temperature);
  }
  const float top_p = fields.top_p.value_or(1);
  if (!(top_p > 0 && top_p <= 1)) return Wrong("top_p", "above 0 and at most 1", top_p);
  const float min_p = fields.min_p.value_or(0);
  if (!(min_p >= 0 && min_p <= 1)) return Wrong("min_p", "from 0 to 1", min_p);
  const float penalty = fields.repetition_penalty.value_or(1);
  if (!(penalty > 0 && penalty <= kMaxRepetitionPenalty)) {
    return Wrong("repetition_penalty", absl::StrCat("above 0 and at most ", kMaxRepetitionPenalty),
                 penalty);
  }
  if (fields.max_tokens == 0u) return Wrong("max_tokens", "at least 1 (or absent)", 0);
  if (fields.logprobs.value_or(0) > kMaxLogprobs) {
    return Wrong("logprobs", absl::StrCat("from 0 to ", kMaxLogprobs), *fields.logprobs);
  }
  return absl::OkStatus();
}

absl::Status CheckStops(const SamplingFields& fields, int32_t vocab_size) {
  if (fields.stop.size() > kMaxStops) {
    return Wrong("stop", absl::StrCat("at most ", kMaxStops, " strings"), fields.stop.size());
  }
  for (size_t i = 0; i < fields.stop.size(); ++i) {
    if (fields.stop[i].empty() || fields.stop[i].size() > kMaxStopBytes) {
      return Wrong(absl::StrCat("stop[", i, "]"),
                   absl::StrCat("1 to ", kMaxStopBytes, " bytes long"),
                   absl::StrCat(fields.stop[i].size(), " bytes"));
    }
  }
  if (fields.stop_token_ids.size() > kMaxStopTokens) {
    return Wrong("stop_token_ids", absl::StrCat("at most ", kMaxStopTokens, " ids"),
                 fields.stop_token_ids.size());
  }
  for (size_t i = 0; i < fields.stop_token_ids.size(); ++i) {
    const TokenId id = fields.stop_token_ids[i];
    if (id < 0 || id >= vocab_size) {
      return Wrong(absl::StrCat("stop_token_ids[", i, "]"),
                   absl::StrCat("from 0 to ", vocab_size - 1), id);
    }
  }
  return absl::OkStatus();
}

int32_t Clamped(uint32_t value) {
  return static_cast<int32_t>(std::min<uint32_t>(value, std::numeric_limits<int32_t>::max()));
}

}  // namespace

absl::StatusOr<SamplingParams> ValidateSampling(const SamplingFields& fields, int32_t vocab_size,
                                                uint64_t drawn_seed) {
  if (absl::Status status = CheckRanges(fields); !status.ok()) return status;
  if (absl::Status status = CheckStops(fields, vocab_size); !status.ok()) return status;
  SamplingParams params;
  params.max_tokens = Clamped(fields.max_tokens.value_or(0));
  params.temperature = fields.temperature.value_or(1);
  params.top_k = Clamped(fields.top_k.value_or(0));
  params.top_p = fields.top_p.value_or(1);
  params.min_p = fields.min_p.value_or(0);
  params.repetition_penalty = fields.repetition_penalty.value_or(1);
  params.seed = fields.seed.value_or(drawn_seed);
  params.stop = fields.stop;
  params.stop_token_ids = fields.stop_token_ids;
  params.ignore_eos = fields.ignore_eos;
  params.logprobs = fields.logprobs.has_value() ? static_cast<int32_t>(*fields.logprobs) : -1;
  return params;
}

}  // namespace palimpsest
