#include "worker/model/image_builder.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "worker/compute/cpu/packing.h"

namespace palimpsest {
namespace {

// Rows are read in pieces of about this size.
constexpr int64_t kPieceElements = int64_t{1} << 20;
constexpr size_t kMaxNamed = 8;

// One source tensor and the place of its rows (or, for a vector, its elements) in the image.
struct Fill {
  std::string tensor;
  Bytes target;             // start of the placement that the tensor is a part of
  int64_t target_rows = 0;  // rows of that placement
  int64_t first_row = 0;    // where this tensor's rows begin in it
  int64_t rows = 0;
  int64_t cols = 0;  // 0: a vector

  std::vector<int64_t> Shape() const {
    return cols == 0 ? std::vector<int64_t>{rows} : std::vector<int64_t>{rows, cols};
  }
  Bytes SourceBytes() const { return Bytes(rows * std::max<int64_t>(cols, 1) * 2); }
};

// Tensors that share one placement, in order of their rows.
class FillList {
 public:
  struct Part {
    std::string tensor;
    int64_t rows;
  };

  void Matrix(const MatrixPlacement& to, const std::vector<Part>& parts) {
    Add(to.offset, to.rows, to.cols, parts);
  }
  void Vector(const VectorPlacement& to, const std::vector<Part>& parts) {
    if (to.size > 0) Add(to.offset, to.size, 0, parts);
  }

  std::vector<Fill> Take() && { return std::move(fills_); }

 private:
  void Add(Bytes target, int64_t target_rows, int64_t cols, const std::vector<Part>& parts) {
    int64_t row = 0;
    for (const Part& part : parts) {
      fills_.push_back({part.tensor, target, target_rows, row, part.rows, cols});
      row += part.rows;
    }
    assert(row == target_rows);
  }

  std::vector<Fill> fills_;
};

void AddLayer(const ModelConfig& config, int32_t index, const LayerPlacement& to, FillList& fills) {
  const std::string prefix = absl::StrCat("model.layers.", index, ".");
  const std::string attention = prefix + "self_attn.";
  const std::string mlp = prefix + "mlp.";
  const int64_t hidden = config.hidden_size;
  const int64_t inner = config.intermediate_size;
  const int64_t q = int64_t{config.num_heads} * config.head_dim;
  const int64_t kv = int64_t{config.num_kv_heads} * config.head_dim;
  fills.Vector(to.attention_norm, {{prefix + "input_layernorm.weight", hidden}});
  fills.Matrix(to.qkv, {{attention + "q_proj.weight", q},
                        {attention + "k_proj.weight", kv},
                        {attention + "v_proj.weight", kv}});
  fills.Vector(to.qkv_bias, {{attention + "q_proj.bias", q},
                             {attention + "k_proj.bias", kv},
                             {attention + "v_proj.bias", kv}});
  fills.Matrix(to.o, {{attention + "o_proj.weight", hidden}});
  fills.Vector(to.o_bias, {{attention + "o_proj.bias", hidden}});
  fills.Vector(to.mlp_norm, {{prefix + "post_attention_layernorm.weight", hidden}});
  fills.Matrix(to.gate_up, {{mlp + "gate_proj.weight", inner}, {mlp + "up_proj.weight", inner}});
  fills.Vector(to.gate_up_bias, {{mlp + "gate_proj.bias", inner}, {mlp + "up_proj.bias", inner}});
  fills.Matrix(to.down, {{mlp + "down_proj.weight", hidden}});
  fills.Vector(to.down_bias, {{mlp + "down_proj.bias", hidden}});
}

std::vector<Fill> AllFills(const ModelConfig& config, const ImageLayout& layout) {
  FillList fills;
  fills.Matrix(layout.embed, {{"model.embed_tokens.weight", config.vocab_size}});
  for (int32_t i = 0; i < config.num_layers; ++i) {
    AddLayer(config, i, layout.layers[static_cast<size_t>(i)], fills);
  }
  fills.Vector(layout.final_norm, {{"model.norm.weight", config.hidden_size}});
  if (!config.tie_word_embeddings) {
    fills.Matrix(layout.lm_head, {{"lm_head.weight", config.vocab_size}});
  }
  return std::move(fills).Take();
}

bool IsDerived(absl::string_view name, const ModelConfig& config) {
  return absl::EndsWith(name, ".rotary_emb.inv_freq") ||
         absl::EndsWith(name, ".rotary_emb.cos_cached") ||
         absl::EndsWith(name, ".rotary_emb.sin_cached") ||
         (config.tie_word_embeddings && name == "lm_head.weight");
}

absl::Status NamesError(absl::string_view problem, std::vector<std::string> names) {
  const size_t all = names.size();
  names.resize(std::min(all, kMaxNamed));
  return absl::InvalidArgumentError(
      absl::StrCat(problem, ": ", absl::StrJoin(names, ", "),
                   all > kMaxNamed ? absl::StrCat(" and ", all - kMaxNamed, " more") : ""));
}

absl::Status CheckFills(const Checkpoint& checkpoint, const ModelConfig& config,
                        const std::vector<Fill>& fills) {
  absl::flat_hash_set<absl::string_view> wanted;
  std::vector<std::string> missing;
  for (const Fill& fill : fills) {
    wanted.insert(fill.tensor);
    const auto found = checkpoint.tensors().find(fill.tensor);
    if (found == checkpoint.tensors().end()) {
      missing.push_back(fill.tensor);
      continue;
    }
    const TensorInfo& tensor = found->second;
    if (tensor.shape != fill.Shape()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "tensor ", fill.tensor, ": expected shape [", absl::StrJoin(fill.Shape(), ", "),
          "] as in config.json, got [", absl::StrJoin(tensor.shape, ", "), "]"));
    }
    if (tensor.dtype != "BF16" && tensor.dtype != "F16" && tensor.dtype != "F32") {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor ", fill.tensor, ": expected BF16, F16 or F32, got ", tensor.dtype));
    }
  }
  if (!missing.empty()) return NamesError("the model folder lacks tensors", std::move(missing));
  std::vector<std::string> unknown;
  for (const auto& [name, tensor] : checkpoint.tensors()) {
    if (!wanted.contains(name) && !IsDerived(name, config)) unknown.push_back(name.substr(0, 200));
  }
  if (unknown.empty()) return absl::OkStatus();
  return NamesError(absl::StrCat("the model folder holds tensors that a ", config.architecture,
                                 " of this config.json does not use"),
                    std::move(unknown));
}

