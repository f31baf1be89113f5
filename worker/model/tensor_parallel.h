// How a model is shared among the ranks of a tensor-parallel worker: rank r runs on the r-th GPU of
// its pool. Pure. The split is that of Megatron-LM (Shoeybi et al., arXiv:1909.08053); of n ranks
// rank r has
//
//   q, k, v        whole heads: q heads r h/n .. and the KV heads that they attend to, h_kv/n of
//                  them; with more ranks than KV heads one, which n/h_kv ranks share
//   gate, up       rows r i/n .. of each, i being intermediate_size
//   o, down        the matching columns, so that their products are sums over the ranks: one
//                  all-reduce after each. A bias of theirs is rank 0's; the others have zeros and
//                  add them alike
//   lm_head        rows r H .., H = ModelConfig::head_rows(). Its logits are a piece of the
//                  vocabulary; the pieces of all ranks in order are the logits. Rows beyond the
//                  vocabulary are zeros and what they give is to be cut off
//   embed,         everything: no exchange is needed before the first layer. The head of tied
//   positions,     embeddings is stored as lm_head, beside the whole table
//   norms
//
// Latent attention: q_up, k_up, v_up and o (or q_proj) are split by heads; the down-projections of
// query and KV, their norms, and the cached vector are the same on every rank.
//
// Ranks hold their parts at the same offsets of their parameter regions (LayOutImage of
// RankConfig), and the KV of the same block under the same number.
#ifndef PALIMPSEST_WORKER_MODEL_TENSOR_PARALLEL_H_
#define PALIMPSEST_WORKER_MODEL_TENSOR_PARALLEL_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "worker/model/model_config.h"

namespace palimpsest {

// The most GPUs that one model may run on.
inline constexpr int32_t kMaxRanks = 16;

// `count` of something, from `first`.
struct RankShare {
  int64_t first = 0;
  int64_t count = 0;
};

// What one of `ranks` ranks computes; all ranks have the same config. `model` itself for 1. For
// more, InvalidArgument if heads, KV heads or intermediate size cannot be divided.
absl::StatusOr<ModelConfig> RankConfig(const ModelConfig& model, int32_t ranks);

// Of `total` heads, rows or columns that the ranks divide evenly.
RankShare EvenShare(int64_t total, int32_t rank, int32_t ranks);

// KV heads of rank `rank`, which other ranks may share.
RankShare KvHeadShare(const ModelConfig& model, int32_t rank, int32_t ranks);

// Rows of the vocabulary in the head of rank `rank`: those at the end may have fewer than
// head_rows(), or none.
RankShare HeadShare(const ModelConfig& model, int32_t rank, int32_t ranks);

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MODEL_TENSOR_PARALLEL_H_
