#include "broker/core/sizing/model_layers.h"

#include <algorithm>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"

namespace palimpsest {
namespace {

using nlohmann::json;

constexpr int64_t kMostWindow = 1 << 24;
constexpr int64_t kMostLayers = 1024;

enum class Span { kOpen, kAll, kWindow, kChunk };

struct LayerKind {
  absl::string_view name;
  bool attention = false;
  bool recurrent = false;
  Span span = Span::kOpen;
};

constexpr LayerKind kAttention = {"attention", true};
constexpr LayerKind kRecurrent = {"recurrent", false, true};
constexpr LayerKind kNamedKinds[] = {
    {"full_attention", true, false, Span::kAll},
    {"sliding_attention", true, false, Span::kWindow},
    {"chunked_attention", true, false, Span::kChunk},
    kAttention,
    kRecurrent,
    {"linear_attention", false, true},
    {"mamba", false, true},
    {"mamba2", false, true},
    {"conv", false, true},
    {"hybrid", true, true},
    {"mlp", false, false},
    {"moe", false, false},
};
// Of "hybrid_override_pattern".
constexpr LayerKind kLetterKinds[] = {
    {"M", false, true}, {"*", true}, {"-", false, false}, {"E", false, false}};

class LayerReader {
 public:
  LayerReader(JsonFields& fields, const ModelFamily& family, int32_t count)
      : fields_(fields), family_(family), count_(count) {}

  std::vector<LayerShape> Read() {
    const std::vector<LayerKind> kinds = ReadKinds();
    std::vector<LayerShape> layers;
    if (!fields_.status().ok()) return layers;
    ReadSpans();
    for (int32_t i = 0; i < count_; ++i) {
      const LayerKind& kind = kinds[static_cast<size_t>(i)];
      LayerShape layer = {kind.attention, kind.recurrent, {}};
      if (kind.attention) layer.reach = Reach(kind.span == Span::kOpen ? OpenSpan(i) : kind.span);
      layers.push_back(layer);
    }
    const int32_t shared = fields_.IntOr("num_kv_shared_layers", 0, count_, 0);
    for (int32_t i = count_ - shared; i < count_; ++i) layers[static_cast<size_t>(i)] = {};
    return layers;
  }

 private:
  template <typename AttentionAt>
  std::vector<LayerKind> Where(AttentionAt attention_at) const {
    std::vector<LayerKind> kinds;
    for (int32_t i = 0; i < count_; ++i) kinds.push_back(attention_at(i) ? kAttention : kRecurrent);
    return kinds;
  }

  std::vector<LayerKind> ReadKinds() {
    for (const char* key : {"layer_types", "layers_block_type"}) {
      if (fields_.Find(key) != nullptr) return NamedKinds(key, /*repeats=*/false);
    }
    for (const char* key : {"block_types", "_block_types"}) {
      if (fields_.Find(key) != nullptr) return NamedKinds(key, /*repeats=*/true);
    }
    if (fields_.Find("hybrid_override_pattern") != nullptr) return LetterKinds();
    if (fields_.Find("attn_layer_period") != nullptr) {
      const int32_t period = fields_.Int("attn_layer_period", 1, kMostLayers);
      const int32_t offset = fields_.IntOr("attn_layer_offset", 0, period - 1, 0);
      return Where([&](int32_t i) { return i % period == offset; });
    }
    if (fields_.Find("attn_layer_indices") != nullptr) return KindsByIndex();
    if (const json* types = fields_.Find("attn_type_list"); types != nullptr) {
      if (*types != json(static_cast<size_t>(count_), 1)) {
        fields_.Fail("attn_type_list",
                     absl::StrCat("num_hidden_layers = ", count_, " times 1 (softmax attention)"));
      }
    }
    const bool interval = fields_.Find("full_attention_interval") != nullptr;
    if (interval || family_.layers == LayerRule::kPeriodicAttention) {
      const int32_t period =
          fields_.IntOr("full_attention_interval", 1, kMostLayers, std::max(1, family_.period));
      return Where([&](int32_t i) { return (i + 1) % period == 0; });
    }
    LayerKind every = kAttention;
    if (family_.layers == LayerRule::kRecurrent) every = kRecurrent;
    if (family_.layers == LayerRule::kBoth) every.recurrent = true;
    return std::vector<LayerKind>(static_cast<size_t>(count_), every);
  }

  std::vector<LayerKind> NamedKinds(absl::string_view key, bool repeats) {
    const json& names = *fields_.Find(key);
    std::vector<LayerKind> kinds;
    const bool long_enough = names.is_array() && !names.empty() &&
                             names.size() <= static_cast<size_t>(kMostLayers) &&
                             (repeats || names.size() == static_cast<size_t>(count_));
    for (size_t i = 0; long_enough && i < static_cast<size_t>(count_); ++i) {
      const json& name = names[i % names.size()];
      const auto* kind =
          std::find_if(std::begin(kNamedKinds), std::end(kNamedKinds), [&](const LayerKind& known) {
            return name.is_string() && name.get_ref<const std::string&>() == known.name;
          });
      if (kind == std::end(kNamedKinds)) {
        FailKind(key, name);
        return {};
      }
      kinds.push_back(*kind);
    }
    if (!long_enough) {
      fields_.Fail(key, repeats ? "a list of kinds of layers"
                                : absl::StrCat("a list of num_hidden_layers = ", count_,
                                               " kinds of layers"));
    }
    return kinds;
  }

