#include "worker/model/image_builder.h"

#include <algorithm>
#include <atomic>
#include <cassert>
#include <cstring>
#include <string>
#include <thread>
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
// That make numbers; more would only wait for memory.
constexpr int kMostThreads = 16;

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

// A piece of a rank, or rows of one whose rows keep their order: what is written in one go.
struct Portion {
  const TensorPiece* piece;
  absl::Span<std::byte> part;  // of the image, the rank's
  int64_t row = 0;
  int64_t count = 0;

  int64_t bytes() const { return count * piece->width * 2; }
};

void AddPortions(const std::vector<TensorPiece>& pieces, absl::Span<std::byte> part,
                 std::vector<Portion>& portions) {
  for (const TensorPiece& piece : pieces) {
    int64_t step = piece.rows;
    if (!piece.is_vector() && piece.order == RowOrder::kPlain) {
      step = std::max<int64_t>(1, kPieceElements / piece.width);
    }
    for (int64_t row = 0; row < piece.rows; row += step) {
      portions.push_back({&piece, part, row, std::min(step, piece.rows - row)});
    }
  }
}

// Writes portions, one at a time. Several builders may write different ones of an image at once.
class Builder {
 public:
  Builder(const Source& source, WeightFormat format) : source_(source), format_(format) {}

  absl::Status Write(const Portion& portion) {
    const TensorPiece& piece = *portion.piece;
    target_ = portion.part.data() + piece.target.count();
    if (piece.is_vector()) return WriteVector(piece);
    absl::Status status = Read(piece, piece.first_row + portion.row, portion.count);
    if (!status.ok()) return status;
    if (piece.order == RowOrder::kPlain) {
      Place(piece, rows_, piece.target_first_row + portion.row, portion.count, piece.width);
    } else {
      Reorder(piece);
    }
    return absl::OkStatus();
  }

 private:
  absl::Status WriteVector(const TensorPiece& piece) {
    if (format_ == WeightFormat::kRowMajor) {
      auto* to = reinterpret_cast<uint16_t*>(target_) + piece.target_first_row;
      return source_.ReadBf16(piece, piece.first_row, absl::MakeSpan(to, piece.rows));
    }
    auto* to = reinterpret_cast<float*>(target_) + piece.target_first_row;
    return source_.ReadFloats(piece, piece.first_row, absl::MakeSpan(to, piece.rows));
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
      std::memcpy(target_ + first * cols * 2, rows.data(), rows.size() * sizeof(uint16_t));
    } else {
      PackRows(rows.data(), first, count, piece.target_rows, cols, target_);
    }
  }

  // All rows of the piece were read.
  void Reorder(const TensorPiece& piece) {
    const int64_t rows = piece.rows, cols = piece.cols();
    reordered_.resize(rows_.size());
    if (piece.order == RowOrder::kTransposed) {
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < cols; ++c) reordered_[c * rows + r] = rows_[r * cols + c];
      }
      Place(piece, reordered_, piece.target_first_row, cols, rows);
      return;
    }
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t from = r < rows / 2 ? 2 * r : 2 * r + 1 - rows;
      std::copy_n(&rows_[from * cols], cols, &reordered_[r * cols]);
    }
    Place(piece, reordered_, piece.target_first_row, rows, cols);
  }

  const Source& source_;
  const WeightFormat format_;
  std::byte* target_ = nullptr;  // of the portion's placement
  std::vector<uint16_t> rows_;
  std::vector<uint16_t> reordered_;
};

// The calling thread is one of `threads`, and the one that reports.
absl::Status WriteAll(const Source& source, WeightFormat format,
                      const std::vector<Portion>& portions, const ByteProgress& progress,
                      int threads) {
  int64_t total = 0;
  for (const Portion& portion : portions) total += portion.bytes();
  std::atomic<size_t> next = 0;
  std::atomic<int64_t> done = 0;
  const auto report = [&] {
    if (progress) progress(Bytes(done), Bytes(total));
  };
  std::vector<absl::Status> ends(static_cast<size_t>(threads));
  const auto work = [&](size_t thread) {
    Builder builder(source, format);
    for (size_t i = next++; i < portions.size(); i = next++) {
      ends[thread] = builder.Write(portions[i]);
      if (!ends[thread].ok()) {
        next = portions.size();
        return;
      }
      done += portions[i].bytes();
      if (thread == 0) report();
    }
  };
  std::vector<std::thread> helpers;
  for (size_t thread = 1; thread < ends.size(); ++thread) helpers.emplace_back(work, thread);
  work(0);
  for (std::thread& helper : helpers) helper.join();
  for (const absl::Status& end : ends) {
    if (!end.ok()) return end;
  }
  if (threads > 1) report();
  return absl::OkStatus();
}

absl::Status Build(const Source& source, const ModelConfig& model, const ImageLayout& layout,
                   absl::Span<std::byte> image, const ByteProgress& progress, int threads) {
  assert(static_cast<int64_t>(image.size()) == layout.image_bytes().count());
  assert(reinterpret_cast<uintptr_t>(image.data()) % kPackedLineBytes == 0);
  std::vector<std::vector<TensorPiece>> ranks;
  for (int32_t rank = 0; rank < layout.ranks; ++rank) {
    ranks.push_back(PlanTensors(model, layout, rank));
  }
  const auto part = static_cast<size_t>(layout.total.count());
  std::vector<Portion> portions;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    AddPortions(ranks[rank], image.subspan(rank * part, part), portions);
  }
  return WriteAll(source, layout.format, portions, progress, threads);
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
  return Build(CheckpointSource(checkpoint), model, layout, image, progress, /*threads=*/1);
}

absl::Status BuildDummyImage(uint64_t seed, const ModelConfig& model, const ImageLayout& layout,
                             absl::Span<std::byte> image, const ByteProgress& progress) {
  const int threads = std::clamp<int>(std::thread::hardware_concurrency(), 1, kMostThreads);
  return Build(DummySource(seed, model.norm_weight_offset), model, layout, image, progress,
               threads);
}

}  // namespace palimpsest
