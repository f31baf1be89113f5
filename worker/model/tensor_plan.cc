#include "worker/model/tensor_plan.h"

#include <cassert>
#include <utility>

#include "absl/strings/str_cat.h"
#include "worker/model/tensor_parallel.h"

namespace palimpsest {
namespace {

// A part of one placement.
struct Part {
  std::string tensor;
  int64_t tensor_rows = 0;
  int64_t first_row = 0;
  int64_t rows = -1;  // -1: all
  RowOrder order = RowOrder::kPlain;
  int64_t tensor_cols = 0;  // 0: those of the placement
  int64_t first_col = 0;
};

// Which of how many.
struct Rank {
  int32_t rank = 0;
  int32_t ranks = 1;

  bool first() const { return rank == 0; }
  RankShare Of(int64_t total) const { return EvenShare(total, rank, ranks); }
};

class PieceList {
 public:
  void Matrix(const MatrixPlacement& to, const std::vector<Part>& parts) {
    if (to.rows > 0) Add(to.offset, to.rows, to.cols, parts);
  }
  void Vector(const VectorPlacement& to, const std::vector<Part>& parts) {
    if (to.size > 0) Add(to.offset, to.size, 0, parts);
  }
  void Vector(const VectorPlacement& to, const std::string& tensor) {
    Vector(to, {{tensor, to.size}});
  }
  void Matrix(const MatrixPlacement& to, const std::string& tensor) {
    Matrix(to, {{tensor, to.rows}});
  }
  // A rank's columns of a matrix of `cols`.
  void Columns(const MatrixPlacement& to, const std::string& tensor, int64_t cols, Rank rank) {
    Part part{tensor, to.rows};
    part.tensor_cols = cols;
    part.first_col = rank.Of(cols).first;
    Matrix(to, {part});
  }

  std::vector<TensorPiece> Take() && { return std::move(pieces_); }

 private:
  void Add(Bytes target, int64_t target_rows, int64_t cols, const std::vector<Part>& parts) {
    int64_t row = 0;
    for (const Part& part : parts) {
      TensorPiece piece;
      piece.tensor = part.tensor;
      piece.shape = {part.tensor_rows};
      if (cols > 0) piece.shape.push_back(part.tensor_cols > 0 ? part.tensor_cols : cols);
      piece.first_row = part.first_row;
      piece.rows = part.rows < 0 ? part.tensor_rows : part.rows;
      const bool transposed = part.order == RowOrder::kTransposed;
      piece.first_col = part.first_col;
      if (cols > 0) piece.width = transposed ? piece.cols() : cols;
      piece.order = part.order;
      piece.target = target;
      piece.target_rows = target_rows;
      piece.target_first_row = row;
      assert(transposed ? piece.rows == cols : piece.first_col + piece.width <= piece.cols());
      row += transposed ? piece.width : piece.rows;
      if (piece.rows > 0) pieces_.push_back(std::move(piece));
    }
    assert(row <= target_rows);
  }

