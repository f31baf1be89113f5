// The ranks' parts of an image, put together, are the whole image: read by placement, independently
// of the plan that wrote them.
#include "worker/model/tensor_parallel.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/model/image_builder.h"
#include "worker/model/image_layout.h"
#include "worker/model/tensor_plan.h"

namespace palimpsest {
namespace {

using ::testing::HasSubstr;

using Numbers = std::vector<uint16_t>;

constexpr Bytes kSlab = KiB(8);

// An image of generated weights, and what its ranks have at a placement.
class Image {
 public:
  Image(const ModelConfig& model, int32_t ranks) : config(*RankConfig(model, ranks)) {
    layout = *LayOutImage(config, kSlab, WeightFormat::kRowMajor);
    const auto size = static_cast<size_t>(layout.image_bytes().count());
    bytes_.reset(static_cast<std::byte*>(std::aligned_alloc(4096, size)));
    std::fill_n(bytes_.get(), size, std::byte{0});
    const absl::Status built = BuildDummyImage(5, model, layout, {bytes_.get(), size});
    EXPECT_TRUE(built.ok()) << built;
  }

  // Rows first .. first + rows - 1.
  Numbers Rows(int32_t rank, const MatrixPlacement& m, int64_t first, int64_t rows) const {
    return At(rank, m.offset, first * m.cols, rows * m.cols);
  }
  Numbers All(int32_t rank, const MatrixPlacement& m) const { return Rows(rank, m, 0, m.rows); }
  Numbers All(int32_t rank, const VectorPlacement& v) const {
    return At(rank, v.offset, 0, v.size);
  }
  Numbers Some(int32_t rank, const VectorPlacement& v, int64_t first, int64_t size) const {
    return At(rank, v.offset, first, size);
  }

  const ModelConfig config;
  ImageLayout layout;

 private:
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };

  Numbers At(int32_t rank, Bytes offset, int64_t first, int64_t count) const {
    const auto* from =
        reinterpret_cast<const uint16_t*>(bytes_.get() + (layout.total * rank + offset).count());
    return {from + first, from + first + count};
  }

  std::unique_ptr<std::byte, Free> bytes_;
};

// Compares one layer's matrices and vectors, or the model's, of the whole and of its parts.
class Comparison {
 public:
  Comparison(const Image& whole, const Image& parts) : whole_(whole), parts_(parts) {}

  int32_t ranks() const { return parts_.config.ranks; }

  void Same(const char* what, const MatrixPlacement& w, const MatrixPlacement& p) const {
    for (int32_t r = 0; r < ranks(); ++r) {
      EXPECT_EQ(whole_.All(0, w), parts_.All(r, p)) << what << " of rank " << r;
    }
  }
  void Same(const char* what, const VectorPlacement& w, const VectorPlacement& p) const {
    ASSERT_EQ(w.size, p.size) << what;
    for (int32_t r = 0; r < ranks(); ++r) {
      EXPECT_EQ(whole_.All(0, w), parts_.All(r, p)) << what << " of rank " << r;
    }
  }
  // The ranks' columns side by side.
  void Columns(const char* what, const MatrixPlacement& w, const MatrixPlacement& p) const {
    ASSERT_EQ(p.cols * ranks(), w.cols) << what;
    ASSERT_EQ(p.rows, w.rows) << what;
    for (int64_t row = 0; row < w.rows; ++row) {
      Numbers together;
      for (int32_t r = 0; r < ranks(); ++r) Append(parts_.Rows(r, p, row, 1), together);
      ASSERT_EQ(together, whole_.Rows(0, w, row, 1)) << what << " row " << row;
    }
  }
  // Rank 0's is the whole's, the others' are zeros.
  void First(const char* what, const VectorPlacement& w, const VectorPlacement& p) const {
    ASSERT_EQ(w.size, p.size) << what;
    for (int32_t r = 0; r < ranks(); ++r) {
      const Numbers expected = r == 0 ? whole_.All(0, w) : Numbers(static_cast<size_t>(w.size));
      EXPECT_EQ(parts_.All(r, p), expected) << what << " of rank " << r;
    }
  }
  // A section of `whole` rows from `at` that the ranks have `part` rows each of, from `part_at`;
  // several ranks in a row share theirs if there are fewer whole rows than parts.
  template <typename Placement>
  void Section(const char* what, const Placement& w, int64_t at, int64_t whole, const Placement& p,
               int64_t part_at, int64_t part) const {
    ASSERT_EQ(part * ranks() % whole, 0) << what;
    const int64_t sharers = part * ranks() / whole;
    for (int32_t r = 0; r < ranks(); ++r) {
      EXPECT_EQ(Take(whole_, 0, w, at + r / sharers * part, part),
                Take(parts_, r, p, part_at, part))
          << what << " of rank " << r;
    }
  }

