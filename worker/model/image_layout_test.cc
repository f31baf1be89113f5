#include "worker/model/image_layout.h"

#include <algorithm>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "worker/compute/cpu/packing.h"

namespace palimpsest {
namespace {

struct Shape {
  const char* name;
  ModelConfig config;
  int64_t parameters;  // as published for the model, rounded
};

ModelConfig Config(int32_t layers, int32_t hidden, int32_t heads, int32_t kv_heads,
                   int32_t intermediate, int32_t vocab, bool tied, bool qkv_bias = false) {
  ModelConfig config;
  config.num_layers = layers;
  config.hidden_size = hidden;
  config.num_heads = heads;
  config.num_kv_heads = kv_heads;
  config.head_dim = hidden / heads;
  config.intermediate_size = intermediate;
  config.vocab_size = vocab;
  config.tie_word_embeddings = tied;
  config.qkv_bias = qkv_bias;
  return config;
}

ModelConfig Opt13b() {
  ModelConfig config = Config(40, 5120, 40, 40, 20480, 50272, true);
  config.norm = NormKind::kLayer;
  config.activation = Activation::kRelu;
  config.position_table_offset = 2;
  config.max_position = 2048;
  config.qkv_bias = config.o_bias = config.mlp_bias = true;
  return config;
}

ModelConfig Qwen3() {
  ModelConfig config = Config(28, 1024, 16, 8, 3072, 151936, true);
  config.head_dim = 128;
  config.qk_norm = true;
  return config;
}

ModelConfig Gemma2() {
  ModelConfig config = Config(26, 2304, 8, 4, 9216, 256000, true);
  config.head_dim = 256;
  config.post_norms = true;
  return config;
}

// The dense layers of DeepSeek-V2 and V3.
ModelConfig Latent(int32_t layers, int32_t hidden, int32_t heads, int32_t q_lora_rank) {
  ModelConfig config = Config(layers, hidden, heads, 1, 18432, 129280, false);
  config.latent = LatentAttention{.q_lora_rank = q_lora_rank,
                                  .kv_lora_rank = 512,
                                  .qk_nope_head_dim = 128,
                                  .qk_rope_head_dim = 64,
                                  .v_head_dim = 128};
  config.head_dim = 192;
  return config;
}

std::vector<Shape> Shapes() {
  return {
      {"Llama-3-8B", Config(32, 4096, 32, 8, 14336, 128256, false), 8'030'000'000},
      {"Llama-2-7B", Config(32, 4096, 32, 32, 11008, 32000, false), 6'738'000'000},
      {"Qwen2-0.5B", Config(24, 896, 14, 2, 4864, 151936, true, true), 494'000'000},
      {"Mistral-7B", Config(32, 4096, 32, 8, 14336, 32000, false), 7'242'000'000},
      {"SmolLM2-135M", Config(30, 576, 9, 3, 1536, 49152, true), 134'500'000},
      {"Qwen3-0.6B", Qwen3(), 596'000'000},
      {"Gemma-2-2B", Gemma2(), 2'614'000'000},
      {"OPT-13b", Opt13b(), 12'853'000'000},
      // Counted from the sizes: a layer's attention has 187'107'328 weights, its MLP 396'361'728.
      {"3 layers of V3", Latent(3, 7168, 128, 1536), 3'603'782'656},
      {"2 layers of V2-Lite's attention", Latent(2, 2048, 16, 0), 787'480'576},
  };
}

struct Range {
  Bytes begin;
  Bytes end;
};

class Ranges {
 public:
  explicit Ranges(WeightFormat format) : format_(format) {}

  void Add(const MatrixPlacement& m) {
    const Bytes size = format_ == WeightFormat::kRowMajor ? Bytes(int64_t{m.rows} * m.cols * 2)
                                                          : PackedMatrixBytes(m.rows, m.cols);
    if (m.rows > 0) ranges_.push_back({m.offset, m.offset + size});
  }
  void Add(const VectorPlacement& v) {
    const int64_t element = format_ == WeightFormat::kRowMajor ? 2 : 4;
    if (v.size > 0) ranges_.push_back({v.offset, v.offset + Bytes(v.size * element)});
  }

  // Sorted, aligned, disjoint and inside the stage.
  void CheckWithin(const ImageLayout& layout, const StagePlacement& stage) {
    std::sort(ranges_.begin(), ranges_.end(),
              [](const Range& a, const Range& b) { return a.begin < b.begin; });
    Bytes end = layout.slab_bytes * stage.first_slab;
    for (const Range& range : ranges_) {
      EXPECT_GE(range.begin, end) << stage.name;
      EXPECT_EQ(range.begin.count() % (format_ == WeightFormat::kRowMajor ? 256 : 64), 0);
      end = range.end;
    }
    EXPECT_LE(end, layout.slab_bytes * (stage.first_slab + stage.slab_count)) << stage.name;
    ASSERT_FALSE(ranges_.empty());
    EXPECT_EQ(ranges_.front().begin, layout.slab_bytes * stage.first_slab) << stage.name;
  }

 private:
  const WeightFormat format_;
  std::vector<Range> ranges_;
};

Ranges LayerRanges(const LayerPlacement& layer, WeightFormat format) {
  Ranges ranges(format);
  for (const MatrixPlacement& m :
       {layer.qkv, layer.q_up, layer.k_up, layer.v_up, layer.o, layer.gate_up, layer.down}) {
    ranges.Add(m);
  }
  for (const VectorPlacement& v :
       {layer.attention_norm, layer.attention_norm_bias, layer.q_norm, layer.k_norm,
        layer.post_attention_norm, layer.mlp_norm, layer.mlp_norm_bias, layer.post_mlp_norm,
        layer.qkv_bias, layer.o_bias, layer.gate_up_bias, layer.down_bias}) {
    ranges.Add(v);
  }
  return ranges;
}

TEST(LayOutImage, StagesCoverTheImageInOrder) {
  for (const Shape& shape : Shapes()) {
    SCOPED_TRACE(shape.name);
    for (const Bytes slab : {MiB(2), MiB(32), Bytes(4096)}) {
      auto layout = LayOutImage(shape.config, slab);
      ASSERT_TRUE(layout.ok()) << layout.status();
      ASSERT_EQ(layout->stages.size(), shape.config.num_layers + 2);
      int32_t next = 0;
      for (const StagePlacement& stage : layout->stages) {
        EXPECT_EQ(stage.first_slab, next);
        EXPECT_GT(stage.slab_count, 0);
        next += stage.slab_count;
      }
      EXPECT_EQ(next, layout->slabs());
      EXPECT_EQ(layout->total, slab * next);
      EXPECT_EQ(layout->stages.front().name, "embed");
      EXPECT_EQ(layout->stages[1].name, "layer.0");
      EXPECT_EQ(layout->stages.back().name, "head");
    }
  }
}

TEST(LayOutImage, TensorsAreDisjointAndInsideTheirStage) {
  for (const Shape& shape : Shapes()) {
    for (const WeightFormat format : {WeightFormat::kCpuPanels, WeightFormat::kRowMajor}) {
      SCOPED_TRACE(shape.name);
      auto layout = LayOutImage(shape.config, MiB(2), format);
      ASSERT_TRUE(layout.ok()) << layout.status();
      EXPECT_EQ(layout->format, format);
      Ranges embed(format);
      embed.Add(layout->embed);
      embed.Add(layout->positions);
      embed.CheckWithin(*layout, layout->stages.front());
      for (size_t i = 0; i < layout->layers.size(); ++i) {
        LayerRanges(layout->layers[i], format).CheckWithin(*layout, layout->stages[i + 1]);
      }
      Ranges head(format);
      head.Add(layout->final_norm);
      head.Add(layout->final_norm_bias);
      if (!shape.config.tie_word_embeddings) head.Add(layout->lm_head);
      head.CheckWithin(*layout, layout->stages.back());
    }
  }
}

TEST(LayOutImage, HoldsAllParametersWithLittlePadding) {
  for (const Shape& shape : Shapes()) {
    auto layout = LayOutImage(shape.config, MiB(2));
    ASSERT_TRUE(layout.ok()) << layout.status();
    const double per_parameter =
        static_cast<double>(layout->total.count()) / static_cast<double>(shape.parameters);
    EXPECT_GT(per_parameter, 1.99) << shape.name;
    // At most a slab of padding per stage.
    const double padding = 2.0 * (1 << 20) * static_cast<double>(layout->stages.size());
    EXPECT_LT(per_parameter, 2.01 + padding / static_cast<double>(shape.parameters)) << shape.name;
  }
}

TEST(WeightFormat, NamesAreParsed) {
  for (const WeightFormat format : {WeightFormat::kCpuPanels, WeightFormat::kRowMajor}) {
    EXPECT_EQ(ParseWeightFormat(WeightFormatName(format)).value(), format);
  }
  EXPECT_EQ(ParseWeightFormat("rows").status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(LayOutImage, FusesProjections) {
  auto layout = LayOutImage(Shapes()[0].config, MiB(2));
  ASSERT_TRUE(layout.ok());
  EXPECT_EQ(layout->layers[5].qkv.rows, 4096 + 2 * 1024);
  EXPECT_EQ(layout->layers[5].gate_up.rows, 2 * 14336);
  EXPECT_EQ(layout->layers[5].down.cols, 14336);
  EXPECT_EQ(layout->layers[5].qkv_bias.size, 0);
}

TEST(LayOutImage, PlacesBiases) {
  ModelConfig config = Shapes()[2].config;
  config.o_bias = config.mlp_bias = true;
  auto layout = LayOutImage(config, KiB(64));
  ASSERT_TRUE(layout.ok());
  const LayerPlacement& layer = layout->layers[3];
  EXPECT_EQ(layer.qkv_bias.size, 896 + 2 * 128);
  EXPECT_EQ(layer.o_bias.size, 896);
  EXPECT_EQ(layer.gate_up_bias.size, 2 * 4864);
  EXPECT_EQ(layer.down_bias.size, 896);
  LayerRanges(layer, layout->format).CheckWithin(*layout, layout->stages[4]);
}

TEST(LayOutImage, SplitsLatentProjections) {
  auto layout = LayOutImage(Latent(1, 7168, 128, 1536), MiB(2));
  ASSERT_TRUE(layout.ok());
  const LayerPlacement& layer = layout->layers[0];
  EXPECT_EQ(layer.qkv.rows, 1536 + 512 + 64);
  EXPECT_EQ(layer.q_up.rows, 128 * 192);
  EXPECT_EQ(layer.k_up.rows, 128 * 512);
  EXPECT_EQ(layer.k_up.cols, 128);
  EXPECT_EQ(layer.v_up.rows, 128 * 128);
  EXPECT_EQ(layer.v_up.cols, 512);
  EXPECT_EQ(layer.o.cols, 128 * 128);
  auto one_step = LayOutImage(Latent(1, 2048, 16, 0), MiB(2));
  ASSERT_TRUE(one_step.ok());
  EXPECT_EQ(one_step->layers[0].qkv.rows, 16 * 192 + 512 + 64);
  EXPECT_EQ(one_step->layers[0].q_up.rows, 0);
}

TEST(LayOutImage, SharesTheMatrixOfTiedEmbeddings) {
  auto tied = LayOutImage(Shapes()[4].config, MiB(2));
  ASSERT_TRUE(tied.ok());
  EXPECT_EQ(tied->lm_head.offset, tied->embed.offset);
  EXPECT_EQ(tied->stages.back().slab_count, 1);
  auto untied = LayOutImage(Shapes()[1].config, MiB(2));
  ASSERT_TRUE(untied.ok());
  EXPECT_GT(untied->lm_head.offset, untied->final_norm.offset);
}

TEST(LayOutImage, RefusesSlabsThatAreNoPages) {
  for (const Bytes slab : {Bytes(0), Bytes(-4096), Bytes(4095), Bytes(2000000), GiB(65)}) {
    EXPECT_EQ(LayOutImage(Shapes()[4].config, slab).status().code(),
              absl::StatusCode::kInvalidArgument)
        << slab;
  }
}

TEST(LayOutImage, RefusesImagesWithoutBound) {
  ModelConfig config = Config(1024, 1 << 17, 1, 1, 1 << 20, 1 << 22, false);
  EXPECT_FALSE(LayOutImage(config, Bytes(4096)).ok());
}

}  // namespace
}  // namespace palimpsest