  void FailKind(absl::string_view key, const json& name) {
    std::string known;
    for (const LayerKind& kind : kNamedKinds) {
      absl::StrAppend(&known, known.empty() ? "" : ", ", kind.name);
    }
    fields_.Fail(
        key, absl::StrCat("kinds out of ", known, " (not ",
                          name.is_string() ? name.get<std::string>().substr(0, 40) : "it", ")"));
  }

  std::vector<LayerKind> LetterKinds() {
    const std::string letters = fields_.StringOr("hybrid_override_pattern", "");
    std::vector<LayerKind> kinds;
    for (const char letter : letters) {
      for (const LayerKind& kind : kLetterKinds) {
        if (kind.name[0] == letter) kinds.push_back(kind);
      }
    }
    if (kinds.size() != static_cast<size_t>(count_) || letters.size() != kinds.size()) {
      fields_.Fail("hybrid_override_pattern",
                   absl::StrCat("num_hidden_layers = ", count_, " letters out of M * - E"));
    }
    return kinds;
  }

  std::vector<LayerKind> KindsByIndex() {
    const json& list = *fields_.Find("attn_layer_indices");
    std::vector<bool> attention(static_cast<size_t>(count_), false);
    bool known = list.is_array();
    for (size_t i = 0; known && i < list.size(); ++i) {
      known =
          list[i].is_number_unsigned() && list[i].get<uint64_t>() < static_cast<uint64_t>(count_);
      if (known) attention[list[i].get<size_t>()] = true;
    }
    if (!known) {
      fields_.Fail("attn_layer_indices", absl::StrCat("a list of layers from 0 to ", count_ - 1));
    }
    return Where([&](int32_t i) { return attention[static_cast<size_t>(i)]; });
  }

  void ReadSpans() {
    chunk_ = fields_.IntOr("attention_chunk_size", 1, kMostWindow, 0);
    for (const char* key : {"sliding_window", "attention_window_size"}) {
      const bool null = fields_.Raw(key) != nullptr && fields_.Find(key) == nullptr;
      if (null) return;
      if (fields_.Find(key) != nullptr) {
        window_ = fields_.Int(key, 1, kMostWindow);
        return;
      }
    }
    window_ = family_.window;
  }

  // Of a layer whose kind leaves it open.
  Span OpenSpan(int32_t layer) {
    if (chunk_ > 0) return ChunkSpan(layer);
    if (window_ == 0) return Span::kAll;
    if (fields_.Find("use_sliding_window") != nullptr ||
        family_.windows == WindowRule::kBehindFirst) {
      if (!fields_.BoolOr("use_sliding_window", false)) return Span::kAll;
      return layer >= fields_.IntOr("max_window_layers", 0, kMostLayers, 28) ? Span::kWindow
                                                                             : Span::kAll;
    }
    for (const char* key : {"sliding_window_pattern", "_sliding_window_pattern"}) {
      if (fields_.Find(key) != nullptr) return PatternSpan(key, layer);
    }
    switch (family_.windows) {
      case WindowRule::kAll:
        return Span::kWindow;
      case WindowRule::kPeriodic:
        return (layer + 1) % family_.period == 0 ? Span::kAll : Span::kWindow;
      default:
        fields_.Fail("layer_types",
                     "which layers sliding_window binds (it is not known for this model_type)");
        return Span::kAll;
    }
  }

  // A number n: every n-th layer sees all tokens. Letters that repeat: L has the window, G not.
  Span PatternSpan(absl::string_view key, int32_t layer) {
    if (!fields_.Find(key)->is_string()) {
      return (layer + 1) % fields_.Int(key, 1, kMostLayers) == 0 ? Span::kAll : Span::kWindow;
    }
    const std::string letters = fields_.StringOr(key, "");
    if (letters.empty() || letters.find_first_not_of("LG") != std::string::npos) {
      fields_.Fail(key, "a number, or letters L and G");
      return Span::kAll;
    }
    return letters[static_cast<size_t>(layer) % letters.size()] == 'G' ? Span::kAll : Span::kWindow;
  }

  // Layers without rotary embedding see all tokens; by default every fourth (Llama 4).
  Span ChunkSpan(int32_t layer) {
    const json* list = fields_.Find("no_rope_layers");
    if (list == nullptr || (list->is_array() && list->empty())) {
      const int32_t interval = fields_.IntOr("no_rope_layer_interval", 1, kMostLayers, 4);
      return (layer + 1) % interval == 0 ? Span::kAll : Span::kChunk;
    }
    const auto index = static_cast<size_t>(layer);
    if (!list->is_array() || list->size() != static_cast<size_t>(count_) ||
        ((*list)[index] != 0 && (*list)[index] != 1)) {
      fields_.Fail("no_rope_layers",
                   absl::StrCat("a list of num_hidden_layers = ", count_, " times 0 or 1"));
      return Span::kAll;
    }
    return (*list)[index] == 1 ? Span::kChunk : Span::kAll;
  }

  KvReach Reach(Span span) {
    if (span == Span::kWindow) {
      if (window_ == 0) fields_.Fail("sliding_window", "the window of layers that have one");
      return {KvReach::Kind::kWindow, window_};
    }
    if (span == Span::kChunk) {
      if (chunk_ == 0) fields_.Fail("attention_chunk_size", "the size of the layers' chunks");
      return {KvReach::Kind::kChunk, chunk_};
    }
    return {};
  }

  JsonFields& fields_;
  const ModelFamily& family_;
  const int32_t count_;
  int32_t window_ = 0;
  int32_t chunk_ = 0;
};

}  // namespace

std::vector<LayerShape> ReadLayers(JsonFields& fields, const ModelFamily& family, int32_t count) {
  return LayerReader(fields, family, count).Read();
}

}  // namespace palimpsest