 private:
  static Numbers Take(const Image& image, int32_t rank, const MatrixPlacement& m, int64_t first,
                      int64_t rows) {
    return image.Rows(rank, m, first, rows);
  }
  static Numbers Take(const Image& image, int32_t rank, const VectorPlacement& v, int64_t first,
                      int64_t size) {
    return image.Some(rank, v, first, size);
  }
  static void Append(const Numbers& more, Numbers& out) {
    out.insert(out.end(), more.begin(), more.end());
  }

  const Image& whole_;
  const Image& parts_;
};

// q, k and v of matrix or bias.
template <typename Placement>
void CompareQkv(const Comparison& compare, const ModelConfig& model, const ModelConfig& rank,
                const Placement& w, const Placement& p) {
  const int64_t d = model.head_dim;
  const int64_t q = model.num_heads * d, kv = model.num_kv_heads * d;
  const int64_t part_q = rank.num_heads * d, part_kv = rank.num_kv_heads * d;
  compare.Section("q", w, 0, q, p, 0, part_q);
  compare.Section("k", w, q, kv, p, part_q, part_kv);
  compare.Section("v", w, q + kv, kv, p, part_q + part_kv, part_kv);
}

void CompareLatent(const Comparison& compare, const ModelConfig& model, const ModelConfig& rank,
                   const LayerPlacement& w, const LayerPlacement& p) {
  const LatentAttention& latent = *model.latent;
  if (latent.q_lora_rank > 0) {
    compare.Same("down", w.qkv, p.qkv);
    compare.Section("q_up", w.q_up, 0, w.q_up.rows, p.q_up, 0, p.q_up.rows);
  } else {
    const int64_t q = model.num_heads * model.head_dim, part = rank.num_heads * model.head_dim;
    compare.Section("q", w.qkv, 0, q, p.qkv, 0, part);
    for (int64_t row = 0; row < latent.cache_width(); ++row) {
      compare.Section("kv down", w.qkv, q + row, 1, p.qkv, part + row, 1);
    }
  }
  compare.Same("q_norm", w.q_norm, p.q_norm);
  compare.Same("k_norm", w.k_norm, p.k_norm);
  compare.Section("k_up", w.k_up, 0, w.k_up.rows, p.k_up, 0, p.k_up.rows);
  compare.Section("v_up", w.v_up, 0, w.v_up.rows, p.v_up, 0, p.v_up.rows);
}

void CompareLayer(const Comparison& compare, const ModelConfig& model, const ModelConfig& rank,
                  const LayerPlacement& w, const LayerPlacement& p) {
  compare.Same("attention_norm", w.attention_norm, p.attention_norm);
  compare.Same("attention_norm_bias", w.attention_norm_bias, p.attention_norm_bias);
  if (model.latent.has_value()) {
    CompareLatent(compare, model, rank, w, p);
  } else {
    CompareQkv(compare, model, rank, w.qkv, p.qkv);
    if (model.qkv_bias) CompareQkv(compare, model, rank, w.qkv_bias, p.qkv_bias);
    compare.Same("q_norm", w.q_norm, p.q_norm);
    compare.Same("k_norm", w.k_norm, p.k_norm);
  }
  compare.Columns("o", w.o, p.o);
  compare.First("o_bias", w.o_bias, p.o_bias);
  compare.Same("post_attention_norm", w.post_attention_norm, p.post_attention_norm);
  compare.Same("mlp_norm", w.mlp_norm, p.mlp_norm);
  compare.Same("mlp_norm_bias", w.mlp_norm_bias, p.mlp_norm_bias);
  const int64_t inner = model.intermediate_size, part = rank.intermediate_size;
  for (int64_t i = 0; i < (model.gated() ? 2 : 1); ++i) {
    compare.Section("gate_up", w.gate_up, i * inner, inner, p.gate_up, i * part, part);
    if (!model.mlp_bias) continue;
    compare.Section("gate_up_bias", w.gate_up_bias, i * inner, inner, p.gate_up_bias, i * part,
                    part);
  }
  compare.Columns("down", w.down, p.down);
  compare.First("down_bias", w.down_bias, p.down_bias);
  compare.Same("post_mlp_norm", w.post_mlp_norm, p.post_mlp_norm);
}

void CompareHead(const Image& whole, const Image& parts) {
  Numbers together;
  for (int32_t r = 0; r < parts.config.ranks; ++r) {
    const Numbers rows = parts.All(r, parts.layout.lm_head);
    together.insert(together.end(), rows.begin(), rows.end());
  }
  Numbers expected = whole.All(0, whole.layout.lm_head);
  EXPECT_LT((together.size() - expected.size()) / whole.layout.lm_head.cols,
            static_cast<size_t>(8 * parts.config.ranks));
  expected.resize(together.size());
  EXPECT_EQ(together, expected) << "lm_head";
}

void ExpectPartsOf(const ModelConfig& model, int32_t ranks) {
  const Image whole(model, 1), parts(model, ranks);
  const Comparison compare(whole, parts);
  compare.Same("embed", whole.layout.embed, parts.layout.embed);
  compare.Same("positions", whole.layout.positions, parts.layout.positions);
  for (size_t i = 0; i < whole.layout.layers.size(); ++i) {
    CompareLayer(compare, model, parts.config, whole.layout.layers[i], parts.layout.layers[i]);
  }
  compare.Same("final_norm", whole.layout.final_norm, parts.layout.final_norm);
  compare.Same("final_norm_bias", whole.layout.final_norm_bias, parts.layout.final_norm_bias);
  CompareHead(whole, parts);
}

class Families : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    std::ifstream file("tests/data/models/" + GetParam() + ".json");
    ASSERT_TRUE(file);
    model_ = ParseModelConfig(nlohmann::json::parse(file)["config"].dump(), "").value();
    model_.num_layers = 2;
    model_.layer_windows.clear();
  }

  ModelConfig model_;
};