  std::vector<TensorPiece> pieces_;
};

// What a family calls the parts of a layer.
struct LayerNames {
  std::string attention = "self_attn.";
  std::string o = "self_attn.o_proj";
  std::string attention_norm = "input_layernorm";
  std::string mlp_norm = "post_attention_layernorm";
  std::string gate = "mlp.gate_proj";
  std::string up = "mlp.up_proj";
  std::string down = "mlp.down_proj";
};

struct ModelNames {
  std::string base = "model.";
  std::string final_norm = "norm";
  LayerNames layer;
};

ModelNames NamesOf(const ModelConfig& config) {
  ModelNames names;
  if (config.post_norms) names.layer.mlp_norm = "pre_feedforward_layernorm";
  if (config.architecture == "OPTForCausalLM") {
    names.base = "model.decoder.";
    names.final_norm = "final_layer_norm";
    names.layer.o = "self_attn.out_proj";
    names.layer.attention_norm = "self_attn_layer_norm";
    names.layer.mlp_norm = "final_layer_norm";
    names.layer.up = "fc1";
    names.layer.down = "fc2";
  }
  return names;
}

// Some rows of a tensor.
Part Rows(std::string tensor, int64_t tensor_rows, RankShare share) {
  return {std::move(tensor), tensor_rows, share.first, share.count};
}

void AddAttention(const ModelConfig& model, Rank rank, const std::string& attention,
                  const LayerPlacement& to, PieceList& pieces) {
  const int64_t q = int64_t{model.num_heads} * model.head_dim;
  const int64_t kv = int64_t{model.num_kv_heads} * model.head_dim;
  const RankShare q_rows = rank.Of(q);
  RankShare kv_rows = KvHeadShare(model, rank.rank, rank.ranks);
  kv_rows = {kv_rows.first * model.head_dim, kv_rows.count * model.head_dim};
  pieces.Matrix(to.qkv, {Rows(attention + "q_proj.weight", q, q_rows),
                         Rows(attention + "k_proj.weight", kv, kv_rows),
                         Rows(attention + "v_proj.weight", kv, kv_rows)});
  pieces.Vector(to.qkv_bias, {Rows(attention + "q_proj.bias", q, q_rows),
                              Rows(attention + "k_proj.bias", kv, kv_rows),
                              Rows(attention + "v_proj.bias", kv, kv_rows)});
  pieces.Vector(to.q_norm, attention + "q_norm.weight");
  pieces.Vector(to.k_norm, attention + "k_norm.weight");
}

void AddLatentAttention(const ModelConfig& model, Rank rank, const std::string& attention,
                        const LayerPlacement& to, PieceList& pieces) {
  const LatentAttention& latent = *model.latent;
  const RowOrder rotary = latent.interleaved_pairs ? RowOrder::kPairsToHalves : RowOrder::kPlain;
  const int64_t nope = latent.qk_nope_head_dim, rope = latent.qk_rope_head_dim;
  const int64_t value = latent.v_head_dim, head = nope + rope;
  const int64_t q = model.num_heads * head;
  const bool two_steps = latent.q_lora_rank > 0;

  std::vector<Part> queries;
  const std::string query = attention + (two_steps ? "q_b_proj.weight" : "q_proj.weight");
  std::vector<Part> keys, values;
  const std::string kv = attention + "kv_b_proj.weight";
  const int64_t kv_rows = model.num_heads * (nope + value);
  const RankShare heads = rank.Of(model.num_heads);
  for (int64_t h = heads.first; h < heads.first + heads.count; ++h) {
    queries.push_back({query, q, h * head, nope});
    queries.push_back({query, q, h * head + nope, rope, rotary});
    const int64_t first = h * (nope + value);
    keys.push_back({kv, kv_rows, first, nope, RowOrder::kTransposed, latent.kv_lora_rank});
    values.push_back({kv, kv_rows, first + nope, value});
  }

  std::vector<Part> down;
  if (two_steps) {
    down.push_back({attention + "q_a_proj.weight", latent.q_lora_rank});
  } else {
    down = queries;
  }
  const std::string kv_down = attention + "kv_a_proj_with_mqa.weight";
  down.push_back({kv_down, latent.cache_width(), 0, latent.kv_lora_rank});
  down.push_back({kv_down, latent.cache_width(), latent.kv_lora_rank, rope, rotary});
  pieces.Matrix(to.qkv, down);
  pieces.Vector(to.q_norm, attention + "q_a_layernorm.weight");
  pieces.Vector(to.k_norm, attention + "kv_a_layernorm.weight");
  pieces.Matrix(to.q_up, queries);
  pieces.Matrix(to.k_up, keys);
  pieces.Matrix(to.v_up, values);
}

void AddMlp(const ModelConfig& model, Rank rank, const LayerNames& names, const std::string& prefix,
            const LayerPlacement& to, PieceList& pieces) {
  const int64_t inner = model.intermediate_size;
  const RankShare share = rank.Of(inner);
  std::vector<Part> up, up_bias;
  if (model.gated()) {
    up.push_back(Rows(prefix + names.gate + ".weight", inner, share));
    up_bias.push_back(Rows(prefix + names.gate + ".bias", inner, share));
  }
  up.push_back(Rows(prefix + names.up + ".weight", inner, share));
  up_bias.push_back(Rows(prefix + names.up + ".bias", inner, share));
  pieces.Matrix(to.gate_up, up);
  pieces.Vector(to.gate_up_bias, up_bias);
  pieces.Columns(to.down, prefix + names.down + ".weight", inner, rank);
  if (rank.first()) pieces.Vector(to.down_bias, prefix + names.down + ".bias");
}

void AddLayer(const ModelConfig& model, Rank rank, const LayerNames& names,
              const std::string& prefix, const LayerPlacement& to, PieceList& pieces) {
  pieces.Vector(to.attention_norm, prefix + names.attention_norm + ".weight");
  pieces.Vector(to.attention_norm_bias, prefix + names.attention_norm + ".bias");
  if (model.latent.has_value()) {
    AddLatentAttention(model, rank, prefix + names.attention, to, pieces);
  } else {
    AddAttention(model, rank, prefix + names.attention, to, pieces);
  }
  pieces.Columns(to.o, prefix + names.o + ".weight", int64_t{model.num_heads} * model.value_dim(),
                 rank);
  if (rank.first()) pieces.Vector(to.o_bias, prefix + names.o + ".bias");
  pieces.Vector(to.post_attention_norm, prefix + "post_attention_layernorm.weight");
  pieces.Vector(to.mlp_norm, prefix + names.mlp_norm + ".weight");
  pieces.Vector(to.mlp_norm_bias, prefix + names.mlp_norm + ".bias");
  AddMlp(model, rank, names, prefix, to, pieces);
  pieces.Vector(to.post_mlp_norm, prefix + "post_feedforward_layernorm.weight");
}

}  // namespace

std::vector<TensorPiece> PlanTensors(const ModelConfig& model, const ImageLayout& layout,
                                     int32_t rank_number) {
  const Rank rank{rank_number, layout.ranks};
  const ModelNames names = NamesOf(model);
  PieceList pieces;
  pieces.Matrix(layout.embed, names.base + "embed_tokens.weight");
  pieces.Matrix(layout.positions, names.base + "embed_positions.weight");
  for (int32_t i = 0; i < model.num_layers; ++i) {
    AddLayer(model, rank, names.layer, absl::StrCat(names.base, "layers.", i, "."),
             layout.layers[static_cast<size_t>(i)], pieces);
  }
  pieces.Vector(layout.final_norm, names.base + names.final_norm + ".weight");
  pieces.Vector(layout.final_norm_bias, names.base + names.final_norm + ".bias");
  const bool tied = model.tie_word_embeddings;
  if (!tied || rank.ranks > 1) {
    pieces.Matrix(layout.lm_head,
                  {Rows(tied ? names.base + "embed_tokens.weight" : "lm_head.weight",
                        model.vocab_size, HeadShare(model, rank.rank, rank.ranks))});
  }
  return std::move(pieces).Take();
}

}  // namespace palimpsest
