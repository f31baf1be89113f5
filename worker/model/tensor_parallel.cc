#include "worker/model/tensor_parallel.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace palimpsest {
namespace {

absl::Status Divides(int32_t ranks, absl::string_view what, int32_t count) {
  if (count % ranks == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("tensor parallelism over ", ranks, " GPUs: ", what,
                                                 " is ", count, ", expected a multiple of ", ranks,
                                                 "; give the pool another number of GPUs"));
}

}  // namespace

absl::StatusOr<ModelConfig> RankConfig(const ModelConfig& model, int32_t ranks) {
  if (ranks < 1 || ranks > kMaxRanks) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor parallelism over ", ranks, " GPUs: expected 1 to ", kMaxRanks));
  }
  if (ranks == 1) return model;
  absl::Status status = Divides(ranks, "num_attention_heads", model.num_heads);
  status.Update(Divides(ranks, "intermediate_size", model.intermediate_size));
  const int32_t kv_heads = model.num_kv_heads;
  if (kv_heads >= ranks) {
    status.Update(Divides(ranks, "num_key_value_heads", kv_heads));
  } else if (ranks % kv_heads != 0) {
    status.Update(absl::InvalidArgumentError(
        absl::StrCat("tensor parallelism over ", ranks, " GPUs: num_key_value_heads is ", kv_heads,
                     ", expected a multiple or a divisor of ", ranks)));
  }
  if (!status.ok()) return status;
  ModelConfig rank = model;
  rank.ranks = ranks;
  rank.num_heads /= ranks;
  rank.num_kv_heads = std::max(1, kv_heads / ranks);
  rank.intermediate_size /= ranks;
  rank.tie_word_embeddings = false;
  return rank;
}

RankShare EvenShare(int64_t total, int32_t rank, int32_t ranks) {
  return {total / ranks * rank, total / ranks};
}

RankShare KvHeadShare(const ModelConfig& model, int32_t rank, int32_t ranks) {
  if (model.num_kv_heads >= ranks) return EvenShare(model.num_kv_heads, rank, ranks);
  return {int64_t{rank} * model.num_kv_heads / ranks, 1};
}

RankShare HeadShare(const ModelConfig& model, int32_t rank, int32_t ranks) {
  ModelConfig one = model;
  one.ranks = ranks;
  const int64_t rows = one.head_rows();
  const int64_t first = std::min<int64_t>(rows * rank, model.vocab_size);
  return {first, std::min<int64_t>(rows, model.vocab_size - first)};
}

}  // namespace palimpsest