INSTANTIATE_TEST_SUITE_P(TensorParallel, Families,
                         ::testing::Values("llama3", "qwen2", "qwen3", "mistral", "gemma", "gemma2",
                                           "opt", "deepseek_v2", "deepseek_v3"),
                         [](const auto& info) { return info.param; });

TEST_P(Families, PartsPutTogetherAreTheWhole) {
  for (const int32_t ranks : {2, 4}) ExpectPartsOf(model_, ranks);
}

ModelConfig Small() {
  ModelConfig model;
  model.architecture = "LlamaForCausalLM";
  model.num_layers = 1;
  model.hidden_size = 32;
  model.num_heads = 8;
  model.num_kv_heads = 2;
  model.head_dim = 8;
  model.intermediate_size = 48;
  model.vocab_size = 100;
  model.max_position = 64;
  return model;
}

TEST(RankConfig, SharesKvHeadsWhereThereAreTooFew) {
  ModelConfig model = Small();
  model.qkv_bias = model.o_bias = model.mlp_bias = true;
  for (const int32_t ranks : {2, 4, 8}) {
    const auto rank = RankConfig(model, ranks);
    ASSERT_TRUE(rank.ok()) << rank.status();
    EXPECT_EQ(rank->num_heads, 8 / ranks);
    EXPECT_EQ(rank->num_kv_heads, 1);
    EXPECT_EQ(rank->intermediate_size, 48 / ranks);
    EXPECT_EQ(rank->KvTokenBytes(), Bytes(2 * 2 * 8));
    ExpectPartsOf(model, ranks);
  }
}

TEST(RankConfig, HeadIsPaddedAtTheEndOfTheVocabulary) {
  ModelConfig model = Small();
  EXPECT_EQ(RankConfig(model, 2)->head_rows(), 56);
  // The last ranks have nothing.
  model.vocab_size = 20;
  EXPECT_EQ(RankConfig(model, 8)->head_rows(), 8);
  EXPECT_EQ(HeadShare(model, 2, 8).count, 4);
  EXPECT_EQ(HeadShare(model, 7, 8).count, 0);
  ExpectPartsOf(model, 8);
  model.tie_word_embeddings = true;
  ExpectPartsOf(model, 4);
}

TEST(RankConfig, OneRankIsTheModelItself) {
  ModelConfig model = Small();
  model.tie_word_embeddings = true;
  const auto rank = RankConfig(model, 1);
  ASSERT_TRUE(rank.ok());
  EXPECT_EQ(rank->head_rows(), 100);
  EXPECT_TRUE(rank->tie_word_embeddings);
  EXPECT_EQ(rank->ranks, 1);
}

TEST(RankConfig, RefusesWhatCannotBeDivided) {
  const auto refusal = [](const ModelConfig& model, int32_t ranks) {
    const auto rank = RankConfig(model, ranks);
    EXPECT_EQ(rank.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(rank.status().message());
  };
  ModelConfig model = Small();
  EXPECT_THAT(refusal(model, 3), HasSubstr("num_attention_heads is 8"));
  EXPECT_THAT(refusal(model, 0), HasSubstr("expected 1 to 16"));
  EXPECT_THAT(refusal(model, 17), HasSubstr("expected 1 to 16"));
  model.intermediate_size = 49;
  EXPECT_THAT(refusal(model, 2), HasSubstr("intermediate_size is 49"));
  model = Small();
  model.num_heads = 12;
  model.num_kv_heads = 3;
  EXPECT_THAT(refusal(model, 2), HasSubstr("num_key_value_heads is 3"));
  EXPECT_THAT(refusal(model, 4), HasSubstr("a multiple or a divisor of 4"));
  EXPECT_TRUE(RankConfig(model, 3).ok());
}

}  // namespace
}  // namespace palimpsest
