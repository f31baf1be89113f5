// What a model keeps of a sequence, read from its Hugging Face config.json, whether or not the
// workers here can run it. Pure.
//
// Bytes of a token in an attention layer of one rank, in a KvFormat f (common/kv_format.h):
//
//   MHA, GQA, MQA   h_kv (f.RowBytes(d_k) + f.RowBytes(d_v)), with h_kv the KV heads of a rank
//                   (Ainslie et al., arXiv:2305.13245)
//   MLA             f.RowBytes(d_latent + d_rope), the same on every rank (DeepSeek-V2,
//                   arXiv:2405.04434), and the key of an indexer where there is one
//
// Of n ranks, rank r computes query heads r h/n .. (r + 1) h/n and keeps the KV heads that these
// attend to: h_kv / n of them if n divides h_kv; otherwise some are kept by several ranks.
//
// Bytes of a sequence's state in a recurrent layer: numbers of the state (state_bytes each) and the
// last inputs of its short convolution (conv_bytes each). What a head or channel has of its own is
// divided among ranks; what a group of heads shares is kept by each rank that has one of them.
#ifndef PALIMPSEST_BROKER_CORE_SIZING_MODEL_SHAPE_H_
#define PALIMPSEST_BROKER_CORE_SIZING_MODEL_SHAPE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "broker/core/sizing/kv_sizing.h"
#include "common/bytes.h"
#include "common/kv_format.h"

namespace palimpsest {

struct AttentionShape {
  int32_t heads = 0;  // of queries; 0: the model has no attention
  int32_t kv_heads = 0;
  int32_t key_dim = 0;  // of an uncompressed head; with a latent vector without the rotated part
  int32_t value_dim = 0;
  int32_t latent_dim = 0;  // above 0: one vector for all heads in place of their keys and values
  int32_t index_dim = 0;   // of the key that picks tokens for sparse attention; 0: there is none
};

// Mamba, Mamba-2, gated delta rule, RG-LRU, short convolution: they differ in these numbers alone.
struct RecurrentShape {
  int32_t heads = 0;           // or channels: what ranks divide; 0: the model has no such layer
  int32_t groups = 0;          // of heads that share an input; 0: none do
  int64_t state_per_head = 0;  // numbers
  int64_t conv_per_head = 0;
  int64_t conv_per_group = 0;
  int32_t state_bytes = 4;  // of a number of the state
  int32_t conv_bytes = 2;
};

// A layer may have both parts, or neither (an MLP alone, or one that reads another layer's KV).
struct LayerShape {
  bool attention = false;
  bool recurrent = false;
  KvReach reach;  // of the attention

  friend bool operator==(const LayerShape&, const LayerShape&) = default;
};

struct ModelShape {
  std::string model_type;
  int32_t hidden_size = 0;
  std::optional<int32_t> max_position;
  AttentionShape attention;  // of every layer that has attention
  RecurrentShape recurrent;
  std::vector<LayerShape> layers;
};

struct ShardOptions {
  KvFormat format;
  int32_t ranks = 1;  // of tensor parallelism; all sizes are those of one rank
};

// Parses config.json. Of a multimodal model its text model counts. InvalidArgument names the key,
// what was expected and what came: for what is no decoder, for sizes out of bounds, and for layers
// whose KV is not known.
absl::StatusOr<ModelShape> ParseModelShape(absl::string_view config_json);

// Layers that are alike form a group, in order of their first layer. Layers that keep nothing are
// in none. InvalidArgument if the ranks cannot divide heads.
absl::StatusOr<std::vector<KvGroup>> KvGroups(const ModelShape& model, const ShardOptions& options);

// What sizing every layer as multi-head attention over all tokens would say: each query head has a
// key and a value of its own, and nothing is scaled. Without attention, hidden_size numbers each.
absl::StatusOr<std::vector<KvGroup>> MultiHeadGroups(const ModelShape& model,
                                                     const ShardOptions& options);

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_CORE_SIZING_MODEL_SHAPE_H_