// Writes fills one after another and counts.
class Builder {
 public:
  Builder(const Checkpoint& checkpoint, WeightFormat format, absl::Span<std::byte> image,
          const ByteProgress& progress, const std::vector<Fill>& fills)
      : checkpoint_(checkpoint), format_(format), image_(image), progress_(progress) {
    for (const Fill& fill : fills) total_ += fill.SourceBytes();
  }

  absl::Status Write(const Fill& fill) {
    return fill.cols == 0 ? WriteVector(fill) : WriteMatrix(fill);
  }

 private:
  std::byte* Target(const Fill& fill) const { return image_.data() + fill.target.count(); }

  absl::Status WriteVector(const Fill& fill) {
    const TensorInfo& tensor = checkpoint_.tensors().at(fill.tensor);
    absl::Status status;
    if (format_ == WeightFormat::kRowMajor) {
      auto* to = reinterpret_cast<uint16_t*>(Target(fill)) + fill.first_row;
      status = checkpoint_.ReadBf16(tensor, 0, absl::MakeSpan(to, fill.rows));
    } else {
      auto* to = reinterpret_cast<float*>(Target(fill)) + fill.first_row;
      status = checkpoint_.ReadFloats(tensor, 0, absl::MakeSpan(to, fill.rows));
    }
    Advance(fill.SourceBytes());
    return status;
  }

  absl::Status WriteMatrix(const Fill& fill) {
    const TensorInfo& tensor = checkpoint_.tensors().at(fill.tensor);
    const int64_t piece = std::max<int64_t>(1, kPieceElements / fill.cols);
    for (int64_t row = 0; row < fill.rows; row += piece) {
      const int64_t count = std::min(piece, fill.rows - row);
      rows_.resize(static_cast<size_t>(count * fill.cols));
      if (absl::Status status =
              checkpoint_.ReadBf16(tensor, row * fill.cols, absl::MakeSpan(rows_));
          !status.ok()) {
        return status;
      }
      if (format_ == WeightFormat::kRowMajor) {
        std::memcpy(Target(fill) + (fill.first_row + row) * fill.cols * 2, rows_.data(),
                    rows_.size() * sizeof(uint16_t));
      } else {
        PackRows(rows_.data(), fill.first_row + row, count, fill.target_rows, fill.cols,
                 Target(fill));
      }
      Advance(Bytes(count * fill.cols * 2));
    }
    return absl::OkStatus();
  }

  void Advance(Bytes bytes) {
    done_ += bytes;
    if (progress_) progress_(done_, total_);
  }

  const Checkpoint& checkpoint_;
  const WeightFormat format_;
  const absl::Span<std::byte> image_;
  const ByteProgress& progress_;
  std::vector<uint16_t> rows_;
  Bytes done_;
  Bytes total_;
};

}  // namespace

absl::Status CheckTensors(const Checkpoint& checkpoint, const ModelConfig& config,
                          const ImageLayout& layout) {
  return CheckFills(checkpoint, config, AllFills(config, layout));
}

absl::Status BuildImage(const Checkpoint& checkpoint, const ModelConfig& config,
                        const ImageLayout& layout, absl::Span<std::byte> image,
                        const ByteProgress& progress) {
  assert(static_cast<int64_t>(image.size()) == layout.total.count());
  assert(reinterpret_cast<uintptr_t>(image.data()) % kPackedLineBytes == 0);
  const std::vector<Fill> fills = AllFills(config, layout);
  if (absl::Status status = CheckFills(checkpoint, config, fills); !status.ok()) return status;
  Builder builder(checkpoint, layout.format, image, progress, fills);
  for (const Fill& fill : fills) {
    if (absl::Status status = builder.Write(fill); !status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace palimpsest
