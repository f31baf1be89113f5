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
#include "worker/model/dummy_weights.h"
#include "worker/model/tensor_plan.h"

namespace palimpsest {
namespace {

// Rows are read in pieces of about this size.
constexpr int64_t kPieceElements = int64_t{1} << 20;
constexpr size_t kMaxNamed = 8;

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

// A checkpoint of the bare model lacks the "model." that its names have within the whole one.
TensorMap::const_iterator Find(const Checkpoint& checkpoint, const std::string& name) {
  constexpr absl::string_view kBase = "model.";
  const auto found = checkpoint.tensors().find(name);
  if (found != checkpoint.tensors().end() || !absl::StartsWith(name, kBase)) return found;
  return checkpoint.tensors().find(name.substr(kBase.size()));
}

absl::Status CheckTensor(const TensorPiece& piece, const TensorInfo& tensor) {
  if (tensor.shape != piece.shape) {
    return absl::InvalidArgumentError(absl::StrCat(
        "tensor ", piece.tensor, ": expected shape [", absl::StrJoin(piece.shape, ", "),
        "] as in config.json, got [", absl::StrJoin(tensor.shape, ", "), "]"));
  }
  if (tensor.dtype != "BF16" && tensor.dtype != "F16" && tensor.dtype != "F32") {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor ", piece.tensor, ": expected BF16, F16 or F32, got ", tensor.dtype));
  }
  return absl::OkStatus();
}

absl::Status CheckPieces(const Checkpoint& checkpoint, const ModelConfig& config,
                         const std::vector<TensorPiece>& pieces) {
  absl::flat_hash_set<absl::string_view> wanted;
  std::vector<std::string> missing;
  for (const TensorPiece& piece : pieces) {
    const auto found = Find(checkpoint, piece.tensor);
    if (found == checkpoint.tensors().end()) {
      if (missing.empty() || missing.back() != piece.tensor) missing.push_back(piece.tensor);
      continue;
    }
    if (!wanted.insert(found->first).second) continue;
    if (absl::Status status = CheckTensor(piece, found->second); !status.ok()) return status;
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

// Where the numbers come from: elements `first` .. of a piece's tensor.
class Source {
 public:
  virtual ~Source() = default;
  virtual absl::Status ReadBf16(const TensorPiece& piece, int64_t first,
                                absl::Span<uint16_t> out) const = 0;
  virtual absl::Status ReadFloats(const TensorPiece& piece, int64_t first,
                                  absl::Span<float> out) const = 0;
};

class CheckpointSource final : public Source {
 public:
  explicit CheckpointSource(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {}

  absl::Status ReadBf16(const TensorPiece& piece, int64_t first,
                        absl::Span<uint16_t> out) const override {
    return checkpoint_.ReadBf16(Find(checkpoint_, piece.tensor)->second, first, out);
  }
  absl::Status ReadFloats(const TensorPiece& piece, int64_t first,
                          absl::Span<float> out) const override {
    return checkpoint_.ReadFloats(Find(checkpoint_, piece.tensor)->second, first, out);
  }

 private:
  const Checkpoint& checkpoint_;
};

class DummySource final : public Source {
 public:
  DummySource(uint64_t seed, float norm_weight_offset)
      : seed_(seed), norm_weight_offset_(norm_weight_offset) {}

  absl::Status ReadBf16(const TensorPiece& piece, int64_t first,
                        absl::Span<uint16_t> out) const override {
    Tensor(piece).ReadBf16(first, out);
    return absl::OkStatus();
  }
  absl::Status ReadFloats(const TensorPiece& piece, int64_t first,
                          absl::Span<float> out) const override {
    Tensor(piece).ReadFloats(first, out);
    return absl::OkStatus();
  }

 private:
  DummyTensor Tensor(const TensorPiece& piece) const {
    return {seed_, piece.tensor, piece.is_vector() ? 0 : piece.cols(), norm_weight_offset_};
  }

  const uint64_t seed_;
  const float norm_weight_offset_;
};

// Writes pieces one after another and counts.
class Builder {
 public:
  Builder(const Source& source, WeightFormat format, Bytes total, const ByteProgress& progress)
      : source_(source), format_(format), total_(total), progress_(progress) {}

  // Of one rank, into its part of the image.
  absl::Status Write(const std::vector<TensorPiece>& pieces, absl::Span<std::byte> part) {
    part_ = part;
    for (const TensorPiece& piece : pieces) {
      absl::Status status = piece.is_vector()                 ? WriteVector(piece)
                            : piece.order == RowOrder::kPlain ? WriteRows(piece)
                                                              : WriteReordered(piece);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

 private:
  std::byte* Target(const TensorPiece& piece) const { return part_.data() + piece.target.count(); }

  absl::Status WriteVector(const TensorPiece& piece) {
    absl::Status status;
    if (format_ == WeightFormat::kRowMajor) {
      auto* to = reinterpret_cast<uint16_t*>(Target(piece)) + piece.target_first_row;
      status = source_.ReadBf16(piece, piece.first_row, absl::MakeSpan(to, piece.rows));
    } else {
      auto* to = reinterpret_cast<float*>(Target(piece)) + piece.target_first_row;
      status = source_.ReadFloats(piece, piece.first_row, absl::MakeSpan(to, piece.rows));
    }
    Advance(piece.SourceBytes());
    return status;
  }

  absl::Status Read(const TensorPiece& piece, int64_t row, int64_t count) {
    rows_.resize(static_cast<size_t>(count * piece.width));
    if (piece.width == piece.cols()) {
      return source_.ReadBf16(piece, row * piece.cols(), absl::MakeSpan(rows_));
    }
    absl::Status status;
    for (int64_t i = 0; i < count && status.ok(); ++i) {
      const auto part = absl::MakeSpan(rows_).subspan(static_cast<size_t>(i * piece.width),
                                                      static_cast<size_t>(piece.width));
      status = source_.ReadBf16(piece, (row + i) * piece.cols() + piece.first_col, part);
    }
    return status;
  }

  // `rows` holds `count` rows of `cols`, which begin at row `first` of the placement.
  void Place(const TensorPiece& piece, const std::vector<uint16_t>& rows, int64_t first,
             int64_t count, int64_t cols) {
    if (format_ == WeightFormat::kRowMajor) {
      std::memcpy(Target(piece) + first * cols * 2, rows.data(), rows.size() * sizeof(uint16_t));
    } else {
      PackRows(rows.data(), first, count, piece.target_rows, cols, Target(piece));
    }
    Advance(Bytes(count * cols * 2));
  }

  absl::Status WriteRows(const TensorPiece& piece) {
    const int64_t step = std::max<int64_t>(1, kPieceElements / piece.width);
    for (int64_t row = 0; row < piece.rows; row += step) {
      const int64_t count = std::min(step, piece.rows - row);
      absl::Status status = Read(piece, piece.first_row + row, count);
      if (!status.ok()) return status;
      Place(piece, rows_, piece.target_first_row + row, count, piece.width);
    }
    return absl::OkStatus();
  }

  absl::Status WriteReordered(const TensorPiece& piece) {
    absl::Status status = Read(piece, piece.first_row, piece.rows);
    if (!status.ok()) return status;
    const int64_t rows = piece.rows, cols = piece.cols();
    reordered_.resize(rows_.size());
    if (piece.order == RowOrder::kTransposed) {
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < cols; ++c) reordered_[c * rows + r] = rows_[r * cols + c];
      }
      Place(piece, reordered_, piece.target_first_row, cols, rows);
      return absl::OkStatus();
    }
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t from = r < rows / 2 ? 2 * r : 2 * r + 1 - rows;
      std::copy_n(&rows_[from * cols], cols, &reordered_[r * cols]);
    }
    Place(piece, reordered_, piece.target_first_row, rows, cols);
    return absl::OkStatus();
  }

  void Advance(Bytes bytes) {
    done_ += bytes;
    if (progress_) progress_(done_, total_);
  }

  const Source& source_;
  const WeightFormat format_;
  const Bytes total_;
  const ByteProgress& progress_;
  absl::Span<std::byte> part_;
  std::vector<uint16_t> rows_;
  std::vector<uint16_t> reordered_;
  Bytes done_;
};

absl::Status Build(const Source& source, const ModelConfig& model, const ImageLayout& layout,
                   absl::Span<std::byte> image, const ByteProgress& progress) {
  assert(static_cast<int64_t>(image.size()) == layout.image_bytes().count());
  assert(reinterpret_cast<uintptr_t>(image.data()) % kPackedLineBytes == 0);
  std::vector<std::vector<TensorPiece>> ranks;
  Bytes total;
  for (int32_t rank = 0; rank < layout.ranks; ++rank) {
    ranks.push_back(PlanTensors(model, layout, rank));
    for (const TensorPiece& piece : ranks.back()) total += piece.SourceBytes();
  }
  Builder builder(source, layout.format, total, progress);
  const auto part = static_cast<size_t>(layout.total.count());
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const absl::Status status = builder.Write(ranks[rank], image.subspan(rank * part, part));
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckTensors(const Checkpoint& checkpoint, const ModelConfig& model,
                          const ImageLayout& layout) {
  return CheckPieces(checkpoint, model, PlanTensors(model, layout));
}

absl::Status BuildImage(const Checkpoint& checkpoint, const ModelConfig& model,
                        const ImageLayout& layout, absl::Span<std::byte> image,
                        const ByteProgress& progress) {
  absl::Status status = CheckTensors(checkpoint, model, layout);
  if (!status.ok()) return status;
  return Build(CheckpointSource(checkpoint), model, layout, image, progress);
}

absl::Status BuildDummyImage(uint64_t seed, const ModelConfig& model, const ImageLayout& layout,
                             absl::Span<std::byte> image, const ByteProgress& progress) {
  return Build(DummySource(seed, model.norm_weight_offset), model, layout, image, progress);
}

}  // namespace palimpsest
